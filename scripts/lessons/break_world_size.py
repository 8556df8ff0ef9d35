"""Break it: a world size, a rank or a port that does not fit, and which process reports it.

python scripts/lessons/break_world_size.py

`scripts/check/check.py` says "equal ranks" where a script of your own does this.

It prints what each process says to each mistake.
"""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from _lesson import Outcome, run_ranks, start

TIMEOUT = 2.0  # seconds; gloo's default is 30 minutes, so that a wrong start looks like a hang


def free_port() -> int:
    """Ask the system for a port; another process can still take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def work(
    number: int, started: int, ranks: list[int], world_size: int, port: int, timeout: float
) -> float:
    """Join as ``ranks[number]`` of ``world_size``, whatever number of processes was started."""
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


def show(
    title: str, ranks: list[int], world_size: int, port: int = 0, timeout: float = TIMEOUT
) -> list[Outcome]:
    print(f"{title}: world size {world_size}, started with ranks {ranks}")
    arguments = (ranks, world_size, port or free_port(), timeout)
    outcomes = run_ranks(work, len(ranks), *arguments, timeout=None)
    for rank, outcome in zip(ranks, outcomes, strict=True):
        print(f"  rank {rank}: {outcome.error or f'counted {outcome.value:.0f} ranks'}")
    return outcomes


def main() -> dict[str, bool]:
    missing = show("one process too few", [0, 1], 3)
    too_large = show("a rank that is too large", [0, 2], 2)
    twice = show("two processes are rank 0", [0, 0], 2)
    with socket.socket() as other:  # plays another job, or a process that the last job left behind
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = show("the port is taken", [0], 1, port)
    right = show("ranks from 0, and a free port", [0, 1], 2, timeout=30.0)
    # torchrun --standalone does this: the system chooses a port that no other process has.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(f"a TCPStore on port 0 listens on port {store.port}")
    return {
        "rank 0 waits for the missing process until the timeout, and reports how many came, "
        "but not which one is missing": "waiting for clients. 2/3 clients joined."
        in missing[0].error,
        "the other rank waits as long, and names a key of the store": "wait timeout after 2000ms"
        in missing[1].error,
        "gloo is the first to notice a rank that is not below the world size": "rank < size. 2 vs 2"
        in too_large[1].error,
        "the second rank 0 finds the port taken by the first": any(
            "EADDRINUSE, message: address already in use" in outcome.error for outcome in twice
        ),
        "rank 0 cannot listen on a port that another job has": "EADDRINUSE" in taken[0].error
        and f"port: {port}" in taken[0].error,
        "cure: as many processes as the world size, ranks from 0, a free port": [
            outcome.value for outcome in right
        ]
        == [2, 2],
        "cure: on port 0 the system chooses a free port": store.port not in (0, port),
    }


if __name__ == "__main__":
    start(
        main, ask="The world size is 3, and two processes start. Which of them says what is wrong?"
    )
