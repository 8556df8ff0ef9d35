"""The lessons: each runs from any folder and ends with its claim, and each is a screen long."""

import ast
import sys

import pytest

from tests.processes import ROOT, succeed
from tests.test_scripts import code_lines

FOLDER = ROOT / "scripts/lessons"
LESSONS = sorted(FOLDER.glob("[0-9]*.py"))
# One of each kind. The others take a few seconds each, and are slow together.
QUICK = {"03_data_parallel_by_hand", "26_never_averaged"}
LONG = {"03_data_parallel_by_hand", "11_ddp_by_hand"}
CASES = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
    for path in LESSONS
]


@pytest.mark.parametrize("path", CASES)
def test_lesson_ends_with_its_claim(path, tmp_path):
    question = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    lines = succeed(sys.executable, path, cwd=tmp_path).stdout.splitlines()
    assert question.endswith("?")
    assert lines[0] == question
    assert lines[-1].startswith("Shown: ")


@pytest.mark.gpu(1)
def test_a_rank_is_forked_after_a_backward_on_a_machine_with_a_gpu(tmp_path):
    assert "Shown: " in succeed(sys.executable, FOLDER / "01_one_step.py", cwd=tmp_path).stdout


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_lesson_is_short_and_needs_torch_alone(path):
    assert len(code_lines(path.read_text())) <= (90 if path.stem in LONG else 55)
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.partition(".")[0])
    assert modules <= {"torch", "_lesson"} | sys.stdlib_module_names


def test_numbers_have_no_gap():
    assert [path.name[:3] for path in LESSONS] == [f"{i:02}_" for i in range(1, len(LESSONS) + 1)]
