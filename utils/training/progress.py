"""The position of a run: how far it is, and how far it has to go."""

from typing import Any

from utils.errors import UsageError

# What a checkpoint keeps. It is counted in samples, so that any world size can resume.
POSITION = ("epoch", "epoch_samples", "global_step", "evaluated_step", "train_sums", "evaluated")


class Progress:
    """The position of a run, and its end.

    Args:
        epoch_size: samples in the training set, with the tail that an epoch drops.
        global_batch_size: samples that an optimizer step takes over all processes.
        epochs: length of the run. The last epoch may be a fraction.
        max_steps: optimizer steps at most, or None.

    Raises:
        UsageError: an epoch, or the part of it that ``epochs`` takes, is less than one step.

    Attributes:
        epoch: complete epochs.
        epoch_samples: samples of the current epoch that all processes together have seen.
        global_step: optimizer steps.
        evaluated_step: ``global_step`` at the latest evaluation.
        train_sums: ``Metrics.totals`` of the current epoch, over all processes.
        evaluated: the same of the latest evaluation, by the part of the data (``test``).
    """

    def __init__(
        self, epoch_size: int, global_batch_size: int, epochs: float, max_steps: int | None = None
    ) -> None:
        self.epoch = self.epoch_samples = self.global_step = 0
        self.evaluated_step = -1
        self.train_sums: dict[str, float] = {}
        self.evaluated: dict[str, dict[str, float]] = {}
        self.epoch_size, self.global_batch_size = epoch_size, global_batch_size
        self.epochs, self.max_steps = epochs, max_steps
        samples = round(min(1.0, epochs) * epoch_size)
        if global_batch_size > samples:
            raise UsageError(
                f"a global batch of {global_batch_size} is larger than the training set ({samples}"
                f" samples with --epochs {epochs:g}): lower --batch-size or --grad-accum-steps"
            )

    @property
    def total_steps(self) -> int:
        """Optimizer steps from begin to end, if ``max_steps`` does not end the run earlier."""
        size, batch = self.epoch_size, self.global_batch_size
        return int(self.epochs) * (size // batch) + round(self.epochs % 1 * size) // batch

    @property
    def samples_seen(self) -> int:
        """Training samples seen so far: the x-axis, the same at any world size."""
        return self.epoch * self.epoch_size + self.epoch_samples

    @property
    def has_step_left(self) -> bool:
        """Whether another optimizer step belongs to this epoch."""
        end = round(min(1.0, self.epochs - self.epoch) * self.epoch_size)
        is_at_limit = self.max_steps is not None and self.global_step >= self.max_steps
        return self.epoch_samples + self.global_batch_size <= end and not is_at_limit

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to train or to evaluate."""
        return not self.has_step_left and self.evaluated_step == self.global_step

    def step(self) -> None:
        """Count an optimizer step."""
        self.epoch_samples += self.global_batch_size
        self.global_step += 1

    def end_epoch(
        self, train_sums: dict[str, float], evaluated: dict[str, dict[str, float]]
    ) -> None:
        """Note an evaluation, and begin the next epoch if no whole batch of this one is left."""
        self.train_sums, self.evaluated = train_sums, evaluated
        self.evaluated_step = self.global_step
        self._close_epoch()

    @property
    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {name: getattr(self, name) for name in POSITION}

    def restore(self, position: dict[str, Any]) -> None:
        """Take over a checkpoint's position. Its world size, and so its batch, may differ."""
        vars(self).update(position)
        if self.evaluated_step == self.global_step:
            self._close_epoch()

    def _close_epoch(self) -> None:
        if self.epoch_samples + self.global_batch_size > self.epoch_size:
            self.epoch, self.epoch_samples, self.train_sums = self.epoch + 1, 0, {}
