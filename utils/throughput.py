"""How long training takes, and how many images it processes in a second."""

import contextlib
import time
from collections.abc import Iterator

import torch

from utils import early
from utils.device import synchronize

WARMUP_STEPS = 5  # left out of images/s: caches fill, cuDNN and DDP's buckets settle


class Throughput:
    """Time the steps of a run. The clock waits for the device only when a period begins or ends.

    Args:
        device: of this process.
        global_batch_size: samples of an optimizer step.
        untimed_steps: how many steps to leave out at the start.

    Attributes:
        startup_seconds: from the start of the process to the end of the first step.
        train_seconds: in epochs, without evaluation and saving.
        epoch_start: ``time.perf_counter`` at the start of the epoch.
    """

    def __init__(self, device: torch.device, global_batch_size: int, untimed_steps: int) -> None:
        self.device = device
        self.global_batch_size = global_batch_size
        self.untimed_steps = untimed_steps
        self.startup_seconds: float | None = None
        self.train_seconds = self.epoch_start = self._timed_seconds = self._left_out = 0.0
        self._steps = 0

    def start_epoch(self) -> None:
        """Start the clock."""
        self.epoch_start = self._timed_since = time.perf_counter()
        self._left_out = 0.0

    def step(self) -> None:
        """Count an optimizer step."""
        self._steps += 1
        if self._steps == 1:
            synchronize(self.device)
            self.startup_seconds = seconds_since_start()
        if self._steps == self.untimed_steps:
            synchronize(self.device)
            self._timed_since = time.perf_counter() - self._left_out

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done meanwhile. The device finishes first what is counted."""
        synchronize(self.device)
        begin = time.perf_counter()
        yield
        self._left_out += time.perf_counter() - begin

    def end_epoch(self) -> None:
        """Stop the clock. The device has nothing left to do, or time is missing."""
        now = time.perf_counter() - self._left_out
        self.train_seconds += now - self.epoch_start
        if self._steps > self.untimed_steps:
            self._timed_seconds += now - self._timed_since

    def images_per_second(self) -> float | None:
        """Return the speed over all devices since the warm-up steps, or None before their end."""
        images = (self._steps - self.untimed_steps) * self.global_batch_size
        return images / self._timed_seconds if self._timed_seconds else None


def seconds_since_start() -> float:
    """Return the age of this process in seconds, without the start of the interpreter."""
    return time.perf_counter() - early.STARTED
