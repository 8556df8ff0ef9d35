"""The position of a training: fractions of epochs, limits of steps, and the evaluation owed."""

import pytest

from utils.errors import UsageError
from utils.progress import POSITION, Progress

SUMS = [1.0, 2.0, 3.0]


def train(progress: Progress) -> None:
    """Go through a training as the scripts do, without training anything."""
    while not progress.is_finished:
        while progress.has_step_left:
            progress.step()
        progress.end_epoch(SUMS, SUMS)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps", "epoch", "epoch_samples"),
    [
        (1, None, 10, 1, 0),
        (3, None, 30, 3, 0),
        (0.5, None, 5, 0, 50),
        (2.25, None, 22, 2, 20),
        (1, 7, 7, 0, 70),
        (1, 10, 10, 1, 0),
        (2, 13, 13, 1, 30),
        (0.5, 900, 5, 0, 50),
        (0.1, None, 1, 0, 10),
    ],
)
def test_a_training_ends_where_it_should(
    epochs: float, max_steps: int | None, steps: int, epoch: int, epoch_samples: int
) -> None:
    progress = Progress(105, 10, epochs, max_steps)
    train(progress)
    assert progress.global_step == progress.evaluated_step == steps
    assert (progress.epoch, progress.epoch_samples) == (epoch, epoch_samples)


@pytest.mark.parametrize("max_steps", [7, 10, None])
def test_an_evaluation_that_is_owed_keeps_a_training_from_its_end(max_steps: int | None) -> None:
    """Killed between the save after the last step and the end of the evaluation."""
    progress = Progress(105, 10, 1, max_steps)
    while progress.has_step_left:
        progress.step()
    resumed = Progress(105, 10, 1, max_steps, **progress.position())
    assert not resumed.has_step_left
    assert not resumed.is_finished
    train(resumed)
    assert resumed.test_sums == SUMS


def test_more_epochs_go_on_where_a_fraction_ended() -> None:
    short, whole = Progress(105, 10, 0.5), Progress(105, 10, 1)
    train(short)
    longer = Progress(105, 10, 1, **short.position())
    train(longer)
    train(whole)
    assert longer == whole


def test_a_limit_of_steps_that_lies_behind_ends_the_training() -> None:
    progress = Progress(105, 10, 1, max_steps=3, epoch_samples=60, global_step=6)
    assert not progress.has_step_left
    train(progress)
    assert progress.global_step == 6


def test_an_epoch_without_a_batch_of_the_new_size_is_left() -> None:
    """Evaluated in mid-epoch, then resumed with a larger global batch."""
    small = Progress(105, 10, 1, max_steps=9)
    train(small)
    large = Progress(105, 30, 2, max_steps=None)
    large.go_on_from(small.position())
    assert (large.epoch, large.epoch_samples) == (1, 0)
    train(large)
    assert large.global_step == 9 + 3


def test_an_evaluation_that_is_owed_comes_before_the_next_epoch() -> None:
    small = Progress(105, 10, 1)
    while small.has_step_left:
        small.step()
    large = Progress(105, 30, 1)
    large.go_on_from(small.position())
    assert (large.epoch, large.epoch_samples, large.is_finished) == (0, 100, False)


def test_less_than_a_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="less than one global batch of 10"):
        Progress(105, 10, 0.05)


def test_a_position_holds_all_that_is_not_this_commands() -> None:
    fields = set(Progress.__dataclass_fields__)
    assert fields - {"epoch_size", "global_batch_size", "epochs", "max_steps"} == set(POSITION)
