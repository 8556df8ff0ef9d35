"""The three scripts as a user starts them: what they train, count, report and continue."""

import os
import re
import shutil

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import data
import models
from tests.documents import ENGLISH, rows, sections, spans
from tests.layouts import distance, state, train
from tests.processes import ROOT, Training, error_line, succeed

TECHNIQUES = ("single", "dp", "ddp")
SLOW = pytest.mark.slow
# Others build on these names in summary.json.
CONTRACT = """
    script technique dataset model parameters world_size num_devices device backend batch_size
    global_batch_size epochs global_step seed test_correct test_count test_accuracy test_loss
    train_images_per_second startup_seconds train_seconds total_seconds peak_memory_bytes
    weights_sha256 torch_version resumed_from
"""


@torch.no_grad()
def score(model, weights, data_dir):
    """Return how many images of the test set these weights get right, of how many, and the loss."""
    model = models.build_model(model).eval()
    model.load_state_dict(weights)
    images, labels = data.load_tensors("synthetic", str(data_dir))[1].tensors
    outputs = model(images)
    loss = nn.functional.cross_entropy(outputs, labels).item()
    return int((outputs.argmax(1) == labels).sum()), len(labels), loss


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_script_trains_and_reports(technique, training, short_dir):
    """summary.json, status.json, metrics.jsonl and TensorBoard's curves, as running.md has them."""
    devices = 1 if technique == "single" else 2
    extra = ["--epochs", 1.25, "--batch-size", 32, "--log-every", 3]
    ended = succeed(training.run(technique, *extra))
    facts, row, steps = training.summary, training.metrics[-1], 75 // devices
    processes = 2 if technique == "ddp" else 1
    text = (ROOT / "docs" / "running.md").read_text()
    assert facts.keys() >= set(CONTRACT.split())
    assert [key for key in CONTRACT.split() if f"`{key}`" not in text] == []
    assert facts["script"] == f"train_{technique}.py"
    assert (facts["world_size"], facts["num_devices"]) == (processes, devices)
    assert (facts["global_batch_size"], facts["global_step"]) == (32 * devices, steps)
    assert facts["backend"] == ("gloo" if technique == "ddp" else None)
    assert len(facts["peak_memory_bytes"]) == processes
    assert all(each > 2**26 for each in facts["peak_memory_bytes"]), "PyTorch alone takes more"
    assert facts["test_accuracy"] == row["test_accuracy"] == facts["test_correct"] / 500 > 0.5
    assert row["images"] == steps * 32 * devices
    weights = state(training.folder)["model"]
    counts = {int(value) for name, value in weights.items() if "batches_tracked" in name}
    assert counts == {steps}, "each epoch trains in the mode for training"
    told = facts["test_correct"], facts["test_count"], pytest.approx(facts["test_loss"], rel=1e-4)
    assert score("convnet", weights, short_dir) == told, "on all ranks the model that is saved"
    assert training.status["state"] == "complete"
    names = {path.name for path in training.folder.iterdir()}
    assert {"args.json", "metrics.jsonl", "checkpoints", "summary.json"} <= names

    board = EventAccumulator(str(training.folder)).Reload()
    parts = [part for path in ENGLISH for part in sections(path)]
    told = {tag for part in parts for row in rows(part.text) for tag in spans(row[0])}
    assert set(board.Tags()["scalars"]) == {
        tag for tag in told if re.match(r"(step|t\w+|running\w+)/\w+$", tag)
    }
    rates = [event.value for event in board.Scalars("step/learning_rate")]
    assert len({*rates}) == steps // 3, "--log-every"

    assert ended.stdout.count("test accuracy") == 1, "one rank reports"
    assert f"steps   {steps} in all, which is few" in ended.stdout


def test_an_owed_evaluation_counts_every_image_once(training, short_dir):
    """Killed after the only epoch was trained. 500 images divide by neither 3 nor 7."""
    extra = ["--model", "linear", "--batch-size"]
    training.run("single", *extra, 192, ALTER="SIGKILL", ALTER_AT="evaluate")
    assert training.status["state"] == "running"
    assert not (training.folder / "metrics.jsonl").exists()
    succeed(training.run("ddp", *extra, 64, "--resume", processes=3))
    facts = training.summary
    found = facts["test_correct"], facts["test_count"], pytest.approx(facts["test_loss"])
    assert score("linear", state(training.folder)["model"], short_dir) == found
    assert facts["global_step"] == 10, "nothing was trained on the way"
    assert len(training.metrics) == 1


