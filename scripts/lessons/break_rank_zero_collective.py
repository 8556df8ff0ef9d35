"""Break it: a collective under `if rank == 0`, which the other ranks never call.

It prints what each rank's sums are, and how the wait ends.
"""

import time

import torch
import torch.distributed as dist
from _lesson import show, start

TIMEOUT = 2.0  # seconds; gloo's default is 30 minutes, so that the job seems to hang


def work(rank: int, world_size: int, case: str) -> tuple[str, float]:
    correct = torch.tensor([10.0 * (rank + 1)])  # 10 and 20: the sum is 30
    if case == "all ranks call it, rank 0 reports":
        dist.all_reduce(correct)
        return "correct", float(correct)
    if rank == 0:
        dist.all_reduce(correct)  # wrong: the other rank does not call it
    if case == "the other rank is busy" and rank != 0:
        time.sleep(2 * TIMEOUT)
    if case == "the other rank calls its next collective":
        gradient = torch.tensor([1000.0])  # the sum is 2000
        dist.all_reduce(gradient)
        return "gradient", float(gradient)
    return "correct", float(correct)


def main() -> dict[str, bool]:
    told = "{0[0]} = {0[1]:.0f}"
    busy = show(told, work, "the other rank is busy", timeout=TIMEOUT)
    gone = show(told, work, "the other rank has ended")
    mixed = show(told, work, "the other rank calls its next collective")
    fixed = show(told, work, "all ranks call it, rank 0 reports")
    return {
        "rank 0 waits alone until the timeout, and its error names no rank": (
            "Timed out waiting 2000ms for recv operation" in busy[0].error
        )
        and "rank" not in busy[0].error
        and not busy[1].error,
        "if the other rank has ended, the error is about the connection": (
            "onnection" in gone[0].error and not gone[1].error
        ),
        "the call meets the other rank's next collective, and 1000 + 10 is taken for the sum of "
        "the gradients, without an error": mixed[1].value == ("gradient", 1010.0),
        "cure: called by all ranks, it gives all ranks the sum": all(
            outcome.value == ("correct", 30.0) for outcome in fixed
        ),
    }


if __name__ == "__main__":
    start(main, "Rank 0 calls one all_reduce more than rank 1. Does it hang, or is a sum wrong?")
