"""Where a training stands, and how far it is to go."""

from dataclasses import dataclass, field
from typing import Any

from utils.errors import UsageError


@dataclass
class Progress:
    """The position of a training, counted in samples so that any world size can go on from it.

    The first four are this command's; the others are what a checkpoint keeps.

    Attributes:
        epoch_size: samples in the training set, the tail that an epoch drops included.
        global_batch_size: samples that an optimizer step takes over all processes.
        epochs: how far to go; of the last, a fraction may do.
        max_steps: optimizer steps at most, or None.
        epoch: complete epochs.
        epoch_samples: samples of the current epoch that all processes together have seen.
        global_step: optimizer steps.
        evaluated_step: ``global_step`` at the latest evaluation.
        train_sums: ``Metrics.state`` of the current epoch, over all processes.
        test_sums: the same of the latest evaluation.
    """

    epoch_size: int
    global_batch_size: int
    epochs: float
    max_steps: int | None = None
    epoch: int = 0
    epoch_samples: int = 0
    global_step: int = 0
    evaluated_step: int = -1
    train_sums: list[float] = field(default_factory=list)
    test_sums: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.global_batch_size > round(self.epochs * self.epoch_size):
            raise UsageError(
                f"--epochs {self.epochs} of {self.epoch_size} samples is less than one global"
                f" batch of {self.global_batch_size}: raise it, or lower --batch-size"
            )

    @property
    def total_steps(self) -> int:
        """Optimizer steps from begin to end, where ``max_steps`` does not end it earlier."""
        size, batch = self.epoch_size, self.global_batch_size
        return int(self.epochs) * (size // batch) + round(self.epochs % 1 * size) // batch

    @property
    def samples_seen(self) -> int:
        """Training samples behind us: the x-axis, the same at any world size."""
        return self.epoch * self.epoch_size + self.epoch_samples

    @property
    def has_step_left(self) -> bool:
        """Tell whether another optimizer step belongs to this epoch."""
        end = round(min(1.0, self.epochs - self.epoch) * self.epoch_size)
        is_left = self.epoch_samples + self.global_batch_size <= end
        return is_left and (self.max_steps is None or self.global_step < self.max_steps)

    @property
    def is_finished(self) -> bool:
        """Tell whether nothing is left to train or to evaluate."""
        return not self.has_step_left and self.evaluated_step == self.global_step

    def step(self) -> None:
        """Count an optimizer step."""
        self.epoch_samples += self.global_batch_size
        self.global_step += 1

    def end_epoch(self, train_sums: list[float], test_sums: list[float]) -> None:
        """Note an evaluation, and go to the next epoch if no whole batch of this one is left."""
        self.train_sums, self.test_sums = train_sums, test_sums
        self.evaluated_step = self.global_step
        self._close_epoch()

    def go_on_from(self, position: dict[str, Any]) -> None:
        """Take the position of a checkpoint; its world, and so its global batch, may be another."""
        for name, value in position.items():
            setattr(self, name, value)
        if self.evaluated_step == self.global_step:
            self._close_epoch()

    def _close_epoch(self) -> None:
        if self.epoch_samples + self.global_batch_size > self.epoch_size:
            self.epoch, self.epoch_samples, self.train_sums = self.epoch + 1, 0, []

    def position(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: getattr(self, name) for name in POSITION}


POSITION = ("epoch", "epoch_samples", "global_step", "evaluated_step", "train_sums", "test_sums")
