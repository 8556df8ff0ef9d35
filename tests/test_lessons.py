"""The lessons: each runs from any folder, can be guessed, and ends with its claim."""

import ast
import subprocess
import sys

import pytest

from tests.processes import LIMIT, ROOT, succeed

FOLDER = ROOT / "scripts/lessons"
LESSONS = sorted(FOLDER.glob("[0-9]*.py"))
# The others take a few seconds each, and are slow together.
QUICK = {"26_never_averaged"}
CASES = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
    for path in LESSONS
]


@pytest.mark.parametrize("path", CASES)
def test_a_lesson_begins_with_its_question_and_ends_with_what_it_has_shown(path, tmp_path):
    question = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    ended = succeed(sys.executable, path, cwd=tmp_path)
    lines = ended.stdout.splitlines()
    assert question.endswith("?")
    assert lines[0] == question
    assert lines[-1].startswith("Shown: ")
    assert "terminate called" not in ended.stderr, "a reader would take the abort for a failure"


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_can_be_guessed_and_needs_torch_alone(path):
    tree = ast.parse(path.read_text())
    doc = ast.get_docstring(tree).splitlines()
    answers = [line[:2] for line in doc if line[1:3] == ") "]
    assert answers == ["a)", "b)", "c)"]
    assert doc[2] not in answers, "no setting before the possible answers"
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.partition(".")[0])
    assert modules <= {"torch", "_lesson"} | sys.stdlib_module_names


@pytest.mark.parametrize(
    ("guess", "verdict"),
    [("c", "was right"), pytest.param("a)", "was wrong", marks=pytest.mark.slow)],
)
def test_a_guess_is_compared_with_the_answer(guess, verdict):
    command = [sys.executable, FOLDER / "03_data_parallel_by_hand.py", "--predict"]
    more = {"capture_output": True, "text": True, "timeout": LIMIT}
    found = subprocess.run(command, input=f"{guess}\n", **more)
    before, _, after = found.stdout.partition("Your guess")
    # What one needs in order to guess, and not what explains the answer.
    assert "A batch of 512 goes through" in before
    assert "scatter the batch" not in before
    assert f"Your guess, {guess[0]}), {verdict}" in after.splitlines()[-1]


@pytest.mark.gpu(1)
def test_a_rank_is_forked_after_a_backward_on_a_machine_with_a_gpu(tmp_path):
    assert "Shown: " in succeed(sys.executable, FOLDER / "01_one_step.py", cwd=tmp_path).stdout
