"""The three scripts are the lesson: they share their lines, and their differences are small.

If a change does not fit the limits here, say it more plainly, or take away what is worth less.
"""

import difflib
import re
from graphlib import TopologicalSorter

import pytest

from tests.processes import ROOT

DIFFS = {"dp": (6, 12), "ddp": (17, 60)}  # code lines removed and added
NAMES = {"single": 27, "dp": 29, "ddp": 30}
TEXTS = {name: (ROOT / f"train_{name}.py").read_text() for name in NAMES}


def code_lines(text):
    """Return the lines that are neither import, docstring, comment nor blank."""
    lines = re.sub(r'(?s)""".*?"""', "", text).splitlines()
    return [line for line in lines if line.strip() and not re.match(r"\s*#|import |from ", line)]


def changes(before, after):
    """Yield the lines that each change removes, and those that it adds."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind != "equal":
            yield before[i:j], after[k:m]


@pytest.mark.parametrize("technique", DIFFS)
def test_the_diff_that_a_learner_reads_is_short(technique):
    single, other = (code_lines(TEXTS[name]) for name in ("single", technique))
    hunks = [*changes(single, other)]
    for side, limit in enumerate(DIFFS[technique]):
        assert 0 < sum(len(hunk[side]) for hunk in hunks) <= limit


@pytest.mark.parametrize("technique", DIFFS)
def test_the_scripts_are_equal_but_for_hunks_that_begin_with_the_reason(technique):
    """Docstring, imports, and the last lines, which name the technique, are left out."""
    sides = []
    for name in ("single", technique):
        _, _, text = TEXTS[name].partition("\nSUMS = ")
        sides.append(text.partition("\nif __name__ ==")[0].splitlines())
    for removed, added in changes(*sides):
        first = next((line.strip() for line in added if line.strip()), "")
        assert first.startswith(f"# {technique.upper()}: "), (removed, added)


# The project's modules, and the objects that they make.
HOUSE = "checkpoint|data|models|optim|logger|position|sampler|transform|stop_signal"


@pytest.mark.parametrize("technique", NAMES)
def test_a_reader_looks_up_few_names(technique):
    """Names that neither Python nor PyTorch has: imported ones, and attributes of HOUSE."""
    text = TEXTS[technique]
    names = {*re.findall(rf"(?<![\w.])(?:{HOUSE})\.\w+", "\n".join(code_lines(text)))}
    names.discard("transform.device")  # a name of PyTorch's own, as in ``module.device``
    for line in re.findall(r"(?m)^from utils\.\w+ import (.*)", text):
        names |= {*line.split(", ")}
    assert 0 < len(names) <= NAMES[technique], sorted(names)


def test_the_imports_make_no_circle_and_no_module_imports_a_script():
    paths = [*ROOT.glob("*.py"), *ROOT.glob("utils/[a-z]*.py")]
    texts = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in paths
    }
    used = {}
    for name, text in texts.items():
        found = set(re.findall(r"(?m)^ *(?:import|from) ([\w.]+)", text))
        for line in re.findall(r"(?m)^ *from utils import (.*)", text):
            found |= {f"utils.{module}" for module in line.split(", ")}
        used[name] = found & texts.keys()
        assert not any(module.startswith("train_") for module in used[name]), name
    TopologicalSorter(used).prepare()  # the error names the circle
