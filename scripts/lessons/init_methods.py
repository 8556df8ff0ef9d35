"""Four ways to bring processes together: env://, tcp://, file:// and mp.spawn.

Each process has to know its rank, the world size, and a place where it finds the others. The first
three ways differ in where these come from. Whichever you take, a process that comes first waits
for the others until its timeout. mp.spawn starts the processes and numbers them, so it needs one of
the other three besides. torchrun does both: it starts them, and sets the variables for env://.

It prints what each way says if all processes come, if one is missing, and to the mistake that is
most common with it.
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _lesson import Outcome, error_of, run_ranks, start
from break_world_size import free_port

TIMEOUT = 2.0  # seconds. gloo's default is 30 minutes, so a process that waits seems to hang


def join(rank: int, world_size: int, place: str, timeout: float = 30.0) -> float:
    """Make the process group at a place, which is a port for env://, and count the ranks."""
    limit = timedelta(seconds=timeout)
    if "://" in place:
        dist.init_process_group("gloo", place, limit, world_size, rank)
    else:
        # A launcher sets these four. env:// is the default, so no argument names it.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
        if place:
            os.environ["MASTER_PORT"] = place
        dist.init_process_group("gloo", timeout=limit)
    count = torch.ones(())
    dist.all_reduce(count)
    return float(count)


def work(rank: int, started: int, world_size: int, place: str, timeout: float) -> float:
    return join(rank, world_size, place, timeout)


def crash(rank: int, world_size: int, place: str) -> None:
    """Join, and end without the end of the process group, which would remove the file."""
    join(rank, world_size, place)
    os._exit(1)


def fail(rank: int, world_size: int, place: str) -> None:
    """Join as a process that mp.spawn has started: it gives each one its number first."""
    join(rank, world_size, place)
    if rank == 1:
        raise ArithmeticError("rank 1 makes a mistake")
    dist.all_reduce(torch.ones(()))  # rank 0 waits for rank 1


def show(title: str, place: str, started: int, timeout: float = TIMEOUT) -> list[Outcome]:
    """Start some of two processes, and print what each says."""
    print(title)
    outcomes = run_ranks(work, started, 2, place, timeout, timeout=None)
    for outcome in outcomes:
        print(f"  rank {outcome.rank}: {outcome.error or f'counted {outcome.value:.0f} ranks'}")
    return outcomes


def main() -> dict[str, bool]:
    complete, missing = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "meet"
        for way in ("env://", "tcp://", "file://"):
            places = {"env://": str(free_port()), "tcp://": f"tcp://127.0.0.1:{free_port()}"}
            place = places.get(way, f"file://{path}")
            outcomes = show(f"{way} both come", place, 2, timeout=30.0)
            complete[way] = [outcome.value for outcome in outcomes]
            is_removed = not path.exists()
            missing[way] = show(f"{way} rank 1 is missing", place, 1)[0].error
            path.unlink(missing_ok=True)
        unset = show("env:// without MASTER_PORT", "", 2)
        run_ranks(crash, 2, f"file://{path}", timeout=None)
        stale = show("file:// with the file of a job that crashed", f"file://{path}", 2)
    print("mp.spawn, where rank 1 fails while rank 0 waits for it")
    place = f"tcp://127.0.0.1:{free_port()}"
    raised = error_of(lambda: mp.spawn(fail, (2, place), nprocs=2)).splitlines()
    print(f"  {raised[0]} {raised[2]}\n  {raised[-1]}")
    return {
        "each way brings both processes together": list(complete.values()) == [[2, 2]] * 3,
        "env:// and tcp:// meet in a store that rank 0 opens. It waits, and counts who came": all(
            "1/2 clients joined" in missing[way] for way in ("env://", "tcp://")
        ),
        "env:// says at once which variable is not set": all(
            "environment variable MASTER_PORT expected" in outcome.error for outcome in unset
        ),
        "file:// meets in a file that all see. A process that waits for others names none": (
            "timeout" in missing["file://"].lower()
        ),
        "the last process removes the file. A crash leaves it, and then the next job finds "
        "addresses where nobody is": is_removed and all(outcome.error for outcome in stale),
        "mp.spawn starts the processes. If one fails, it ends the others, and raises its error": (
            "Process 1 terminated" in raised[2] and "rank 1 makes a mistake" in raised[-1]
        ),
    }


if __name__ == "__main__":
    start(main)
