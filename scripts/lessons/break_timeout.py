"""Break it: one rank is slower than the timeout of the others, and what names the slow one.

python scripts/lessons/break_timeout.py
"""

import sys
import time
from datetime import timedelta

import torch.distributed as dist
from _lesson import Outcome, conclude, run_ranks

SLOW_SECONDS, SHORT = 2.5, 1.0
SLOW_RANK = 2


def work(rank: int, world_size: int, case: str) -> float:
    """Meet the others after unequal work; return the seconds spent waiting for them."""
    if rank == SLOW_RANK:
        time.sleep(SLOW_SECONDS)  # a slow disk, a longer validation, a first compilation
    begin = time.monotonic()
    if case == "monitored_barrier":
        dist.monitored_barrier(timeout=timedelta(seconds=SHORT), wait_all_ranks=True)
    else:
        dist.barrier()
    return time.monotonic() - begin


def show(case: str, timeout: float) -> list[Outcome]:
    outcomes = run_ranks(work, 3, case, timeout=timeout)
    print(f"{case}, process group's timeout {timeout:g} s:")
    for outcome in outcomes:
        said = outcome.error[:160] or f"waited {outcome.value:.1f} s"
        print(f"  rank {outcome.rank}: {said}")
    return outcomes


def main() -> int:
    print(f"rank {SLOW_RANK} is {SLOW_SECONDS:g} s late")
    short = show("barrier", SHORT)
    named = show("monitored_barrier", 30.0)
    fixed = show("barrier", 30.0)
    return conclude(
        {
            "the others give up, and name no rank": any(
                "Timed out waiting 1000ms" in outcome.error for outcome in short[:SLOW_RANK]
            )
            and not any("Rank 2" in outcome.error for outcome in short),
            "the slow one comes to find them gone": "onnection" in short[SLOW_RANK].error,
            "monitored_barrier (gloo's alone) names it, on rank 0": "Ranks 2 failed to pass "
            "monitoredBarrier in 1000 ms" in named[0].error,
            "with a timeout longer than the longest work, they wait for it": all(
                outcome.value > SLOW_SECONDS / 2 for outcome in fixed[:SLOW_RANK]
            ),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
