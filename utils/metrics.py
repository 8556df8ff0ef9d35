"""Exact loss and accuracy over any number of processes."""

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import UserError

BATCHES = 20  # counted at once
# From each rank, beside a sum: that of another call has another multiple of it.
CHECK_VALUE = 1021.0


class OutOfStep(UserError):
    """The ranks did not call the same collectives in the same order."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the ranks are out of step ({what}): some of them called a collective that the others"
            " did not; every rank has to call the same ones in the same order"
        )


class Metrics:
    """Sums of loss, correct predictions and samples, kept on the device.

    Averages of averages are wrong as soon as two processes hold different numbers of samples, so
    numerator and denominator travel together and are divided last. Nothing here waits for the
    device until a number is read.
    """

    def __init__(self, device: torch.device, sums: list[float] | None = None) -> None:
        # In float32 a count stops growing at 2**24; mps has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.counted = torch.tensor(sums or [0.0, 0.0, 0.0], dtype=dtype, device=device)
        self.batches: list[tuple[Tensor, Tensor]] = []  # not yet in ``counted``

    def update(self, mean_loss: Tensor, correct: Tensor) -> None:
        """Add a batch: its mean loss, and which of its samples are correct, bool [B]."""
        self.batches.append((mean_loss.detach(), correct))
        # Counted one by one, they took more than 1 % of a step.
        if len(self.batches) == BATCHES:
            self._count()

    def _count(self) -> None:
        losses, correct = zip(*self.batches, strict=True)
        self.batches = []
        counted = self.counted.clone()  # inference mode's tensors may not be changed outside of it
        # Sizes go as numbers, since a copy to the device would wait for it; DP's outputs may lie on
        # another one than ``counted``.
        for loss, batch in zip(torch.stack(losses).to(counted), correct, strict=True):
            counted[0].add_(loss, alpha=len(batch))
        counted[1] += torch.cat(correct).sum().to(counted)
        counted[2] += sum(map(len, correct))
        self.counted = counted

    @property
    def sums(self) -> Tensor:
        """Loss sum, correct and count [3]."""
        if self.batches:
            self._count()
        return self.counted

    def sum_over_ranks(self) -> "Metrics":
        """Return the sums over all ranks. Collective; ``self`` keeps those of this rank.

        Raises:
            OutOfStep: another rank called something else. The backends pair calls by their order
                alone, and gloo notices where the sizes differ.
        """
        sums = torch.cat([self.sums, self.counted.new_tensor([CHECK_VALUE])])
        dist.all_reduce(sums)
        if float(sums[-1]) != CHECK_VALUE * dist.get_world_size():
            raise OutOfStep("a sum of metrics met another call")
        total = Metrics(sums.device)
        total.counted = sums[:-1]
        return total

    def state(self) -> list[float]:
        """Return loss sum, correct and count as Python numbers (waits for the device)."""
        return self.sums.tolist()

    @property
    def count(self) -> int:
        return int(self.state()[2])

    @property
    def correct(self) -> int:
        return int(self.state()[1])

    @property
    def loss(self) -> float:
        """Mean loss per sample; nan where nothing was counted."""
        total, _, count = self.state()
        return total / count if count else float("nan")

    @property
    def accuracy(self) -> float:
        """Correct of all samples, 0 to 1; nan where nothing was counted."""
        _, correct, count = self.state()
        return correct / count if count else float("nan")
