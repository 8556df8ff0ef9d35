"""Exact loss and accuracy over any number of processes."""

import torch
from torch import Tensor

from utils import distributed


class Metrics:
    """Sums of loss, correct predictions and samples, kept on the device.

    An average of averages is wrong as soon as two processes have different numbers of samples. So
    numerator and denominator are summed, and the division comes last. Nothing here waits for the
    device until a number is read.
    """

    def __init__(self, device: torch.device, sums: list[float] | None = None) -> None:
        loss_sum, correct, count = sums or (0.0, 0.0, 0.0)
        # In float32 a count stops growing at 2**24. mps has no float64.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self._loss_sum = torch.tensor(loss_sum, dtype=self.dtype, device=device)
        self._correct = torch.tensor(int(correct), device=device)
        self.count = int(count)

    def update(self, mean_loss: Tensor, correct: Tensor) -> None:
        """Add a batch: its mean loss [], and which of its samples are correct, bool [B]."""
        # The outputs of DataParallel may lie on another device.
        self._loss_sum.add_(mean_loss.detach().to(self._loss_sum.device), alpha=len(correct))
        self._correct.add_(correct.sum().to(self._correct.device))
        self.count += len(correct)

    @property
    def sums(self) -> Tensor:
        """Loss sum, correct and count [3], on the device."""
        count = torch.full_like(self._loss_sum, self.count)
        return torch.stack([self._loss_sum, self._correct.to(self.dtype), count])

    def sum_over_ranks(self) -> "Metrics":
        """Return the sums over all ranks. Collective. ``self`` keeps those of this rank."""
        return Metrics(self._loss_sum.device, distributed.sum_over_ranks(self.sums).tolist())

    @property
    def correct(self) -> int:
        return int(self._correct)

    @property
    def loss(self) -> float:
        """Mean loss per sample, or nan if nothing was counted."""
        return float(self._loss_sum) / self.count if self.count else float("nan")

    @property
    def accuracy(self) -> float:
        """Correct of all samples, 0 to 1, or nan if nothing was counted."""
        return self.correct / self.count if self.count else float("nan")
