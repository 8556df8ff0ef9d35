"""What the lessons share: ranks as real processes, a time limit, and claims that are checked."""

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIME_LIMIT = 60.0  # seconds; no lesson and no rank of one outlives it, whatever it hangs in
sys.path.insert(0, str(Path(__file__).parents[2]))  # the project's modules, for who uses them
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # in the ranks: a retry is no lesson
# Ranks are forks of a server that imported torch once, so that they start in milliseconds.
context = multiprocessing.get_context("forkserver")
# A rank imports its lesson and so this module: this holds in every process of a lesson, and in none
# that only borrows a function.
if Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent or (
    multiprocessing.parent_process() is not None
):
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    torch.set_num_threads(1)


@dataclass
class Outcome:
    """What became of a rank: what its function returned, or the first line of its exception."""

    rank: int
    value: Any = None
    error: str = ""


def first_line(error: BaseException) -> str:
    """Return what a traceback ends with, cut to its first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def conclude(claims: dict[str, bool]) -> int:
    """Print each claim of a lesson with what its run showed; return 0 if it showed them all."""
    print()
    for claim, shown in claims.items():
        print(f"{'shown' if shown else 'NOT SHOWN'}: {claim}")
    return 0 if all(claims.values()) else 1


def run_ranks(
    work: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = 30.0
) -> list[Outcome]:
    """Call ``work(rank, world_size, *args)`` in as many processes; return what became of each.

    ``timeout`` is how long a collective waits, in seconds; with None there is no process group.
    """
    # DDP's constructor imports torch._dynamo, which would take seconds in every rank.
    uses_ddp = "DistributedDataParallel" in work.__globals__
    context.set_forkserver_preload(["torch._dynamo" if uses_ddp else "torch"])
    outcomes, started = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            pipe, theirs = context.Pipe(duplex=False)
            arguments = (theirs, folder, timeout, work, rank, world_size, *args)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((process, pipe))
        for rank, (process, pipe) in enumerate(started):
            try:
                outcomes.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                process.join(timeout=5)
                outcomes.append(Outcome(rank, error=f"the process died ({process.exitcode})"))
        for process, _ in started:
            process.join(timeout=5)
            process.kill()
    return outcomes


def _meet(store: dist.Store, place: str, rank: int, world_size: int) -> None:
    store.set(f"{place}/{rank}", "")
    store.wait([f"{place}/{i}" for i in range(world_size)], timedelta(seconds=30))


def _rank(pipe: Any, folder: str, timeout: float | None, work: Any, *args: Any) -> None:
    rank, world_size = args[:2]
    if timeout is not None:
        store = dist.FileStore(f"{folder}/store", world_size)
        # Starting up is not to count against a timeout that a lesson makes short on purpose.
        _meet(store, "started", rank, world_size)
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=limit
        )
        # Nor may a rank whose work is short be gone before the others have their connections.
        _meet(store, "connected", rank, world_size)
    try:
        outcome = Outcome(rank, work(*args))
    except Exception as error:
        outcome = Outcome(rank, error=first_line(error))
    # As bytes: a tensor itself would go as shared memory that ends with this process.
    pipe.send_bytes(pickle.dumps(outcome))
    if dist.is_initialized():
        dist.destroy_process_group()
