"""Every lesson runs as its docstring says, and its exit status says whether its claims held."""

import re
import subprocess
import sys

import pytest

from tests.processes import ROOT, run
from tests.test_docs import LESSONS, symptoms

FOLDER = ROOT / "scripts" / "lessons"
TIMEOUT = 150.0  # seconds; a lesson ends itself after 120
# Ten seconds and more, most of which they wait on purpose or compute for a measurement.
SLOW = {
    *("break_every_rank_saves", "break_thread_oversubscription", "break_timeout"),
    *("break_world_size", "ddp_by_hand", "join_uneven"),
}


def test_no_lesson_imports_another():
    for name in LESSONS:
        source = (FOLDER / f"{name}.py").read_text()
        imported = re.findall(r"^\s*(?:from|import) (\w+)", source, flags=re.MULTILINE)
        assert imported
        assert not {*imported} & {*LESSONS}, name


def test_each_lesson_names_what_the_check_of_scripts_says():
    for line in (ROOT / "scripts/check/findings.txt").read_text().splitlines()[1:]:
        _, finding, lesson, _ = map(str.strip, line.split("|"))
        if lesson:
            assert f'"{finding}"' in (FOLDER / f"{lesson}.py").read_text().partition("import ")[0]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LESSONS]
)
def test_a_lesson_shows_what_it_claims(name):
    """Run by the command in its docstring, it prints a line of each symptom that names it."""
    source = (FOLDER / f"{name}.py").read_text()
    commands = re.findall(r"^python (\S+)$", source.split('"""')[1], flags=re.MULTILINE)
    assert commands == [f"scripts/lessons/{name}.py"]
    finished = run(sys.executable, *commands, timeout=TIMEOUT)
    assert finished.returncode == 0, finished.text
    assert "\nshown: " in finished.stdout
    assert "Traceback" not in finished.text
    for quoted in (literals for literals, lessons in symptoms() if name in lessons and literals):
        patterns = [re.escape(line).replace(r"\.\.\.", ".*") for line in quoted]
        assert any(re.search(each, finished.text) for each in patterns), (quoted, finished.text)


def test_a_lesson_says_what_it_prints_and_one_that_breaks_something_asks_first():
    for name in LESSONS:
        source = (FOLDER / f"{name}.py").read_text()
        assert source.split('"""')[1].rsplit("\n\n", 1)[-1].startswith("It prints "), name
        assert (", ask=" in source or "\n        ask=" in source) == name.startswith("break_"), name
    command = [sys.executable, "scripts/lessons/break_set_epoch.py", "--predict"]
    told = subprocess.run(
        command, cwd=ROOT, input="yes\n", capture_output=True, text=True, timeout=TIMEOUT
    )
    assert told.stdout.startswith("The sampler shuffles. Is the order of the second epoch")
    assert told.stdout.endswith("\nyour guess was: yes\n")


@pytest.mark.parametrize(
    ("main", "status", "printed"),
    [
        ('lambda: {"two is two": True}', 0, "shown: two is two"),
        ('lambda: {"two is two": True, "one is two": False}', 1, "NOT SHOWN: one is two"),
        ("dict", 1, ""),  # it claims nothing
        ("lambda: time.sleep(60)", 1, "Timeout"),
    ],
)
def test_the_exit_status_is_the_verdict(tmp_path, main, status, printed):
    lesson = tmp_path / "lesson.py"
    lesson.write_text(
        f"import sys, time\nsys.path.insert(0, {str(FOLDER)!r})\nimport _lesson\n"
        f"_lesson.TIME_LIMIT = 5.0\nif __name__ == '__main__':\n    _lesson.start({main})\n"
    )
    finished = run(sys.executable, str(lesson), timeout=TIMEOUT)
    assert finished.returncode == status, finished.text
    assert printed in finished.text
