"""Every lesson runs, and its exit status says whether its claims held."""

import re
import subprocess
import sys

import pytest

from tests.documents import LESSONS, problems, quoted
from tests.processes import ROOT, run

FOLDER = ROOT / "scripts" / "lessons"
TIMEOUT = 150.0  # seconds; a lesson ends itself after 120
# They wait on purpose, compute for a measurement, or start processes several times.
SLOW = {
    *("batch_norm_shares", "break_rank_zero_collective", "break_thread_oversubscription"),
    *("break_timeout", "break_world_size", "ddp_by_hand", "init_methods", "join_uneven"),
    *("model_parallel", "process_numbers", "threads_and_gil", "zero_first"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LESSONS]
)
def test_a_lesson_shows_what_it_claims(name):
    """It prints what the documents quote from it, and the findings of the check."""
    docstring = (FOLDER / f"{name}.py").read_text().split('"""')[1]
    assert docstring.rsplit("\n\n", 1)[-1].startswith("It prints "), docstring
    finished = run(sys.executable, f"scripts/lessons/{name}.py", timeout=TIMEOUT)
    assert finished.returncode == 0, finished.text
    assert "\nshown: " in finished.stdout
    assert "Traceback" not in finished.text
    for group, messages, lessons in problems():
        if group == "Messages of PyTorch" and name in lessons:
            patterns = [re.escape(line).replace(r"\.\.\.", ".*") for line in messages]
            assert any(re.search(each, finished.text) for each in patterns), messages
    numbers, words = quoted(name)
    printed = [float(number) for number in re.findall(r"\d+\.\d+", finished.stdout)]
    for number in map(float, numbers):  # the last digit differs between processors
        assert any(abs(number - each) <= 0.02 * number for each in printed), number
    for text in words:
        assert text in finished.text, text
    rows = (ROOT / "scripts/check/findings.txt").read_text().splitlines()[1:]
    for _, finding, lesson, _ in ([*map(str.strip, row.split("|"))] for row in rows):
        assert lesson != name or f"'{finding}'" in finished.stdout, finding


def test_a_lesson_that_breaks_something_asks_first():
    for name in LESSONS:
        asks = re.search(r"^    start\(main, \"", (FOLDER / f"{name}.py").read_text(), re.MULTILINE)
        assert bool(asks) == name.startswith("break_"), name
    command = [sys.executable, "scripts/lessons/break_set_epoch.py", "--predict"]
    told = subprocess.run(
        command, cwd=ROOT, input="yes\n", capture_output=True, text=True, timeout=TIMEOUT
    )
    assert told.stdout.startswith("The sampler shuffles. Is the order of the second epoch")
    assert told.stdout.endswith("\nyour guess was: yes\n")


@pytest.mark.parametrize(
    ("main", "printed"),
    [
        ('lambda: {"two is two": True, "one is two": False}', "NOT SHOWN: one is two"),
        ("dict", ""),  # it claims nothing
    ],
)
def test_the_exit_status_is_the_verdict(tmp_path, main, printed):
    lesson = tmp_path / "lesson.py"
    lesson.write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\nimport _lesson\n"
        f"if __name__ == '__main__':\n    _lesson.start({main})\n"
    )
    finished = run(sys.executable, lesson, timeout=TIMEOUT)
    assert finished.returncode == 1, finished.text
    assert printed in finished.text
