"""Break it: a world size, a rank or a port that does not fit, and which process reports it.

It prints what each process says to each mistake.
"""

import os
import socket
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from _lesson import Outcome, run_ranks, start

TIMEOUT = 2.0  # seconds; gloo's default is 30 minutes, so that a wrong start looks like a hang


def free_port() -> int:
    """Return a port below those that the system gives away, so that nobody takes it meanwhile."""
    for port in range(12_000 + os.getpid() % 15_000, 32_000):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError("no port is free")


def work(
    number: int, started: int, ranks: list[int], world_size: int, port: int, timeout: float
) -> float:
    """Join as ``ranks[number]`` of ``world_size``, whatever number of processes was started."""
    address, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=timeout)
    rank = ranks[number]
    dist.init_process_group("gloo", address, rank=rank, world_size=world_size, timeout=limit)
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


def main() -> dict[str, bool]:
    missing = show("one process too few", [0, 1], 3)
    too_large = show("a rank that is too large", [0, 2], 2)
    twice = show("two processes are rank 0", [0, 0], 2)
    right = show("ranks from 0, and a free port", [0, 1], 2, timeout=30.0)
    # torchrun --standalone does this: the system chooses a port that no other process has.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(f"a TCPStore on port 0 listens on port {store.port}")
    return {
        "rank 0 waits for the missing process until the timeout, and reports how many came, "
        "but not which one is missing": "2/3 clients joined." in missing[0].error,
        "the other one names a key of the store": "wait timeout after 2000ms" in missing[1].error,
        "gloo is the first to notice a rank that is not below the world size": (
            "rank < size. 2 vs 2" in too_large[1].error
        ),
        "the second rank 0 finds the port taken by the first, as if another job had it": any(
            "EADDRINUSE, message: address already in use" in outcome.error for outcome in twice
        ),
        "cure: as many processes as the world size, ranks from 0, a free port": (
            [outcome.value for outcome in right] == [2, 2]
        ),
        "cure: on port 0 the system chooses a free port": store.port != 0,
    }


if __name__ == "__main__":
    start(main, "The world size is 3, and two processes start. Which of them says what is wrong?")
