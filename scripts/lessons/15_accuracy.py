"""Ten samples on four ranks, eight of them right: which accuracy does each way report?

Samples 0 and 1 are answered wrongly. The samples are divided by DistributedSampler, and all ranks'
correct answers are divided by all ranks' samples. The result is

a) 66.7 %.
b) 75.0 %.
c) 80.0 %.

DistributedSampler repeats samples to make the shares equal. One rank's accuracy is not that of all
ranks. A mean of accuracies is wrong if the shares differ in size.
"""

from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

lesson.start(__doc__, answer="a")
WORLD_SIZE = 4
SAMPLES = range(10)
MISTAKES = (0, 1)


def correct(share: list[int]) -> int:
    return sum(sample not in MISTAKES for sample in share)


def exact(share: list[int]) -> float:
    sums = torch.tensor([correct(share), len(share)])
    dist.all_reduce(sums)  # works in place; numerator and denominator together, divided last
    return (sums[0] / sums[1]).item()


def average(value: float) -> float:
    mean = torch.tensor(value)
    try:
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    except RuntimeError:  # gloo of an older torch: ReduceOp.SUM, and divide
        dist.all_reduce(mean)
        mean /= WORLD_SIZE
    return mean.item()


def work(rank: int, world_size: int) -> dict[str, tuple[list[int], float]]:
    """Return the share of this rank and the accuracy that it reports, for each way."""
    share = list(SAMPLES[rank::world_size])  # shares may differ by one sample
    samples: Any = SAMPLES
    padded: list[int] = list(DistributedSampler(samples, shuffle=False))
    dropped: list[int] = list(DistributedSampler(samples, shuffle=False, drop_last=True))
    # An assignment would lose the sum, since the call returns nothing.
    assert dist.all_reduce(torch.ones(1)) is None
    return {
        "DistributedSampler": (padded, exact(padded)),
        "drop_last=True": (dropped, exact(dropped)),
        "own correct / all samples": (share, correct(share) / len(SAMPLES)),
        "own correct / own samples": (share, correct(share) / len(share)),
        "ReduceOp.AVG of these": (share, average(correct(share) / len(share))),
        "sum of correct / sum of samples": (share, exact(share)),
    }


ranks = lesson.run(work, WORLD_SIZE)
reported = []
for way in ranks[0]:
    shares = " ".join(str(rank[way][0]) for rank in ranks)
    reported.append([round(rank[way][1], 3) for rank in ranks])
    print(f"{way:32}{shares:38}" + "".join(f"{value:7.1%}" for value in reported[-1]))
padded, dropped, of_all, own, mean, right = reported
# Samples 0 and 1 are repeated, and both are wrong twice: 8 of 12.
assert padded == [0.667] * 4
# Samples 8 and 9 are left out: 6 of 8.
assert dropped == [0.75] * 4
# The more ranks, the lower: the accuracy seems to fall with each GPU.
assert max(of_all) < 0.5
assert sorted(own) == [0.667, 0.667, 1, 1]
# Each rank has the same weight in the mean, although two have three samples and two have two.
assert mean == [0.833] * 4
# The cure: samples[rank::world_size] has each sample once.
assert right == [0.8] * 4

lesson.claim("add up correct answers and samples over the ranks, and divide last.")
