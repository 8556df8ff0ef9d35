"""The house: rooms with arrows that point one way, and scripts that stay small."""

import re
import sys
from graphlib import TopologicalSorter

from tests.processes import run, succeed
from tests.sources import (
    CLUSTER,
    DATASETS,
    FULL,
    GROUND,
    MINIMAL,
    ROOT,
    SCRIPTS,
    TRAINING,
    count,
    imported,
    imports,
    name_of,
)

TOP = [ROOT / "models.py", ROOT / "data.py"]
PROJECT = [*SCRIPTS, *TOP, *GROUND, *TRAINING, *DATASETS, *CLUSTER]
COMPLETE, FSDP = ROOT / "scripts/minimal/ddp_complete.py", ROOT / "scripts/minimal/fsdp.py"


def room_of(module):
    rooms = ("train_", "utils.cluster", "utils.training", "utils.datasets", "utils")
    return next((room for room in rooms if module.startswith(room)), "top")


ARROWS = {name_of(path): {module for module, _ in imports(path)} for path in PROJECT}


def test_the_lesson_stays_small():
    """These scripts are what a learner reads. How large the rest is, a maintainer watches."""
    limits = [*zip(SCRIPTS, (65, 75, 95), strict=True), (COMPLETE, 142), (FSDP, 74)]
    limits += [(path, 61) for path in MINIMAL if path not in (COMPLETE, FSDP)]
    too_long = {path.name: count([path]) for path, limit in limits if count([path]) > limit}
    assert not too_long, FULL


def test_the_arrows_point_one_way_and_make_no_circle():
    """Each room uses only those that stand before it. So no two rooms use each other."""
    rooms = ("utils", "utils.datasets", "top", "utils.training", "utils.cluster", "train_")
    for module, used in ARROWS.items():
        own = rooms.index(room_of(module))
        wrong = [name for name in used if rooms.index(room_of(name)) > own]
        assert not wrong, f"{module} uses {wrong}"
    TopologicalSorter(ARROWS).prepare()  # the error names the circle
    for path in PROJECT:  # in a function an import could only dodge a circle
        hidden = [module for module, is_inside in imports(path) if is_inside]
        assert not hidden, f"{path}: {hidden}"


def test_what_the_code_imports_is_required():
    paths = [*PROJECT, *ROOT.glob("scripts/tools/*.py")]
    found = {name.partition(".")[0] for path in paths for name, _ in imported(path)}
    own = {path.stem for path in paths} | {"utils"}
    required = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert found - own - sys.stdlib_module_names - {*required} == {"numpy"}, "which torch asks for"


# Imports modules, and prints which signal handlers and variables are then others.
UNCHANGED = """
import importlib, os, signal, sys
sys.path[:0] = ["scripts/tools"]
import torch
def now():
    return {n: signal.getsignal(n) for n in signal.valid_signals()}, dict(os.environ)
before = now()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*[{k for k in new if new[k] != old.get(k)} for old, new in zip(before, now())])
"""


def test_importing_a_module_changes_nothing():
    """A tool that imports one keeps its Ctrl-C. Only utils.early, a script's first, is other.

    A tool is a script, too: it may choose NCCL's class before it imports torch.
    """
    modules = [name for name in ARROWS if not name.startswith("train_") and name != "utils.early"]
    assert succeed(run(sys.executable, "-c", UNCHANGED, *modules)).stdout == "set() set()\n"
    tools = sorted(path.stem for path in (ROOT / "scripts" / "tools").glob("[a-z]*.py"))
    assert succeed(run(sys.executable, "-c", UNCHANGED, *tools)).stdout.startswith("set() ")
