"""What a run reports: averages, its files, and its speed."""

import json
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from tests.helpers import parse
from utils.checkpoint import Position, weights_sha256
from utils.logger import Logger


@pytest.fixture
def open_logger(tmp_path):
    """Return a function that opens the logger of a run with global batches of 2 x 8 samples."""

    def open_one(*flags, step=0):
        args = parse("--log-every", 1, "--batch-size", 8, *flags)
        names = ("loss", "correct", "count")
        return Logger(tmp_path, args, names, torch.device("cpu"), 16, Position(step=step))

    return open_one


def train(logger, epoch, first, last, loss=1.0):
    """Log an epoch of the steps from ``first`` to ``last``, which takes ten seconds."""
    for step in range(first, last + 1):
        logger.step(step, [16 * loss, 4, 16], lr=0.1)
    logger.epoch(epoch, last, [16 * loss, 4, 16], [50 * loss, 40, 50], 10.0, 2.5)


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def summary(tmp_path):
    return json.loads((tmp_path / "summary.json").read_text())


def scalars(tmp_path, name):
    """Return what TensorBoard shows under a name: the value at each step."""
    events = EventAccumulator(str(tmp_path)).Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def test_after_a_resume_nothing_is_shown_that_was_not_saved(open_logger, tmp_path):
    """The first attempt had come to step 6, and its last save was at step 3."""
    first = open_logger()
    train(first, 0, 1, 2)
    train(first, 1, 3, 4)
    first.close(None)
    again = open_logger(step=3)
    assert [row["global_step"] for row in rows(tmp_path)] == [2, 4], "until there is a new row"
    train(again, 1, 4, 5, loss=2.0)
    again.close(nn.Linear(1, 1))
    assert [(row["global_step"], row["test_loss"]) for row in rows(tmp_path)] == [(2, 1), (5, 2)]
    losses = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2}
    assert scalars(tmp_path, "running_mean_rank_0/loss") == losses
    assert scalars(tmp_path, "test/loss") == {2: 1, 5: 2}
    facts = summary(tmp_path)
    assert (facts["resumed_from"], facts["global_step"], facts["test_loss"]) == (3, 5, 2)


def test_the_speed_leaves_out_the_first_steps_of_an_epoch(
    open_logger, tmp_path, monkeypatch, capsys
):
    """They take a second each, and the others a tenth. A short epoch at the end changes nothing."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    logger = open_logger("--no-tensorboard", "--log-every", 10)
    for step in range(1, 31):
        now += 1 if step <= 10 else 0.1
        if step % 10 == 0:
            logger.step(step, [1, 1, 16], lr=0.1)
    logger.epoch(0, 30, [1, 1, 480], [1, 1, 16], 12.0, 3.0)
    now += 100  # an evaluation and a save
    logger.step(31, [1, 1, 16], lr=0.1)
    logger.epoch(1, 35, [1, 1, 80], [1, 1, 16], 5.0, 0.5)
    assert [row["train_images_per_second"] for row in rows(tmp_path)] == pytest.approx([160, 160])
    assert "160 images/s, 10% waiting for data" in capsys.readouterr().out
    logger.close(nn.Linear(1, 1))
    facts = summary(tmp_path)
    assert (facts["train_seconds"], facts["data_seconds"]) == (17, 3.5)


def test_a_summary_means_a_complete_run(open_logger, tmp_path):
    model = nn.Linear(2, 2)
    logger = open_logger()
    train(logger, 0, 1, 2)
    assert not (tmp_path / "summary.json").exists()
    logger.close(model)
    facts = summary(tmp_path)
    assert facts["weights_sha256"] == weights_sha256(model)
    assert 50 < facts["peak_memory_mb"][0] < 10_000, "MiB of this process"
    open_logger(step=2)
    assert not (tmp_path / "summary.json").exists(), "started again, the run is not complete"
