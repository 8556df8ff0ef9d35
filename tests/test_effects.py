"""What a flag does, and what a figure is: compared with plain PyTorch, written out here.

That the scripts equal each other says nothing about what all of them do wrong together.
"""

import math
import os
import sys
import termios
from contextlib import suppress

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

from tests.fork_server import Fork
from tests.layouts import distance, state, train
from tests.processes import (
    ROOT,
    Training,
    environment,
    error_line,
    free_port,
    run,
    server,
    succeed,
)
from utils.datasets import idx

MEAN, STD = 0.1503, 0.3081  # of the drawn digits


def mlp():
    sizes = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(nn.Flatten(), *sizes)


def read_digits(folder, part):
    """Return images and labels as tensors, the images with mean 0 and variance 1."""
    raw = folder / "Synthetic" / "raw"
    images = idx.read(raw / f"{part}-images-idx3-ubyte").double() / 255
    return (images.unsqueeze(1) - MEAN) / STD, idx.read(raw / f"{part}-labels-idx1-ubyte").long()


# Three epochs of ten steps, of which the last is cut short. Each flag changes the weights.
BATCH, STEPS, EPOCHS, SEED, WARMUP, LR = 192, 25, 3, 7, 0.5, 0.05
FLAGS = ["--max-steps", STEPS, "--epochs", EPOCHS, "--seed", SEED, "--warmup-epochs", WARMUP]
FLAGS += ["--lr", LR, "--lr-scaling", "linear", "--momentum", 0.8, "--weight-decay", 0.01]
FLAGS += ["--label-smoothing", 0.2, "--max-grad-norm", 0.7, "--log-every", 4]


AVERAGES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")


def rate(seen, peak, epochs, warmup_epochs):
    """Return the rate after ``seen`` images: from a tenth of the peak to it, then half a cosine."""
    warmup = warmup_epochs * 1920
    if seen < warmup:
        return peak * (0.1 + 0.9 * seen / warmup)
    return peak * (1 + math.cos(math.pi * (seen - warmup) / (epochs * 1920 - warmup))) / 2


@torch.no_grad()
def score(model, images, labels):
    """Return loss and accuracy, of all images at once."""
    outputs = model(images)
    correct = int((outputs.argmax(1) == labels).sum())
    return cross_entropy(outputs, labels).item(), correct / len(labels)


@pytest.fixture(scope="module")
def by_hand(short_dir):
    """Train on one device: the weights, and what each epoch's row of metrics.jsonl has to say."""
    images, labels = read_digits(short_dir, "train")
    test_images, test_labels = read_digits(short_dir, "t10k")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(SEED)
    model = mlp()
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.SGD(
        model.parameters(), LR, momentum=0.8, weight_decay=0.01, nesterov=True
    )
    step, rows = 0, []
    for epoch in range(EPOCHS):
        sampler = DistributedSampler(labels, num_replicas=1, rank=0, seed=SEED)
        sampler.set_epoch(epoch)
        losses, correct = [], 0
        for batch in torch.tensor([*sampler]).split(BATCH)[: STEPS - step]:
            optimizer.param_groups[0]["lr"] = rate(step * BATCH, LR * BATCH / 96, EPOCHS, WARMUP)
            outputs = model(images[batch])
            loss = cross_entropy(outputs, labels[batch], label_smoothing=0.2)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            step += 1
            losses.append(loss.item())
            correct += int((outputs.argmax(1) == labels[batch]).sum())
        averages = sum(losses) / len(losses), correct / len(losses) / BATCH
        averages += score(model, test_images, test_labels)
        rows.append(pytest.approx(dict(zip(AVERAGES, averages, strict=True))))
    return model.state_dict(), rows


