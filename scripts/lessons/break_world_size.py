"""Break it: a world size or a rank that does not fit, and who says what about it.

python scripts/lessons/break_world_size.py
"""

import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from _lesson import Outcome, conclude, run_ranks

TIMEOUT = 2.0  # seconds; gloo's default is 30 minutes, in which all seem to hang


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def work(
    number: int, started: int, ranks: list[int], world_size: int, port: int, timeout: float
) -> float:
    """Join as ``ranks[number]`` of ``world_size``, however many processes there really are."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=ranks[number],
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    value = torch.ones(())
    dist.all_reduce(value)
    return float(value)


def show(title: str, ranks: list[int], world_size: int, timeout: float = TIMEOUT) -> list[Outcome]:
    print(f"{title}: world size {world_size}, started with ranks {ranks}")
    arguments = (ranks, world_size, free_port(), timeout)
    outcomes = run_ranks(work, len(ranks), *arguments, timeout=None)
    for rank, outcome in zip(ranks, outcomes, strict=True):
        print(f"  rank {rank}: {outcome.error or f'counted {outcome.value:.0f} ranks'}")
    return outcomes


def main() -> int:
    missing = show("one process too few", [0, 1], 3)
    too_large = show("a rank that is too large", [0, 2], 2)
    twice = show("both say they are rank 0", [0, 0], 2)
    fixed = show("right", [0, 1], 2, timeout=30.0)
    return conclude(
        {
            "rank 0 waits for the missing one until the timeout and says how many came, not "
            "which": "waiting for clients. 2/3 clients joined." in missing[0].error,
            "the other rank waits, too, and names a key of the store": "wait timeout after"
            in missing[1].error,
            "nothing checks that a rank is below the world size before gloo does": (
                "rank < size" in too_large[1].error
            ),
            "a second rank 0 finds the port taken by the first": any(
                "EADDRINUSE" in outcome.error for outcome in twice
            ),
            "as many processes as the world size, ranks from 0, and all is well": all(
                outcome.value == 2 for outcome in fixed
            ),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
