"""Break it: one rank comes after the timeout of the others. What names the late rank?

It prints what each rank raises, and how long it waited.
"""

import time
from datetime import timedelta

import torch.distributed as dist
from _lesson import show, start

LATE_SECONDS, SHORT = 2.5, 1.0
LATE_RANK = 2


def work(rank: int, world_size: int, case: str) -> float:
    """Meet the others after unequal work; return the seconds spent waiting for them."""
    dist.barrier()  # all begin together
    if rank == LATE_RANK:
        time.sleep(LATE_SECONDS)  # a slow disk, a longer validation, a first compilation
    begin = time.monotonic()
    if case.startswith("monitored_barrier"):
        dist.monitored_barrier(timeout=timedelta(seconds=SHORT), wait_all_ranks=True)
    else:
        dist.barrier()
    return time.monotonic() - begin


def main() -> dict[str, bool]:
    print(f"rank {LATE_RANK} is {LATE_SECONDS:g} s late")
    told = "waited {:.1f} s"
    named = show(told, work, f"monitored_barrier, timeout {SHORT:g} s", ranks=3)
    fixed = show(told, work, "barrier, timeout 30 s", ranks=3)
    return {
        "monitored_barrier names the late rank, on rank 0 (gloo has it, NCCL does not)": (
            "Ranks 2 failed to pass monitoredBarrier in 1000 ms" in named[0].error
        ),
        "the late rank's own error does not say so": "Ranks 2" not in named[LATE_RANK].error != "",
        "cure: with a timeout longer than the longest work, the others wait for it": all(
            outcome.value and outcome.value > LATE_SECONDS / 2 for outcome in fixed[:LATE_RANK]
        ),
    }


if __name__ == "__main__":
    start(main, "One rank is late. Which rank's error names it?")
