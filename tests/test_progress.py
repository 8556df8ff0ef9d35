"""The position of a run: fractions of epochs, limits of steps, and the evaluation owed."""

import pytest

from utils.training.progress import Progress

SUMS = {"count": 3.0, "loss": 1.0}


def train(progress):
    """Go through a run as the scripts do, without training anything."""
    while not progress.is_finished:
        while progress.has_step_left:
            progress.step()
        progress.end_epoch(SUMS, SUMS)


def resumed(before, *arguments):
    progress = Progress(*arguments)
    progress.restore(before.position)
    return progress


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps", "epoch", "epoch_samples"),
    [
        (2.25, None, 22, 2, 20),
        (2, 13, 13, 1, 30),
        (0.1, None, 1, 0, 10),
    ],
)
def test_a_run_ends_where_it_should(epochs, max_steps, steps, epoch, epoch_samples):
    progress = Progress(105, 10, epochs, max_steps)
    train(progress)
    assert progress.global_step == progress.evaluated_step == steps
    assert (progress.epoch, progress.epoch_samples) == (epoch, epoch_samples)
    assert progress.total_steps == steps or max_steps


@pytest.mark.parametrize("max_steps", [7, None])
def test_an_evaluation_that_is_owed_keeps_a_run_from_its_end(max_steps):
    """Killed between the save after the last step and the end of the evaluation."""
    progress = Progress(105, 10, 1, max_steps)
    while progress.has_step_left:
        progress.step()
    again = resumed(progress, 105, 10, 1, max_steps)
    assert not again.has_step_left
    assert not again.is_finished
    train(again)
    assert again.evaluated == SUMS


def test_more_epochs_go_on_where_a_fraction_ended_and_fewer_steps_end_a_run():
    short, whole = Progress(105, 10, 0.5), Progress(105, 10, 1)
    train(short)
    assert resumed(short, 105, 10, 1, 3).is_finished
    longer = resumed(short, 105, 10, 1)
    train(longer)
    train(whole)
    assert longer.position == whole.position
