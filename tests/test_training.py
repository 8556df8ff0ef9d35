"""The three scripts as a user starts them: what they train, count, report and continue."""

import itertools
import os
import re
import shutil
from functools import partial

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import data
import models
from tests.documents import ENGLISH, rows, sections, spans
from tests.processes import (
    ROOT,
    command,
    error_line,
    flags,
    metrics,
    run,
    script,
    status,
    succeed,
    summary,
    through_altered,
)

TECHNIQUES = ("single", "dp", "ddp")
SLOW = pytest.mark.slow
# Others build on these names in summary.json.
CONTRACT = """
    script technique dataset model parameters world_size num_devices device backend batch_size
    global_batch_size epochs global_step seed test_correct test_count test_accuracy test_loss
    train_images_per_second startup_seconds train_seconds total_seconds peak_memory_bytes
    weights_sha256 torch_version resumed_from
"""


def events(run_dir):
    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    return accumulator


def state(run_dir):
    return torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True, map_location="cpu")


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_script_trains_and_reports(technique, synthetic_dir, tmp_path):
    """summary.json, status.json, metrics.jsonl and TensorBoard's curves, as running.md has them."""
    folder, devices = tmp_path / "run", 1 if technique == "single" else 2
    extra = ["--model", "mlp", "--epochs", 0.04, "--batch-size", 32, "--log-every", 3]
    ended = succeed(run(*command(technique, 2, *flags(synthetic_dir, folder, *extra))))
    facts, row, steps = summary(folder), metrics(folder)[-1], 75 // devices
    processes = 2 if technique == "ddp" else 1
    text = (ROOT / "docs" / "running.md").read_text()
    assert facts.keys() >= set(CONTRACT.split())
    assert [key for key in CONTRACT.split() if f"`{key}`" not in text] == []
    assert facts["script"] == f"train_{technique}.py"
    assert (facts["world_size"], facts["num_devices"]) == (processes, devices)
    assert (facts["global_batch_size"], facts["global_step"]) == (32 * devices, steps)
    assert facts["backend"] == ("gloo" if technique == "ddp" else None)
    assert len(facts["peak_memory_bytes"]) == processes
    assert facts["test_count"] == 10_000
    assert facts["test_accuracy"] == row["test_accuracy"] == facts["test_correct"] / 10_000 > 0.5
    assert row["images"] == steps * 32 * devices
    assert status(folder)["state"] == "complete"
    names = {path.name for path in folder.iterdir()}
    assert {"args.json", "metrics.jsonl", "checkpoints", "summary.json"} <= names

    board = events(folder)
    parts = [part for path in ENGLISH for part in sections(path)]
    told = {tag for part in parts for row in rows(part.text) for tag in spans(row[0])}
    assert set(board.Tags()["scalars"]) == {
        tag for tag in told if re.match(r"(step|t\w+|running\w+)/\w+$", tag)
    }
    rates = [event.value for event in board.Scalars("step/learning_rate")]
    peak = rates.index(max(rates))
    assert len(rates) == steps // 3, "--log-every"
    assert 0 < peak < len(rates) - 1
    assert rates == sorted(rates[:peak]) + sorted(rates[peak:], reverse=True)

    assert ended.stdout.count("test accuracy") == 1, "one rank reports"
    assert f"steps   {steps} in all, which is few" in ended.stdout
    assert "\r" not in ended.text, "no progress bar in a log file"
    assert "destroy_process_group" not in ended.stderr


@pytest.mark.parametrize("technique", ["dp", "spawn"])
def test_images_per_second_are_those_of_all_devices_after_the_first_steps(
    technique, short_dir, tmp_path
):
    """By a clock on which each step takes a second, and the first one a hundred."""
    extra = ["--model", "linear", "--max-steps", 9]
    words = through_altered(command(technique, 2, *flags(short_dir, tmp_path / "run", *extra)))
    succeed(run(*words, ALTER="clock"))
    facts = summary(tmp_path / "run")
    assert facts["train_images_per_second"] == facts["global_batch_size"] == 192


