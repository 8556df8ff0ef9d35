"""What a run reports: averages, its files, and its speed."""

import json
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from tests.helpers import parse
from utils.checkpoint import Position, weights_sha256
from utils.errors import UserError
from utils.logger import Logger


@pytest.fixture
def open_logger(tmp_path):
    """Return a function that opens the logger of a run with global batches of 2 x 8 samples."""

    def open_one(*flags, step=0):
        args = parse("--log-every", 1, "--batch-size", 8, *flags)
        names, device = ("loss", "correct", "count"), torch.device("cpu")
        return Logger(tmp_path, args, names, device, 16, Position(step=step))

    return open_one


def sums(loss, correct, count):
    return torch.tensor([loss, correct, count], dtype=torch.float32)


def train(logger, epoch, first, last, loss=1.0):
    """Log an epoch of the steps from ``first`` to ``last``."""
    for step in logger.progress(range(first, last + 1), epoch):
        logger.step(step, sums(16 * loss, 4, 16), lr=0.1)
    logger.epoch(epoch, last, sums(16 * loss, 4, 16), sums(50 * loss, 40, 50))


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def scalars(tmp_path, name):
    """Return what TensorBoard shows under a name: the value at each step."""
    events = EventAccumulator(str(tmp_path)).Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_after_a_resume_nothing_is_shown_that_was_not_saved(open_logger, tmp_path):
    """The first attempt had come to step 6, and its last save was at step 3."""
    first = open_logger()
    train(first, 0, 1, 2)
    train(first, 1, 3, 4)
    first.stopped(4)
    again = open_logger(step=3)
    assert [row["global_step"] for row in rows(tmp_path)] == [2, 4], "until there is a new row"
    train(again, 1, 4, 5, loss=2.0)
    again.complete(nn.Linear(1, 1))
    assert [(row["global_step"], row["test_loss"]) for row in rows(tmp_path)] == [(2, 1), (5, 2)]
    losses = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    assert scalars(tmp_path, "running_mean_rank_0/loss") == losses
    assert scalars(tmp_path, "test/loss") == {2: 1, 5: 2}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["resumed_from"], summary["global_step"], summary["test_loss"]) == (3, 5, 2)


def test_the_speed_leaves_out_the_first_ten_steps(open_logger, tmp_path, monkeypatch):
    """They take a second each, and the others a tenth. A run of fewer steps has a speed, too."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    logger = open_logger("--no-tensorboard")
    for epoch, steps in enumerate((range(1, 6), range(6, 26))):
        for step in logger.progress(steps, epoch):
            now += 1 if step <= 10 else 0.1
            logger.step(step, sums(1, 1, 16), lr=0.1)
        now += 100  # an evaluation and a save
        logger.epoch(epoch, step, sums(1, 1, 16), sums(1, 1, 16))
    assert [row["train_images_per_second"] for row in rows(tmp_path)] == pytest.approx([16, 160])
    logger.complete(nn.Linear(1, 1))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["train_seconds"] == pytest.approx(11.5)


def test_a_summary_means_a_complete_run(open_logger, tmp_path, capsys):
    logger, model, path = open_logger("--seed", 5), nn.Linear(2, 2), tmp_path / "summary.json"
    train(logger, 0, 1, 2)
    assert not path.exists()
    logger.complete(model)
    summary = json.loads(path.read_text())
    assert (summary["seed"], summary["weights_sha256"]) == (5, weights_sha256(model))
    # Started again, it is as it was. A longer run begins by removing it.
    open_logger("--epochs", 9, step=2).complete(model)
    assert "complete before; for a longer run raise --epochs" in capsys.readouterr().out
    assert json.loads(path.read_text()) == summary
    train(open_logger(step=2), 1, 3, 3)
    assert not path.exists()


@pytest.mark.parametrize(("loss", "correct", "name"), [("nan", 4, "loss"), (16, "inf", "accuracy")])
def test_an_average_that_is_not_finite_ends_the_run(loss, correct, name, open_logger):
    logger = open_logger("--no-tensorboard")
    for step in logger.progress(range(1, 2), 0):
        with pytest.raises(
            UserError, match=f"the {name} is (nan|inf) at step 1, which is not saved"
        ):
            logger.step(step, sums(float(loss), float(correct), 16), lr=0.1)
