"""Ranks with unequal numbers of batches: the hang, the wrong number, the crash, and Join.

python scripts/lessons/join_uneven.py
"""

import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from _lesson import Outcome, conclude, run_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = 2.0  # seconds; gloo's default is 30 minutes, in which all seem to hang
BATCHES = (3, 5)  # of rank 0 and of rank 1


def work(rank: int, world_size: int, case: str) -> tuple[int, list[float]]:
    """Train on this rank's batches, then do what ``case`` says; return steps and a result."""
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))  # a gradient of 3 numbers
    inputs, steps = torch.ones(2, 3), 0
    number = min(BATCHES) if case == "equal" else BATCHES[rank]
    with Join([model]) if case.startswith("join") else nullcontext():
        for _ in range(number):
            model.zero_grad()
            model(inputs).sum().backward()
            with torch.no_grad():
                model.module.weight -= 0.01 * model.module.weight.grad
            steps += 1
            if case == "join, metrics every step":
                dist.all_reduce(torch.ones(3))
    if case == "rank 0 goes on":
        time.sleep(2 * TIMEOUT if rank == 0 else 0)
        return steps, []
    if case.startswith("metrics"):
        # Loss, correct and count of an epoch: rank 0 is here two steps before rank 1.
        metrics = torch.full((3 if case == "metrics of 3 numbers" else 8,), 100.0)
        dist.all_reduce(metrics)
        return steps, metrics.tolist()
    return steps, model.module.weight.flatten().tolist()


def show(case: str, timeout: float = 30.0) -> list[Outcome]:
    outcomes = run_ranks(work, 2, case, timeout=timeout)
    print(f"{case}:")
    for outcome in outcomes:
        said = outcome.error
        if outcome.value:
            steps, result = outcome.value
            said = f"{steps} steps" + (f", then {[round(x, 2) for x in result]}" if result else "")
        print(f"  rank {outcome.rank}: {said[:170]}")
    return outcomes


def main() -> int:
    print(f"rank 0 has {BATCHES[0]} batches, rank 1 has {BATCHES[1]}")
    hang = show("rank 0 goes on", TIMEOUT)
    silent = show("metrics of 3 numbers")
    crash = show("metrics of 8 numbers")
    joined = show("join")
    mixed = show("join, metrics every step", TIMEOUT)
    equal = show("equal")
    return conclude(
        {
            "the rank with more batches waits in backward until the timeout": "Timed out waiting"
            in hang[1].error,
            "the other's next collective is taken for the missing one: a sum that should be 200 "
            "is not, and nothing says so there": not silent[0].error
            and silent[0].value[1] != [200.0] * 3,
            "where the sizes differ, the mix-up ends in an error on both": bool(
                crash[0].error and crash[1].error
            ),
            "in Join the early rank answers the calls of the other, and both end with the same "
            "weights": [outcome.value[0] for outcome in joined] == list(BATCHES)
            and joined[0].value[1] == joined[1].value[1],
            "Join answers for DDP only: a collective of one's own in the loop still fails": all(
                outcome.error for outcome in mixed
            ),
            "the same number of batches for all needs no Join": [o.value[0] for o in equal]
            == [min(BATCHES)] * 2,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