def test_any_script_resumes_any_other(training):
    """In the middle of an epoch, at the same global batch."""
    for i, technique in enumerate(("single", "dp", "ddp", "single")):
        extra = ["--model", "mlp", "--max-steps", 4 * (i + 1), *(["--resume"] if i else [])]
        extra += ["--batch-size", 96 if technique == "single" else 48, "--log-every", 1]
        succeed(training.run(technique, *extra))
        facts = training.summary
        assert (facts["technique"], facts["global_step"]) == (technique, 4 * (i + 1))
        assert facts["resumed_from"] == (4 * i or None)
        assert [row["epoch"] for row in training.metrics] == [1], "the unfinished one is replaced"
    board = EventAccumulator(str(training.folder)).Reload()
    curve = board.Scalars("running_mean_rank_0/loss")
    steps = [event.step // 96 for event in curve]
    assert steps == list(range(1, 17)), "TensorBoard shows one curve"


def test_clipping_bounds_the_true_gradient(synthetic_dir, tmp_path):
    """With fp16 the gradient is scaled by 65,536 until it is unscaled, and then clipped."""
    torch.manual_seed(0)
    before = models.build_model("linear").state_dict()
    for name, norm, devices in (("fp16", 0.01, 2), ("bf16", 0, 1)):
        extra = ["--amp", name, "--max-grad-norm", norm, "--max-steps", 1, "--weight-decay", 0]
        folder, layout = tmp_path / name, ("single" if devices == 1 else "dp", devices, 1)
        after, _ = train(layout, "linear", folder, synthetic_dir, *extra, dtype="float32")
        moved = torch.cat([(after[k] - before[k]).flatten() for k in before]).norm()
        rate = Training(synthetic_dir, folder).summary["lr"]
        assert all(tensor.dtype == torch.float32 for tensor in after.values())
        assert norm == 0 or float(moved) == pytest.approx(rate * norm, rel=1e-2), name
        assert norm or float(moved) > rate * 0.1, "a norm of 0 does not clip"


def test_a_run_is_not_overwritten_and_its_weights_start_another(training, short_dir, tmp_path):
    """Those of another network as far as they fit, which is said."""
    extra = ["--model", "mlp", "--max-steps", 3]
    succeed(training.run("single", *extra))
    before = training.summary
    refused = error_line(training.run("single", *extra))
    assert "holds a run (complete): continue it with --resume" in refused
    told = succeed(training.run("ddp", *extra, "--resume")).stdout
    assert told.count("is complete: nothing to resume") == 1
    other_seed = error_line(training.run("single", *extra, "--resume", "--seed", 1), 1)
    assert "was trained with seed 0, this command says 1" in other_seed
    assert training.summary == before

    again, other = (Training(short_dir, tmp_path / name) for name in "ab")
    weights = ["--init-weights", training.folder / "checkpoints" / "last.pt", "--max-steps", 1]
    told = succeed(again.run("dp", "--model", "mlp", *weights, "--lr", 1e-12)).stdout
    assert "weights loaded 6 tensors" in told
    assert distance(state(training.folder)["model"], state(again.folder)["model"]) < 1e-6
    assert "nothing in" in error_line(other.run("single", "--model", "linear", *weights), 1)


@SLOW
def test_a_model_is_compiled_once_for_training(training):
    """DDP's warm-up comes with the first batch's size and strides, or it would compile twice."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: torch.compile writes C++ for a CPU")
    more = {"timeout": 280, "real": True, "TORCH_LOGS": "recompiles"}
    told = succeed(training.run("ddp", "--model", "linear", "--max-steps", 3, "--compile", **more))
    assert told.stderr.count("GLOBAL_STATE changed: grad_mode"), "for the evaluation"
    assert "mismatch" not in told.stderr


@SLOW
@pytest.mark.timeout(900)
def test_the_defaults_reach_99_percent_of_real_mnist(synthetic_dir, tmp_path):
    """Of the drawn digits, which are easier, where MNIST_ROOT names no real ones."""
    real = os.environ.get("MNIST_ROOT")
    training = Training(real or synthetic_dir, tmp_path / "run")
    extra = ["--dataset", "mnist"] if real else []
    succeed(training.run("single", *extra, timeout=600))
    assert training.summary["test_accuracy"] >= (0.99 if real else 0.995)
    assert training.summary["test_count"] == 10_000