@pytest.fixture(scope="module")
def trained(synthetic_dir, tmp_path_factory):
    """A run that was killed after the last step of its only epoch, before the evaluation."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    extra = ["--model", "linear", "--batch-size", 6000, "--save-every-steps", 10]
    words = command("single", 1, *flags(synthetic_dir, folder, *extra))
    run(*through_altered(words), ALTER="SIGKILL", ALTER_AT="evaluate")
    assert status(folder)["state"] == "running"
    assert not (folder / "metrics.jsonl").exists()
    return folder


@pytest.mark.parametrize(
    ("technique", "processes"),
    [("single", 1), ("ddp", 3), pytest.param("ddp", 7, marks=SLOW)],
)
def test_an_owed_evaluation_counts_every_image_once(
    technique, processes, trained, synthetic_dir, tmp_path
):
    """10,000 divides by neither 3 nor 7; the same weights have to get the same score."""
    shutil.copytree(trained, tmp_path / "run")
    words = flags(synthetic_dir, tmp_path / "run", "--model", "linear", "--batch-size", 6000)
    if technique == "ddp":
        words[-1] //= processes
    succeed(run(*command(technique, processes, *words, "--resume")))
    facts, model = summary(tmp_path / "run"), models.build_model("linear")
    model.load_state_dict(state(tmp_path / "run")["model"])
    images, labels = data.load_tensors("synthetic", str(synthetic_dir))[1].tensors
    correct = int((model(images).argmax(1) == labels).sum())
    assert (facts["test_correct"], facts["test_count"]) == (correct, 10_000)
    assert facts["global_step"] == 10, "nothing was trained on the way"
    assert len(metrics(tmp_path / "run")) == 1


@SLOW
@pytest.mark.timeout(600)
def test_any_script_resumes_any_other(synthetic_dir, tmp_path):
    """Each of the nine pairs once, in the middle of an epoch, at the same global batch."""
    chain = ["single", "single", "dp", "dp", "ddp", "ddp", "single", "ddp", "dp", "single"]
    assert len(set(itertools.pairwise(chain))) == 9
    for i, technique in enumerate(chain):
        extra = ["--model", "mlp", "--max-steps", 10 * (i + 1), *(["--resume"] if i else [])]
        extra += ["--batch-size", 96 if technique == "single" else 48, "--log-every", 1]
        words = flags(synthetic_dir, tmp_path / "run", *extra)
        succeed(run(*command(technique, 2, *words)))
        facts, rows_so_far = summary(tmp_path / "run"), metrics(tmp_path / "run")
        assert (facts["technique"], facts["global_step"]) == (technique, 10 * (i + 1))
        assert facts["resumed_from"] == (10 * i or None)
        assert [row["epoch"] for row in rows_so_far] == [1], "the unfinished epoch's is replaced"
    steps = [
        event.step // 96 for event in events(tmp_path / "run").Scalars("running_mean_rank_0/loss")
    ]
    assert steps == list(range(1, 101)), "TensorBoard shows one curve"


# Data parallelism is an identity: the same global batch gives the same weights. SGD without
# momentum at a small rate, no dropout, no augmentation: what is left is the order in which floats
# are summed, which momentum and a larger rate enlarge to whole digits within some fifty steps.
PLAIN = ["--lr", 0.01, "--lr-scaling", "none", "--warmup-epochs", 0, "--momentum", 0]
GLOBAL_BATCH = 96


def train(layout, model, folder, data_dir, *extra, dtype="float64"):
    """Train on a layout (technique, devices, accumulation); return weights and ranks' hashes."""
    technique, devices, accumulation = layout
    share = GLOBAL_BATCH // devices // accumulation
    words = ["--grad-accum-steps", accumulation, "--model", model, "--batch-size", share]
    words = command(technique, devices, *flags(data_dir, folder, *PLAIN, *words, *extra))
    words = [*through_altered(words), "--no-augment", "--no-tensorboard"]
    ended = succeed(run(*words, timeout=200, ALTER=dtype))
    hashes, seeds, dtypes = zip(
        *re.findall(r"rank \d+ holds ([0-9a-f]{64}) (\d+) torch\.(\w+)", ended.stdout), strict=True
    )
    assert len(hashes) == (devices if technique == "ddp" else 1)
    assert len({*seeds}) == len(seeds), "ranks draw the same dropout and shifts"
    amp = extra[extra.index("--amp") + 1] if "--amp" in extra else "off"
    assert {*dtypes} == {{"bf16": "bfloat16", "fp16": "float16"}.get(amp, dtype)}, "--amp"
    return state(folder)["model"], set(hashes)


THREE = ["--epochs", 3, "--seed", 7]  # of 20 steps in short_dir; each epoch has an order of its own


