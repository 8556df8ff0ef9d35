"""Exact averages over any number of processes: named sums, divided last."""

import math
from typing import Any

import torch
from torch import Tensor

from utils.errors import UsageError

# A fixed length, since a rank without a sample has not met the names. The last place is no metric.
MAX_SUMS = 256
INTERRUPTED = MAX_SUMS - 1


class Metrics:
    """Sums over samples: their count, their loss, and what ``models.loss_and_counts`` counts.

    An average of averages is wrong as soon as two processes have different numbers of samples. So
    numerator and denominator are summed, and the division comes last. Nothing here waits for the
    device until a number is read.

    Args:
        device: where the batches are.
        totals: sums by name, with which to begin.
    """

    def __init__(self, device: torch.device, totals: dict[str, float] | None = None) -> None:
        self.device = device
        # In float32 a count stops growing at 2**24. mps has no float64.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.names = [*(totals or {"count": 0, "loss": 0})]
        self._sums = torch.zeros(MAX_SUMS, dtype=torch.float64)
        self._sums[: len(self.names)] = self._sums.new_tensor([*(totals or {}).values()] or [0])
        # What is not yet in ``_sums``: counts that are plain numbers, and the rest on the device.
        # There a batch is one operation for each name. The sum over its samples comes later.
        self._new_count = 0
        self._new: dict[tuple[str, torch.Size], Tensor] = {}
        self._at_step: tuple[Tensor, int, dict[tuple[str, torch.Size], Tensor]] | None = None

    def update(self, mean_loss: Tensor, counted: dict[str, Any]) -> None:
        """Add a batch: its mean loss [], and what was counted of it, as ``models`` returns both.

        Raises:
            UsageError: more metrics than there is room for.
        """
        count = counted["count"]
        if isinstance(count, Tensor):  # whose value only the device knows yet
            count = count.to(self.device, self.dtype)
            self._add("count", count)
        else:
            self._new_count += count
        self._add("loss", mean_loss.detach(), count)
        for name, value in counted.items():
            if name != "count":
                self._add(name, torch.as_tensor(value).detach())

    def _add(self, name: str, value: Tensor, times: float | Tensor = 1) -> None:
        value = value.to(self.device)  # the outputs of DataParallel may lie on another one
        key = name, value.shape
        if key not in self._new:
            self._new[key] = value.to(self.dtype) * times
            self._know(name)
        elif isinstance(times, Tensor):
            self._new[key].addcmul_(value, times)
        else:
            self._new[key].add_(value, alpha=times)

    def _know(self, name: str) -> None:
        if name in self.names:
            return
        if len(self.names) == INTERRUPTED:
            raise UsageError(
                f"loss_and_counts in models.py counts more than {INTERRUPTED} sums, of which"
                f" {name} is the first too many: raise MAX_SUMS in utils/metrics.py"
            )
        self.names.append(name)

    def begin_step(self) -> None:
        """Note where a step begins, in case ``discard_step`` has to go back there."""
        tensors = {key: value.clone() for key, value in self._new.items()}
        self._at_step = self._sums.clone(), self._new_count, tensors

    def discard_step(self) -> None:
        """Forget the micro-batches of a step that never ended."""
        if self._at_step is not None:
            self._sums, self._new_count, self._new = self._at_step

    def interrupt(self) -> None:
        """Note that this rank has not counted all its samples, so that the sums mean nothing."""
        self._sums[INTERRUPTED] = 1

    @property
    def interrupted(self) -> int:
        """Return how many ranks have not counted all their samples."""
        return int(self._sums[INTERRUPTED])

    @property
    def sums(self) -> Tensor:
        """All sums [MAX_SUMS], float64 on the CPU, in the order of ``names``: of this process.

        The last one is the number of ranks that were interrupted.

        What changes this tensor changes the metrics: ``dist.all_reduce`` makes them those of all
        ranks.
        """
        if self._new:
            values = torch.stack([value.sum() for value in self._new.values()]).tolist()
            for (name, _), value in zip(self._new, values, strict=True):
                self._sums[self.names.index(name)] += value
            self._sums[0] += self._new_count
            self._new_count, self._new = 0, {}
        return self._sums

    @property
    def is_finite(self) -> bool:
        """Whether every loss so far is a finite number."""
        new = self._new.get(("loss", torch.Size()), 0.0)
        return all(math.isfinite(loss) for loss in (self._sums[1], new))

    @property
    def totals(self) -> dict[str, float]:
        """The sums by name."""
        return dict(zip(self.names, self.sums.tolist(), strict=False))

    @property
    def count(self) -> int:
        return int(self.sums[0])

    @property
    def loss(self) -> float:
        """Mean loss per sample, or nan if nothing was counted."""
        return self.averages["loss"]

    @property
    def averages(self) -> dict[str, float]:
        """Each sum but the count, divided by the count, or nan. ``correct`` becomes accuracy."""
        totals = self.totals
        count = totals.pop("count") or math.nan
        averages = {name: value / count for name, value in totals.items()}
        if "correct" in averages:
            averages["accuracy"] = averages.pop("correct")
        return averages

    def report(self, part: str) -> dict[str, Any]:
        """Return averages and counts by name, such as ``test_loss`` for the ``part`` test.

        A task that counts no correct samples, such as a regression, has None for its accuracy.
        """
        correct = int(self.totals["correct"]) if "correct" in self.names else None
        found = {"accuracy": None, **self.averages, "correct": correct, "count": self.count}
        return {f"{part}_{name}": value for name, value in found.items()}
