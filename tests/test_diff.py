"""The lesson of this collection is the diff of its scripts: it has to stay small and explained."""

import ast
import difflib
import re

import pytest

from tests.sources import FULL, ROOT, code_lines

LIMITS = {"dp": (6, 10), "ddp": (12, 42)}  # code lines removed, added
MINIMAL = "scripts/minimal/"
ADDED = "ACCUMULATE AMP CLIP LOAD LOG RESTART RESUME SEED STOP"
DIFFS = [  # the old and the new script, the limits, and the words that begin the hunks' comments
    *(("train_single", f"train_{name}", *LIMITS[name], name.upper()) for name in LIMITS),
    (f"{MINIMAL}single", f"{MINIMAL}dp", 3, 3, "DP"),
    (f"{MINIMAL}single", f"{MINIMAL}ddp", 6, 25, "DDP"),
    (f"{MINIMAL}ddp", f"{MINIMAL}fsdp", 4, 18, "FSDP"),
    (f"{MINIMAL}ddp", f"{MINIMAL}ddp_complete", 15, 95, ADDED),
]


def hunks_of(before, after):
    """Return where each change begins and ends, in the lines before and in those after."""
    opcodes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [places for kind, *places in opcodes if kind != "equal"]


@pytest.mark.parametrize(("old", "new", "max_removed", "max_added", "words"), DIFFS)
def test_a_script_changes_few_lines_and_says_why(old, new, max_removed, max_added, words):
    text = (ROOT / f"{new}.py").read_text()
    before, after = code_lines((ROOT / f"{old}.py").read_text()), code_lines(text)
    hunks = hunks_of(*([line for _, line in side] for side in (before, after)))
    assert 0 < sum(end - begin for _, _, begin, end in hunks) <= max_added, FULL
    assert sum(end - begin for begin, end, _, _ in hunks) <= max_removed, FULL
    seen = set()
    for i, j, begin, end in hunks:
        assert begin < end, f"only removes {before[i:j]}: nothing is left to carry the reason"
        comment = []
        for line in reversed(text.splitlines()[: after[begin][0] - 1]):
            if not line.strip().startswith("#"):
                break
            comment.append(line.strip())
        found = re.findall(r"^# ([A-Z, ]+): ", "\n".join(comment), re.MULTILINE)
        marks = {*", ".join(found).split(", ")} & {*words.split()}
        assert marks, f"no reason above {after[begin:end]}"
        seen |= marks
    assert seen == {*words.split()}


# What a reader of a script has to look up: neither Python nor PyTorch has it.
NAMES = {"single": 24, "dp": 29, "ddp": 24}


def house_names(path):
    """Return the names of this house in a script.

    These are the functions and classes that it imports from the project, what it takes from the
    project's modules, and the attributes of the objects that those functions and classes return.
    """
    tree = ast.parse(path.read_text())
    own = {"data", "models", "utils"}
    house = {"data", "models"}  # names that stand for something of the project
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in own:
            house |= {alias.name for alias in node.names}
    made = set()
    for node in ast.walk(tree):
        is_assigned = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if is_assigned and root_of(node.value) in house and isinstance(node.targets[0], ast.Name):
            made.add(node.targets[0].id)
        if isinstance(node, ast.withitem) and root_of(node.context_expr) in house:
            made.add(node.optional_vars.id)
    # What PyTorch made, or returns from its own classes, and plain values.
    made -= {"args", "device", "devices", "lr", "model", "options", "raw_model"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and root_of(node) in house | made:
            found.add(ast.unparse(node).partition("(")[0])
        if isinstance(node, ast.Name) and node.id in house:
            found.add(node.id)
    # ``run.metrics`` and ``data`` are part of a longer name.
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def root_of(node):
    """Return the name with which an expression such as ``run.metrics.update(loss)`` begins."""
    while not isinstance(node, ast.Name):
        node = getattr(node, "func", None) or getattr(node, "value", None)
        if node is None:
            return ""
    return node.id


def test_a_reader_of_a_script_looks_up_few_names():
    names = {name: house_names(ROOT / f"train_{name}.py") for name in NAMES}
    for name, limit in NAMES.items():
        assert len(names[name]) <= limit, sorted(names[name])
    assert names["ddp"] - names["single"] == {"launch"}, "all that DDP adds is PyTorch's"


def change(other):
    """Return the diff of the minimal scripts, without their docstrings and comments."""
    sides = []
    for name in ("single", other):
        text = (ROOT / f"scripts/minimal/{name}.py").read_text().split('"""', 2)[2]
        lines = text.splitlines()
        sides.append([line for line in lines if line.strip() and line.strip()[0] != "#"])
    lines = difflib.unified_diff(*sides, n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_change_in_the_readme_is_that_of_the_minimal_scripts(name):
    """Above its lines stand sentences, each behind an @@. A new line stands beside its old one."""
    cuts = re.findall(r"```diff\n(@@ .*?)```", (ROOT / name).read_text(), re.DOTALL)
    for cut, other in zip(cuts, ("dp", "ddp"), strict=True):
        for sign in "-+":
            shown, wanted = cut.splitlines(), change(other)
            assert [x for x in shown if x[0] == sign] == [x for x in wanted if x[0] == sign]
