"""Ranks with unequal numbers of batches: the crash, and the cures (Join, or equal numbers).

It prints how the ranks end without Join, with it, and with equal numbers of batches.
break_rank_zero_collective shows how the same mistake ends in a hang or in a wrong sum.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from _lesson import show, start
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = 2.0  # seconds
BATCHES = (3, 5)  # of rank 0 and of rank 1


def work(rank: int, world_size: int, case: str) -> tuple[int, list[float]]:
    """Train on this rank's batches as ``case`` says; return the number of steps and the weights."""
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))  # a gradient of 3 numbers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, steps = torch.ones(2, 3), 0
    number = min(BATCHES) if case == "equal numbers" else BATCHES[rank]
    with Join([model]) if case.startswith("Join") else nullcontext():
        for _ in range(number):
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
            steps += 1
            if case == "Join, and metrics in every step":
                dist.all_reduce(torch.ones(3))
    if case == "metrics after the epoch":
        dist.all_reduce(torch.ones(8))  # rank 0 is here while rank 1 still computes gradients
    return steps, model.module.weight.flatten().tolist()


def main() -> dict[str, bool]:
    print(f"rank 0 has {BATCHES[0]} batches, rank 1 has {BATCHES[1]}")
    told = "{0[0]} steps, weights {0[1]}"
    crash = show(told, work, "metrics after the epoch")
    joined = show(told, work, "Join")
    mixed = show(told, work, "Join, and metrics in every step", timeout=TIMEOUT)
    equal = show(told, work, "equal numbers")
    return {
        "rank 0's sum of metrics meets a gradient of rank 1, which has another size: both ranks "
        "fail": all(outcome.error for outcome in crash),
        "cure: in Join the early rank answers the collectives of the other, and both end with the "
        "same weights": [outcome.value[0] for outcome in joined] == list(BATCHES)
        and joined[0].value[1] == joined[1].value[1],
        "Join answers the collectives of DDP only: your own in the loop still fails": all(
            outcome.error for outcome in mixed
        ),
        "cure: with the same number of batches on all ranks, nothing else is needed": (
            [outcome.value[0] for outcome in equal] == [min(BATCHES)] * 2
        ),
    }


if __name__ == "__main__":
    start(main)
