"""What does mp.spawn start, and what do its `join` and `daemon` mean?

`mp.spawn(fn, args, nprocs, join=True, daemon=False)` starts processes from a script, without a
launcher. It calls `fn(index, *args)` in each of them. Process 1 of two raises an error while
process 0 waits for it. With join=True, mp.spawn

a) waits for process 0, and then returns.
b) returns at once.
c) ends process 0, and raises the error of process 1.

It sets no environment variable: you choose the address. On the second of two machines the index is
0 and 1 again, so there the rank is `node_rank * nprocs + index`. A new process imports the script
again, to find the function. So the call has to be below `if __name__ == "__main__"`, and the
function may not be in a notebook's cell.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import _lesson as lesson
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader


def join_group(index: int, nprocs: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=index, world_size=nprocs)


def count(index: int, nprocs: int, folder: str) -> None:
    """Count the ranks, and try to start a loader's worker; write down both."""
    join_group(index, nprocs, folder)
    ranks = torch.ones(())
    dist.all_reduce(ranks)
    loader: DataLoader = DataLoader([1.0], num_workers=1)  # type: ignore[arg-type]
    said = lesson.error_of(lambda: next(iter(loader)))
    Path(folder, str(index)).write_text(f"counted {ranks:.0f} ranks; a worker: {said}")
    dist.destroy_process_group()


def fail(index: int, nprocs: int, folder: str) -> None:
    join_group(index, nprocs, folder)
    if index == 1:
        raise ArithmeticError("process 1 makes a mistake")
    dist.all_reduce(torch.ones(()))  # waits for process 1


if __name__ == "__main__":
    lesson.start(__doc__, answer="c")
    with TemporaryDirectory() as folder:
        begin = time.perf_counter()
        context = mp.spawn(count, (2, folder), nprocs=2, join=False, daemon=True)
        print(f"join=False: the call is back after {time.perf_counter() - begin:.1f} s")
        # Both processes still run. join() is True only when all of them have ended.
        assert not context.join(timeout=0)
        while not context.join():
            pass
        for index in range(2):
            text = Path(folder, str(index)).read_text()
            print(f"  fn({index}, ...) {text}")
            assert "counted 2 ranks" in text
            # daemon=True: they end with their parent, and may not have children of their own.
            assert "daemonic processes are not allowed to have children" in text

    # join=True waits. If a process fails, it ends the others and raises the error. This is mp.spawn
    # with another start method, which is faster: mp.spawn calls start_processes(..., "spawn").
    with TemporaryDirectory() as folder:
        try:
            mp.start_processes(fail, (2, folder), nprocs=2, join=True, start_method="fork")
        except mp.ProcessRaisedException as error:
            said = str(error).strip().splitlines()
            print(f"join=True: {said[0]}\n  {said[-1]}")
    assert "Process 1 terminated" in said[0]
    assert "process 1 makes a mistake" in said[-1]

    lesson.claim("mp.spawn numbers processes from 0; join=True waits, and raises what one raised.")
