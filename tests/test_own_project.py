"""Data, networks and tasks of another kind, through the scripts from start to end.

The README's own edits run in tests/test_commands.py; these are what others may bring.
"""

import sys

import pytest
import torch
from PIL import Image

from tests.processes import ALTERED, ROOT, run, succeed, summary

COMPARE = ROOT / "scripts/tools/compare.py"
TECHNIQUES = ("single", "dp", "ddp")

TASKS = {  # flags of train_ddp.py
    "colour100": ["--epochs", 6, "--no-augment"],
    "depth": ["--epochs", 4, "--lr", 0.05, "--find-unused-parameters"],
}


def train(technique, own, folder, *flags, **variables):
    """Train a task of tests/altered.py on two devices, at a global batch of 24."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    common = ["--model", "mine", "--dataset", "mine", "--threads", 1, "--no-progress"]
    size = 24 if technique == "single" else 12
    script = [ALTERED, f"train_{technique}.py", "--batch-size", size, "--run-dir", folder]
    command = [*(launcher if technique == "ddp" else []), *script, *common, *flags]
    return run(sys.executable, *command, ALTER=own, **variables)


@pytest.mark.slow
@pytest.mark.parametrize("own", TASKS)
def test_it_trains_to_the_end(own, tmp_path):
    succeed(train("ddp", own, tmp_path / "run", *TASKS[own]))
    assert summary(tmp_path / "run")["test_count"] == 600
    assert summary(tmp_path / "run")["test_accuracy"] > 0.9


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


def draw_folder(folder):
    """Draw a bright spot into one of four columns, which a vertical flip keeps."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 240), ("test", 60)):
        pixels = torch.randint(120, (count, 16, 16, 3), generator=generator, dtype=torch.uint8)
        for number, image in enumerate(pixels):
            label = number % 4
            image[3:9, 4 * label : 4 * label + 4] = 255
            (folder / part / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.numpy()).save(folder / part / str(label) / f"{number}.png")


def weights_of(folder):
    saved = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["model"]
    return torch.cat([value.flatten() for value in saved.values()])


@pytest.mark.slow
def test_a_folder_of_images_gives_equal_weights_in_all_three_and_after_a_kill(tmp_path):
    """With loader workers, and flipped at random by torchvision."""
    draw_folder(tmp_path)
    flags = ["--data-dir", tmp_path, "--num-workers", 2, "--epochs", 4, "--save-every-steps", 7]
    for technique in TECHNIQUES:
        succeed(train(technique, "folder", tmp_path / technique, *flags))
        assert summary(tmp_path / technique)["test_accuracy"] > 0.9
        torch.testing.assert_close(
            weights_of(tmp_path / technique), weights_of(tmp_path / "single")
        )
    cut = tmp_path / "cut"
    assert train("ddp", "folder", cut, *flags, ALTER_KILL="SIGKILL", ALTER_AT="25").returncode == 1
    succeed(train("ddp", "folder", cut, *flags, "--resume"))
    assert summary(cut)["resumed_from"] == 21
    assert summary(cut)["weights_sha256"] == summary(tmp_path / "ddp")["weights_sha256"]


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(tmp_path):
    """Weights that are not finite would end the run; the scale is halved once, from 65,536."""
    succeed(train("ddp", "overflow", tmp_path / "run", "--amp", "fp16", "--max-steps", 5))
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert saved["scaler"]["scale"] == 2**15


@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_all_state_is_restored_exactly(technique, tmp_path):
    """Two groups of AdamW, an average of the weights, an infinite mask, and plain values."""
    parts = []
    for name, steps in (("calm", [8]), ("disturbed", [5, 8])):
        for count in steps:
            flags = ["--max-steps", count, "--amp", "fp16", *["--resume"] * (count != steps[0])]
            ended = succeed(train(technique, "state", tmp_path / name, *flags))
        file = tmp_path / name / "checkpoints" / "last.pt"
        parts.append(torch.load(file, weights_only=True))
        assert parts[-1].pop("identity")["optimizer"] == "AdamW"
        assert summary(tmp_path / name)["weights_sha256"]
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
