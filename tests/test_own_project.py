"""Data, networks and tasks of another kind, through the scripts from start to end.

The README's own edits run in tests/test_commands.py; these are what others may bring.
"""

import sys

import pytest
import torch

from tests.processes import ROOT, run, succeed, summary

TASKS = {  # the technique, the least accuracy, and flags
    "colour100": ("ddp", 0.9, ["--epochs", 6, "--no-augment"]),
    "regression": ("dp", 0.8, ["--epochs", 6, "--lr", 0.01, "--max-grad-norm", 0, "--no-augment"]),
    "depth": ("ddp", 0.9, ["--epochs", 4, "--lr", 0.05, "--find-unused-parameters"]),
}


def train(technique, own, folder, *flags):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    common = ["--model", "mine", "--dataset", "mine", "--threads", 1, "--no-progress"]
    script = [ROOT / "tests" / "own.py", f"train_{technique}.py", "--batch-size", 12]
    command = [sys.executable, *(launcher if technique == "ddp" else []), *script, *common]
    return run(*command, "--run-dir", folder, *flags, OWN=own)


@pytest.mark.slow
@pytest.mark.parametrize("own", TASKS)
def test_it_trains_to_the_end(own, tmp_path):
    technique, least, flags = TASKS[own]
    succeed(train(technique, own, tmp_path / "run", *flags))
    assert summary(tmp_path / "run")["test_count"] == 600
    assert summary(tmp_path / "run")["test_accuracy"] > least


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(tmp_path):
    """Weights that are not finite would end the run; the scale is halved once, from 65,536."""
    succeed(train("ddp", "overflow", tmp_path / "run", "--amp", "fp16", "--max-steps", 5))
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert saved["scaler"]["scale"] == 2**15


@pytest.mark.parametrize("own", ["depth", "uneven"])
def test_a_graph_that_changes_is_told_what_helps(own, tmp_path):
    """From step to step, or between ranks, where gloo aborts the other rank with a stack."""
    ended = train("ddp", own, tmp_path / "run", "--max-steps", 9)
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if ".py: error: " in line]
    assert any("--find-unused-parameters" in line or "another branch" in line for line in lines)
    assert own == "depth" or sum("rank 0 lost rank 1" in line for line in lines) == 1, ended.stderr
