"""The three scripts are the lesson: they share their lines, and their differences are small."""

import ast
import difflib
import io
import re
import sys
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.processes import succeed

ROOT = Path(__file__).parent.parent
DIFFS = {"dp": (6, 12), "ddp": (17, 60)}  # code lines removed and added
NAMES = {"single": 27, "dp": 29, "ddp": 30}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in (*ROOT.glob("*.py"), *ROOT.glob("utils/[a-z]*.py"))
}
# What a person reads whose change does not fit.
FULL = (
    "The scripts and their diffs are the lesson, and this one has grown too long to read: say it"
    " more plainly, or take away what is worth less."
)
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def text_of(technique):
    return MODULES[f"train_{technique}"].read_text()


def code_lines(text):
    """Return the lines that are neither import, docstring, comment nor blank."""
    skipped = set()
    kept = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node = node.body[0]
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        skipped.update(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            kept.update(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    return [lines[number - 1] for number in sorted(kept - skipped)]


def changes(before, after):
    """Yield the lines that each change removes, and those that it adds."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind != "equal":
            yield before[i:j], after[k:m]


@pytest.mark.parametrize("technique", DIFFS)
def test_the_diff_that_a_learner_reads_is_short(technique):
    hunks = [*changes(*(code_lines(text_of(name)) for name in ("single", technique)))]
    for side, limit in enumerate(DIFFS[technique]):
        found = sum(len(hunk[side]) for hunk in hunks)
        assert 0 < found <= limit, FULL


@pytest.mark.parametrize("technique", DIFFS)
def test_the_scripts_are_equal_but_for_hunks_that_begin_with_the_reason(technique):
    """Docstring, imports, and the last lines, which name the technique, are left out."""
    sides = []
    for text in (text_of("single"), text_of(technique)):
        begin, end = (text.index(line) for line in ("\nSUMS = ", "\nif __name__ =="))
        sides.append(text[begin:end].splitlines())
    for removed, added in changes(*sides):
        first = next((line.strip() for line in added if line.strip()), "")
        assert first.startswith(f"# {technique.upper()}: "), (removed, added)


# The project's modules, and the objects that they make.
HOUSE = "checkpoint|data|models|optim|logger|position|sampler|transform|stop_signal"


@pytest.mark.parametrize("technique", NAMES)
def test_a_reader_looks_up_few_names(technique):
    """Names that neither Python nor PyTorch has: imported ones, and attributes of HOUSE."""
    text = text_of(technique)
    imports = re.findall(r"^from utils\.\w+ import (.*)", text, re.MULTILINE)
    names = {name for line in imports for name in line.split(", ")}
    names |= {*re.findall(rf"(?<![\w.])(?:{HOUSE})\.\w+", "\n".join(code_lines(text)))}
    names -= {"transform.device"}  # a name of PyTorch's own, as in ``module.device``
    assert 0 < len(names) <= NAMES[technique], sorted(names)


def imports(path):
    """Return the modules of this project that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES.keys()


def test_the_imports_make_no_circle_and_no_module_imports_a_script():
    used = {name: imports(path) for name, path in MODULES.items()}
    TopologicalSorter(used).prepare()  # the error names the circle
    for name, modules in used.items():
        assert not any(module.startswith("train_") for module in modules), name


# Imports modules, and prints which signal handlers, variables and threads are then others.
UNCHANGED = """
import importlib, os, signal, sys, threading
import torch, torchvision, tqdm
def state():
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    random = torch.get_rng_state().tolist()
    return handlers, dict(os.environ), torch.get_num_threads(), threading.active_count(), random
before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
print([old for old, new in zip(before, state()) if new != old])
"""


def test_importing_a_module_changes_nothing():
    """So that a notebook or a tool which imports one keeps its Ctrl-C, for example."""
    assert succeed(sys.executable, "-c", UNCHANGED, *MODULES).text == "[]\n"
