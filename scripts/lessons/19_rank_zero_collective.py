"""Rank 0 calls one all_reduce more than rank 1: does it hang, or is a sum wrong?

A collective under `if rank == 0` is the usual cause. Rank 0 reduces a count, which is 10. Rank 1
does not, and its next collective is the all_reduce of a gradient, which is 1000.

a) Both get 1010, without an error.
b) Both get an error that names the two calls.
c) Rank 0 waits for its timeout.

gloo waits 30 minutes by default and NCCL 10, so a job seems to hang. Here the timeout is two
seconds.
"""

import time
from datetime import timedelta

import _lesson as lesson
import torch
import torch.distributed as dist

lesson.start(__doc__, answer="a")
LIMIT = timedelta(seconds=2)


def work(rank: int, world_size: int, case: str) -> tuple[str, float]:
    correct = torch.tensor([10.0 * (rank + 1)])  # 10 and 20: the sum is 30
    if case == "all ranks call it":
        dist.all_reduce(correct)
        return "correct", correct.item()
    if case == "the other rank is late, in a monitored_barrier":
        time.sleep(4 * rank)
        dist.monitored_barrier(timeout=LIMIT)
    if rank == 0:
        dist.all_reduce(correct)  # wrong: the other rank does not call it
    elif case == "the other rank is busy":
        time.sleep(4)  # a slow disk, a longer validation, a first compilation
    if case == "the other rank calls its next collective" and rank == 1:
        gradient = torch.tensor([1000.0])
        dist.all_reduce(gradient)
        return "gradient", gradient.item()
    return "correct", correct.item()


def show(case: str, timeout: float) -> list:
    print(f"{case}:")
    ranks = lesson.run(work, 2, case, timeout=timeout, may_fail=True)
    for rank, found in enumerate(ranks):
        told = found if isinstance(found, str) else f"{found[0]} = {found[1]:.0f}"
        print(f"  rank {rank}: {told.split('] ')[-1][:100]}")
    return ranks


busy = show("the other rank is busy", 2)
# Rank 0 waits alone until its timeout, and its error names no rank.
assert "Timed out waiting 2000ms" in busy[0]
assert "rank" not in busy[0]
assert busy[1] == ("correct", 20)
gone = show("the other rank has ended", 30)
assert "onnection" in gone[0]
late = show("the other rank is late, in a monitored_barrier", 30)
# This barrier names the rank that did not come. gloo has it, and NCCL has not.
assert "Rank 1 failed to pass monitoredBarrier in 2000 ms" in late[0]
mixed = show("the other rank calls its next collective", 30)
# The two calls are taken for one: both ranks get 10 + 1000, and no error says so.
assert mixed == [("correct", 1010), ("gradient", 1010)]
assert show("all ranks call it", 30) == [("correct", 30)] * 2

lesson.claim("it waits for the timeout, or pairs with another call; all ranks must make each call.")
