"""The lessons: each runs from any folder, can be guessed, and ends with its claim."""

import re
import subprocess
import sys

import pytest

from tests.processes import LIMIT, ROOT, succeed

FOLDER = ROOT / "scripts/lessons"
# The others take a few seconds each, and are slow together.
QUICK = {"10_ring_all_reduce"}
CASES = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
    for path in sorted(FOLDER.glob("[0-9]*.py"))
]


@pytest.mark.parametrize("path", CASES)
def test_a_lesson_asks_for_a_guess_and_ends_with_what_it_has_shown(path, tmp_path):
    command = [sys.executable, path, "--predict"]
    more = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": LIMIT}
    ended = subprocess.run(command, input="a\n", **more)
    assert ended.returncode == 0, ended.stderr
    assert "terminate called" not in ended.stderr, "a reader would take the abort for a failure"
    # What one needs in order to guess, and not what explains the answer.
    before, _, after = ended.stdout.partition("Your guess")
    question, *setting, a, b, c = [line for line in before.splitlines() if line]
    assert question.endswith("?")
    assert [line[:2] for line in (a, b, c)] == ["a)", "b)", "c)"]
    assert setting
    shown, verdict = after.splitlines()[-2:]
    assert shown.startswith("Shown: ")
    is_right = "right" if verdict.endswith(f". The answer is {a}") else "wrong"
    assert verdict.startswith(f"Your guess, a), was {is_right}. The answer is ")


def test_a_page_links_each_lesson_under_its_number():
    """The number is in the name of the file, and no two lessons have the same."""
    names = {path.name[:2]: path.name for path in FOLDER.glob("[0-9]*.py")}
    assert len(names) == len(CASES)
    pages = [path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
    links = re.findall(r"(\d\d)\]\([^)\s]*lessons/(\w+\.py)\)", "".join(pages))
    assert set(links) == set(names.items())


@pytest.mark.gpu(1)
def test_a_rank_is_forked_after_a_backward_on_a_machine_with_a_gpu(tmp_path):
    assert "Shown: " in succeed(sys.executable, FOLDER / "01_one_step.py", cwd=tmp_path).stdout
