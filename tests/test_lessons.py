"""The lessons: each runs from any folder and ends with its claim, and each is a screen long."""

import ast
import io
import sys
import time
import tokenize

import pytest

from tests.processes import ROOT, run, succeed

FOLDER = ROOT / "scripts/lessons"
LESSONS = sorted(FOLDER.glob("[0-9]*.py"))
# One of each kind. The others take a few seconds each, and are slow together.
QUICK = {"03_data_parallel_by_hand", "26_never_averaged"}
LONG = {"03_data_parallel_by_hand", "11_ddp_by_hand"}
CASES = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
    for path in LESSONS
]
HANG = """
import time
import _lesson as lesson
import torch.distributed as dist

def work(rank, world_size):
    time.sleep(1000 * rank)
    dist.barrier()

lesson.TIME_LIMIT = 2
lesson.start("Does this ever end?")
lesson.run(work, 2)
"""


def code_lines(path):
    """Count the lines without blanks, comments, docstrings and imports."""
    text = path.read_text()
    left_out = set()
    for node in ast.walk(ast.parse(text)):
        # A string that is a statement is a docstring.
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT and token.string.strip():
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


@pytest.mark.parametrize("path", CASES)
def test_lesson_ends_with_its_claim(path, tmp_path):
    question = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
    lines = succeed(sys.executable, path, cwd=tmp_path).stdout.splitlines()
    assert question.endswith("?")
    assert lines[0] == question
    assert lines[-1].startswith("Shown: ")


def test_numbers_have_no_gap():
    assert [path.name[:3] for path in LESSONS] == [f"{i:02}_" for i in range(1, len(LESSONS) + 1)]
    assert 26 <= len(LESSONS) <= 30


@pytest.mark.parametrize("path", [*LESSONS, FOLDER / "_lesson.py"], ids=lambda path: path.stem)
def test_lesson_is_short_and_needs_torch_alone(path):
    assert code_lines(path) <= (90 if path.stem in LONG else 75 if path.stem == "_lesson" else 55)
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.partition(".")[0])
    assert modules <= {"torch", "_lesson"} | sys.stdlib_module_names


def test_time_limit_ends_a_hang(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    begin = time.monotonic()
    ended = run(sys.executable, script, timeout=60, PYTHONPATH=str(FOLDER))
    assert ended.status == 1
    assert "TimeoutError: rank 0 gave no answer within 2 s" in ended.stderr
    assert time.monotonic() - begin < 60