# With devices and micro-steps. The 500 test images do not divide by 3.
@pytest.mark.parametrize(
    "layout", [("single", 1, 1), ("single", 1, 2), ("dp", 3, 1), ("ddp", 3, 2)]
)
def test_each_layout_computes_what_is_written_out_here(layout, by_hand, short_dir, tmp_path):
    """Order, rates, decay, smoothing, clipping, momentum; averages of all ranks and steps."""
    weights, rows = by_hand
    found, hashes = train(layout, "mlp", tmp_path / "run", short_dir, *FLAGS, global_batch=BATCH)
    assert len(hashes) == 1, "the ranks differ"
    assert distance(weights, found) < 1e-10
    ran = Training(short_dir, tmp_path / "run")
    assert [{name: row[name] for name in AVERAGES} for row in ran.metrics] == rows
    assert ran.summary["lr"] == pytest.approx(LR * BATCH / 96)


def test_a_plain_command_shifts_training_images_writes_its_rates_and_shows_no_bar(
    short_dir, tmp_path
):
    """With the flags' defaults, in a log file. No shell has replaced the ``~`` of a path."""
    (tmp_path / "digits").symlink_to(short_dir)
    words = [sys.executable, "train_single.py", "--model", "linear", "--dataset", "synthetic"]
    words += ["--data-dir=~/digits", "--run-dir=~/run", "--epochs", 2, "--log-every", 1]
    told = succeed(run(*words, HOME=str(tmp_path))).text
    assert "\r" not in told
    assert "%|" not in told, "a progress bar in a log file"
    ran = Training(short_dir, tmp_path / "run")
    curve = EventAccumulator(str(ran.folder)).Reload().Scalars("step/learning_rate")
    rates = [rate(96 * step, 0.1, 2, 0.6) for step in range(40)]
    assert [event.value for event in curve] == pytest.approx(rates)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    model.load_state_dict(state(ran.folder)["model"])
    images, labels = read_digits(short_dir, "t10k")
    scores = score(model, images.float(), labels)
    assert [ran.summary[name] for name in AVERAGES[2:]] == pytest.approx(scores, rel=1e-5)
    other = Training(short_dir, tmp_path / "other")
    succeed(other.run("single", "--model", "linear", "--epochs", 2, "--no-augment"))
    assert other.summary["weights_sha256"] != ran.summary["weights_sha256"], "no shifts"


def test_a_progress_bar_is_shown_on_a_terminal(short_dir, tmp_path):
    """By rank 0 alone."""
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, (24, 80))
    words = Training(short_dir, tmp_path / "run").command("ddp", "--model", "linear")
    words.remove("--no-progress")
    words, shown = [str(word) for word in words], b""
    with open(os.devnull, "r+") as nothing:
        streams = [nothing.fileno(), nothing.fileno(), end]
        process = Fork(server()[0], words, ROOT, environment(), streams)
    os.close(end)
    with suppress(OSError):  # EIO: the last program on it has ended
        while more := os.read(terminal, 4096):
            shown += more
    os.close(terminal)
    assert process.wait(60) == 0, shown
    assert shown.count(b"| 0/10") == 1, shown


def test_only_training_counts_as_training(training):
    """By a clock on which a step takes a second, the first ten a hundred, and a save an hour."""
    extra = ["--model", "linear", "--epochs", 2, "--max-steps", 28, "--save-every-steps", 4]
    succeed(training.run("single", *extra, ALTER="clock"))
    # The speed leaves out the first ten steps.
    assert [row["images_per_second"] for row in training.metrics] == [96, 96]
    assert training.summary["train_images_per_second"] == 96
    assert training.summary["train_seconds"] == 1018


def test_a_rank_that_is_missing_is_one_line_although_nobody_asked_for_few(short_dir):
    """PyTorch's C++ code writes more, unless it is told not to before it is imported."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(free_port())
    words = ["env", "-u", "TORCH_CPP_LOG_LEVEL", sys.executable, "train_ddp.py", "--rdzv-timeout"]
    assert "missing: 1." in error_line(run(*words, 1, "--device", "cpu", **place), 1)
