"""The house: three rooms of bounded size, with arrows that point one way."""

import re
import subprocess
from contextlib import suppress
from graphlib import TopologicalSorter

import pytest

from tests.sources import (
    CHECK,
    CLUSTER,
    CORE,
    DATASETS,
    LESSONS,
    MINIMAL,
    ROOT,
    SCRIPTS,
    code_lines,
    count,
    imports,
    name_of,
)

TOP = [ROOT / "models.py", ROOT / "data.py"]
PROJECT = [*SCRIPTS, *TOP, *CORE, *DATASETS, *CLUSTER]
# What a person reads whose change does not fit.
FULL = (
    "This budget is full, which is meant to hurt: first take something away that is worth less, or"
    " say the same in fewer lines. A higher limit here needs its reason in the commit, see"
    " CONTRIBUTING.md."
)
COMPLETE, FSDP = ROOT / "scripts/minimal/ddp_complete.py", ROOT / "scripts/minimal/fsdp.py"


def room_of(module):
    rooms = ("scripts", "tests", "train_", "utils.cluster", "utils.datasets", "utils")
    return next((room for room in rooms if module.startswith(room)), "top")


ARROWS = {name_of(path): {module for module, _ in imports(path)} for path in PROJECT}


@pytest.mark.parametrize(
    ("room", "limit"),
    [
        *zip(([path] for path in SCRIPTS), (65, 75, 95), strict=True),
        ([*SCRIPTS, *TOP, *CORE], 1900),
        (DATASETS, 220),
        (CLUSTER, 545),
        *(([path], 100) for path in LESSONS),
        *(([path], 55) for path in MINIMAL if path not in (COMPLETE, FSDP)),
        ([FSDP], 68),
        ([COMPLETE], 135),
        (CHECK, 1338),
    ],
    ids=lambda value: str(len(value)) + name_of(value[0]) if isinstance(value, list) else "",
)
def test_a_room_stays_within_its_lines(room, limit):
    sizes = {name_of(path): count([path]) for path in room}
    assert sum(sizes.values()) <= limit, f"{FULL} {sizes}"


@pytest.mark.parametrize(
    ("folder", "limit"),
    [(".", 24_865), ("tests", 7_770), ("scripts/tools", 1_712), ("scripts/check", 1_970)],
)
def test_a_folder_stays_within_its_lines(folder, limit):
    listed = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("needs git, and a clone of one's own")
    sizes = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        with suppress(UnicodeDecodeError, FileNotFoundError):  # a picture; a file just removed
            sizes[name] = len((ROOT / name).read_text(encoding="utf-8").splitlines())
    largest = dict(sorted(sizes.items(), key=lambda item: -item[1])[:8])
    assert sum(sizes.values()) <= limit, f"{FULL} {sum(sizes.values())} lines, mostly of {largest}"


def test_the_arrows_point_one_way():
    """Scripts use the core and the cluster room, which uses the core, which uses the data sets."""
    allowed = {
        "train_": {"top", "utils", "utils.cluster"},
        "utils.cluster": {"utils.cluster", "utils"},
        "utils": {"utils", "top", "utils.datasets"},
        "top": {"top", "utils", "utils.datasets"},
        "utils.datasets": {"utils.datasets", "utils"},
    }
    for module, used in ARROWS.items():
        rooms = {room_of(name) for name in used}
        assert rooms <= allowed[room_of(module)], (module, used)


def test_there_is_no_circle():
    TopologicalSorter(ARROWS).prepare()  # the error names the circle


def test_nothing_but_its_tests_imports_the_check():
    own = "|".join(path.stem for path in CHECK)
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.split():
        found = re.search(rf"^ *(from|import) ({own})\b", (ROOT / name).read_text(), re.MULTILINE)
        assert not found or name.startswith(("scripts/check/", "tests/test_check")), (name, found)


def test_no_import_hides_in_a_function():
    """Of this project's own modules: there it could only dodge a circle."""
    for path in PROJECT:
        hidden = [module for module, is_inside in imports(path) if is_inside]
        assert not hidden, f"{path}: {hidden}"


def test_the_training_stands_in_the_scripts():
    """The other two differ from the baseline by what tests/test_diff.py asks for."""
    text = "\n".join(line for _, line in code_lines(SCRIPTS[0].read_text()))
    for words in (".backward()", "clip_grad_norm_(", "scaler.step(optimizer)", "model(images)"):
        assert words in text
    assert "nn.DataParallel(" in SCRIPTS[1].read_text()
