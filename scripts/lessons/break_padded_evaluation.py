"""Break it: five ways to get a wrong accuracy out of several ranks, and the right one.

DistributedSampler repeats samples to make the shares equal. One rank's accuracy is not that of all
ranks. A mean of accuracies is wrong if the shares differ in size.

It prints the accuracy that each way reports, beside the true one.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from _lesson import error_of, start, values
from torch.utils.data import DistributedSampler

WORLD_SIZE, SAMPLES = 4, 10
MISTAKES = {0, 1}  # the samples that the model gets wrong
TRUE = 1 - len(MISTAKES) / SAMPLES


def correct(share: Sequence[int]) -> int:
    return sum(sample not in MISTAKES for sample in share)


def work(rank: int, world_size: int) -> dict[str, Any]:
    """Return this rank's shares, and the accuracy that each way finds on this rank."""
    samples: Any = range(SAMPLES)
    own = list(samples[rank::world_size])  # shares may differ by one sample
    shares: dict[str, list[int]] = {"unpadded": own}
    for name, drop in (("DistributedSampler", False), ("drop_last=True", True)):
        options: Any = {"shuffle": False, "drop_last": drop}
        shares[name] = list(DistributedSampler(samples, world_size, rank, **options))
    found: dict[str, Any] = {}
    for name, share in shares.items():
        sums = torch.tensor([correct(share), len(share)])
        dist.all_reduce(sums)  # numerator and denominator together; divided last
        found[name] = share, float(sums[0] / sums[1])
    found["own correct / all samples"] = own, correct(own) / SAMPLES
    found["own correct / own count"] = own, correct(own) / len(own)
    average = torch.tensor(correct(own) / len(own))
    returned: Any = dist.all_reduce(average)  # works in place: the sum is in its argument
    found["mean of accuracies"] = own, float(average) / world_size
    return found | {"assigned": error_of(lambda: returned / world_size)}


def main() -> dict[str, bool]:
    ranks = values(work, WORLD_SIZE)
    print(f"{SAMPLES} samples, of which the model gets {sorted(MISTAKES)} wrong: {TRUE:.1%}")
    assigned = [found.pop("assigned") for found in ranks]
    accuracy = {}
    for way in ranks[0]:
        shares = " ".join(str(found[way][0]) for found in ranks)
        accuracy[way] = [round(found[way][1], 3) for found in ranks]
        print(f"  {way:26}{shares:40}" + "".join(f"{value:7.1%}" for value in accuracy[way]))
    print(f"acc = dist.all_reduce(acc); acc / world_size: {assigned[0]}")
    return {
        "the sampler repeats the first samples until the shares are equal, and they count twice: 8 "
        "of 12": accuracy["DistributedSampler"] == [0.667] * WORLD_SIZE,
        "drop_last leaves samples out: 6 of 8": accuracy["drop_last=True"] == [0.75] * WORLD_SIZE,
        "one rank's correct answers over all samples: the accuracy falls with every device that "
        "you add": max(accuracy["own correct / all samples"]) < TRUE / 2,
        "one rank has that of its share": set(accuracy["own correct / own count"]) == {0.667, 1.0},
        "a mean of accuracies gives the samples of a small share too much weight": (
            accuracy["mean of accuracies"] == [0.833] * WORLD_SIZE
        ),
        "all_reduce returns None": all("NoneType" in error for error in assigned),
        "cure: samples[rank::world_size] has each sample once; sum correct and count over the "
        "ranks, then divide": accuracy["unpadded"] == [TRUE] * WORLD_SIZE,
    }


if __name__ == "__main__":
    start(main, "Ten samples, four ranks, 80 % are right. What does DistributedSampler report?")