@pytest.fixture(scope="module")
def single(short_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts") / "run"
    return train(("single", 1, 1), "mlp", folder, short_dir, *THREE)[0]


@pytest.mark.parametrize(
    "layout",
    [
        ("ddp", 3, 1),
        *(pytest.param(x, marks=SLOW) for x in (("dp", 3, 1), ("single", 1, 2), ("ddp", 2, 2))),
    ],
)
def test_every_layout_ends_in_the_same_weights(layout, single, short_dir, tmp_path):
    weights, hashes = train(layout, "mlp", tmp_path / "run", short_dir, *THREE)
    assert len(hashes) == 1, "the ranks differ"
    assert distance(single, weights) < 1e-12


def test_batch_normalisation_sees_the_batch_of_its_device(short_dir, tmp_path):
    """Without SyncBN each replica normalises with the statistics of its own share."""
    layouts = [("single", 1, 1), ("dp", 2, 1), ("ddp", 2, 1)]
    (single, _), (dp, _), (ddp, hashes) = (
        train(layout, "convnet", tmp_path / layout[0], short_dir, "--max-steps", 5)
        for layout in layouts
    )
    assert distance(single, dp) > 1e-4
    assert distance(single, ddp) > 1e-4
    assert len(hashes) == 1, "buffers are those of rank 0 on every rank after an evaluation"
    model = models.build_model("convnet").double().eval()
    model.load_state_dict(ddp)
    images, labels = data.load_tensors("synthetic", str(short_dir))[1].tensors
    loss = nn.functional.cross_entropy(model(images.double()), labels)
    told = summary(tmp_path / "ddp")["test_loss"]
    assert told == pytest.approx(loss.item(), rel=1e-5), "that of the model that was saved"


def test_clipping_bounds_the_true_gradient(synthetic_dir, tmp_path):
    """With fp16 the gradient is scaled by 65,536 until it is unscaled, and then clipped."""
    torch.manual_seed(0)
    before = models.build_model("linear").state_dict()
    for name, norm, devices in (("off", 0.01, 1), ("fp16", 0.01, 2), ("bf16", 0, 1)):
        extra = ["--amp", name, "--max-grad-norm", norm, "--max-steps", 1, "--weight-decay", 0]
        folder, layout = tmp_path / name, ("single" if devices == 1 else "dp", devices, 1)
        after, _ = train(layout, "linear", folder, synthetic_dir, *extra, dtype="float32")
        moved = torch.cat([(after[k] - before[k]).flatten() for k in before]).norm()
        rate = summary(folder)["lr"]
        assert all(tensor.dtype == torch.float32 for tensor in after.values())
        assert norm == 0 or float(moved) == pytest.approx(rate * norm, rel=1e-2), name
        assert norm or float(moved) > rate * 0.1, "a norm of 0 does not clip"


def test_weights_start_another_run(synthetic_dir, tmp_path):
    """Of a checkpoint, and those of another network as far as they fit, which is said."""
    words = partial(flags, synthetic_dir)
    first = words(tmp_path / "a", "--model", "mlp", "--max-steps", 3)
    succeed(run(*command("spawn", 2, *first)))
    weights = ["--init-weights", tmp_path / "a" / "checkpoints" / "last.pt", "--max-steps", 1]
    again = words(tmp_path / "b", "--model", "mlp", *weights, "--lr", 1e-12)
    told = succeed(run(*command("dp", 2, *again))).stdout
    assert "weights loaded 6 tensors" in told
    assert distance(state(tmp_path / "a")["model"], state(tmp_path / "b")["model"]) < 1e-6
    other = words(tmp_path / "c", "--model", "linear", *weights)
    assert "nothing in" in error_line(run(*command("single", 1, *other)), 1)


# What is refused, and what is not needed


def test_a_run_is_not_overwritten(synthetic_dir, tmp_path):
    extra = ["--model", "linear", "--max-steps", 3]
    common = flags(synthetic_dir, tmp_path / "run", *extra)
    words = script("train_single.py", *common)
    succeed(run(*words))
    before = (tmp_path / "run" / "summary.json").read_bytes()
    assert "holds a run (complete): continue it with --resume" in error_line(run(*words))
    told = succeed(run(*command("spawn", 2, *common, "--resume"))).stdout
    assert told.count("is complete: nothing to resume") == 1
    other_seed = error_line(run(*words, "--resume", "--seed", 1), 1)
    assert "was trained with seed 0, this command says 1" in other_seed
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


@SLOW
def test_a_model_is_compiled_once_for_training(synthetic_dir, tmp_path):
    """DDP's warm-up comes with the first batch's size and strides, or it would compile twice."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: torch.compile writes C++ for a CPU")
    words = flags(synthetic_dir, tmp_path / "run", "--max-steps", 3, "--compile")
    told = succeed(run(*command("ddp", 2, *words), timeout=280, TORCH_LOGS="recompiles"))
    assert told.stderr.count("GLOBAL_STATE changed: grad_mode"), "for the evaluation"
    assert "mismatch" not in told.stderr


@SLOW
@pytest.mark.timeout(900)
@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_the_defaults_reach_99_percent_of_real_mnist(technique, synthetic_dir, tmp_path):
    """Of the drawn digits, which are easier, where MNIST_ROOT names no real ones."""
    batch = ["--batch-size", 96 if technique == "single" else 48]
    real = os.environ.get("MNIST_ROOT")
    own = ["--dataset", "mnist" if real else "synthetic", "--data-dir", real or synthetic_dir]
    own += ["--run-dir", tmp_path / "run"]
    succeed(run(*command(technique, 2, *own, *batch), timeout=600))
    assert summary(tmp_path / "run")["test_accuracy"] >= (0.99 if real else 0.995)
