"""Break it: a collective under `if rank == 0`, which the other ranks never enter.

python scripts/lessons/break_rank_zero_collective.py
"""

import sys
import time

import torch
import torch.distributed as dist
from _lesson import Outcome, conclude, run_ranks

TIMEOUT = 2.0  # seconds; gloo's default is 30 minutes, in which all seem to hang


def work(rank: int, world_size: int, case: str) -> tuple[str, float]:
    correct = torch.tensor([10.0 * (rank + 1)])  # 10 and 20: the sum is 30
    if case == "all ranks call it, rank 0 reports":
        dist.all_reduce(correct)
        return "correct", float(correct)
    if rank == 0:
        dist.all_reduce(correct)  # wrong: nobody else comes here
    if case == "the others are busy elsewhere" and rank != 0:
        time.sleep(2 * TIMEOUT)
    if case == "the others go on to their next collective":
        gradient = torch.tensor([1000.0])  # the sum is 2000
        dist.all_reduce(gradient)
        return "gradient", float(gradient)
    return "correct", float(correct)


def show(case: str, timeout: float = 30.0) -> list[Outcome]:
    outcomes = run_ranks(work, 2, case, timeout=timeout)
    print(f"{case}:")
    for outcome in outcomes:
        said = outcome.error or "{} = {:.0f}".format(*outcome.value)
        print(f"  rank {outcome.rank}: {said[:180]}")
    return outcomes


def main() -> int:
    busy = show("the others are busy elsewhere", TIMEOUT)
    gone = show("the others have ended")
    mixed = show("the others go on to their next collective")
    fixed = show("all ranks call it, rank 0 reports")
    return conclude(
        {
            "rank 0 waits alone, until the timeout": "Timed out waiting 2000ms for recv operation"
            in busy[0].error
            and not busy[1].error,
            "or until the others end, and then blames their connection": "onnection"
            in gone[0].error
            and not gone[1].error,
            "or its call is paired with the next one of the others: 1000 + 10 is taken for the "
            "sum of the gradients, without an error": mixed[1].value == ("gradient", 1010.0),
            "called by all ranks it gives all ranks the sum": all(
                outcome.value == ("correct", 30.0) for outcome in fixed
            ),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
