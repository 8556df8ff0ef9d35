"""The lesson of this collection is the diff of its scripts: it has to stay small and explained."""

import ast
import builtins
import difflib
import inspect
import keyword
import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.sources import ROOT, code_lines
from tests.test_house import FULL

LIMITS = {"dp": (6, 10), "ddp": (12, 42)}  # code lines removed, added
MINIMAL = "scripts/minimal/"
ADDED = "ACCUMULATE AMP CLIP LOAD LOG RESTART RESUME SEED STOP"
DIFFS = [  # the old and the new script, the limits, and the words that begin the hunks' comments
    *(("train_single", f"train_{name}", *LIMITS[name], name.upper()) for name in LIMITS),
    (f"{MINIMAL}single", f"{MINIMAL}dp", 3, 3, "DP"),
    (f"{MINIMAL}single", f"{MINIMAL}ddp", 6, 20, "DDP"),
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


# What DDP asks of anyone who uses it, by a call where there is one, else by words of a comment.
ACTS = {
    "the environment": 'os.environ["LOCAL_RANK"]',
    "the process group": "dist.init_process_group(",
    "other random numbers on each rank": "random numbers, since",
    "a share of the samples": "# DDP: the sampler",
    "the global batch": "* world_size",
    "the unpadded test share": "range(rank, len(test_set), world_size)",
    "the wrapper": "= DistributedDataParallel(",
    "no all-reduce before the last micro-step": "model.require_backward_grad_sync = ",
    "the all-reduce in the backward": "averages the gradients",
    "the buffers before an evaluation": "dist.broadcast(buffer, src=0)",
    "the sums of the metrics": "dist.all_reduce(",
    "rank 0 alone writes": "rank 0 alone writes",
    "the end": "dist.destroy_process_group()",
}


def added_lines(old, new):
    """Return the lines, comments included, that a script has beyond another one."""
    texts = [(ROOT / f"{name}.py").read_text().partition('"""\n\n')[2] for name in (old, new)]
    changes = difflib.ndiff(*(text.splitlines() for text in texts))
    return [line[2:] for line in changes if line.startswith("+ ")]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("prefix", ["train_", MINIMAL])
def test_each_act_of_ddp_stands_once_in_the_diff(prefix, act):
    added = "\n".join(added_lines(f"{prefix}single", f"{prefix}ddp"))
    is_asked = prefix == "train_" or "micro-step" not in act  # ddp.py does not accumulate
    assert added.count(ACTS[act]) == is_asked, f"{act}: {ACTS[act]}"


def test_few_names_of_this_house_stand_in_what_ddp_adds():
    """A reader has to look them up: neither Python nor PyTorch has them, nor does the baseline."""
    script = (ROOT / "train_ddp.py").read_text()
    added = [line.strip() for line in added_lines("train_single", "train_ddp")]
    code = {line for _, line in code_lines(script) if line.strip() in added}
    words = (re.sub('".*?"', "", line).partition("#")[0] for line in code)
    names = {name for line in words for name in re.findall(r"[^\W\d]\w*", line)}
    baseline = (ROOT / "train_single.py").read_text()
    classes = (nn.SyncBatchNorm, nn.parallel, DistributedDataParallel, timedelta)
    known = {*dir(builtins), *dir(torch), *dir(dist), *dir(os), *keyword.kwlist}
    known.update(*map(dir, (nn, *classes)), re.findall(r"\w+", baseline))
    known.update(re.findall(r"self\.(\w+)", inspect.getsource(DistributedDataParallel)))
    for function in (dist.init_process_group, DistributedDataParallel, dist.broadcast, DataLoader):
        known.update(inspect.signature(function).parameters)
    # What the script binds itself is explained where it stands.
    tree = ast.walk(ast.parse(script))
    known |= {n.id for n in tree if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assert len(names - known) <= 5, names - known


def test_the_baseline_knows_nothing_of_the_others():
    assert "# D" not in (ROOT / "train_single.py").read_text()


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
    """Between its lines stand sentences, each behind an @@."""
    cuts = re.findall(r"```diff\n([-+][^-].*?)```", (ROOT / name).read_text(), re.DOTALL)
    lines = [[line for line in cut.splitlines() if line[:2] != "@@"] for cut in cuts]
    assert lines == [change("dp"), change("ddp")]
    assert all("\n@@ " in cut for cut in cuts)
