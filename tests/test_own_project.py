"""Networks and tasks of another kind, through the scripts from start to end.

The README's own edits run in tests/test_commands.py; these are what others may bring.
"""

import sys

import pytest
import torch

from tests.layouts import state
from tests.processes import ROOT, Training, run, succeed, summary

COMPARE = ROOT / "scripts/tools/compare.py"
TECHNIQUES = ("single", "dp", "ddp")


def train(technique, own, folder, *extra):
    """Train a task of tests/altered.py on two devices, at a global batch of 24."""
    common = ["--model", "mine", "--dataset", "mine"]
    common += ["--batch-size", 24 if technique == "single" else 12]
    return Training(folder, folder).run(technique, *common, *extra, ALTER=own)


@pytest.mark.slow
def test_a_regression_has_the_same_losses_in_all_three_and_no_accuracy(tmp_path):
    found = []
    for technique in TECHNIQUES:
        flags = ["--epochs", 3, "--lr", 0.01, "--max-grad-norm", 0, "--no-augment"]
        told = succeed(train(technique, "regression", tmp_path / technique, *flags)).stdout
        assert "accuracy" not in told
        found.append(summary(tmp_path / technique))
    assert {facts["test_accuracy"] for facts in found} == {None}
    assert found[0]["test_loss"] < 0.03, "a constant has 0.08"
    for name in ("test_loss", "test_error"):
        assert [facts[name] for facts in found] == pytest.approx([found[0][name]] * 3, rel=1e-3)
    told = succeed(run(sys.executable, COMPARE, *(tmp_path / name for name in TECHNIQUES))).stdout
    assert "dp" in told


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(tmp_path):
    """Weights that are not finite would end the run; the scale is halved once, from 65,536."""
    succeed(train("ddp", "overflow", tmp_path / "run", "--amp", "fp16", "--max-steps", 5))
    assert state(tmp_path / "run")["scaler"]["scale"] == 2**15


@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_all_state_is_restored_exactly(technique, tmp_path):
    """Two groups of AdamW, an average of the weights, and a buffer that training changes."""
    parts = []
    for name, steps in (("calm", [8]), ("disturbed", [5, 8])):
        for count in steps:
            flags = ["--max-steps", count, "--amp", "fp16", *["--resume"] * (count != steps[0])]
            ended = succeed(train(technique, "state", tmp_path / name, *flags))
        parts.append(state(tmp_path / name))
        assert parts[-1].pop("identity")["optimizer"] == "AdamW"
    assert ("all ranks have rank 0's queue" in ended.stdout) == (technique == "ddp")
    assert [*parts[0]["extra"]] == ["ema"]
    torch.testing.assert_close(*parts, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("own", ["depth", "uneven"])
def test_a_graph_that_changes_is_told_what_helps(own, tmp_path):
    """From step to step, or between ranks, where gloo aborts the other rank with a stack."""
    ended = train("ddp", own, tmp_path / "run", "--max-steps", 9)
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if ".py: error: " in line]
    advice = ("did not receive grad for rank ", "another branch")
    assert any(text in line for line in lines for text in advice), ended.stderr
    assert not any(line.count("--find-unused-parameters") > 1 for line in lines), "told twice"
    assert own == "depth" or sum("rank 0 lost rank 1" in line for line in lines) == 1, ended.stderr
    more = ["--max-steps", 9, "--find-unused-parameters"]
    succeed(train("ddp", own, tmp_path / "helped", *more))
