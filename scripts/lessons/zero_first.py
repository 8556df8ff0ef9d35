"""Which process prepares the data: the first of each node, the first of all, or the lock's holder.

Four processes play two nodes. A disk is a folder: one for each node, or one that both share.

It prints which processes prepare the data in each case, and where that is a race.
"""

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from _lesson import start, values

NNODES, NPROC_PER_NODE = 2, 2
PREPARE_SECONDS = 2.0  # unless another rank prepares the same data, which is what to show


@contextmanager
def zero_first(rank: int) -> Iterator[None]:
    """Let rank 0 go first; the others wait in the barrier that rank 0 enters last. Collective."""
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()


@contextmanager
def file_lock(disk: Path) -> Iterator[None]:
    """Let one process in at a time. The lock needs no process group, and belongs to its disk."""
    with open(disk / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare(disk: Path, rank: int) -> None:
    """Prepare the data if there is none yet, and write down this rank."""
    if (disk / "data").exists():
        return
    note, deadline = disk / "prepared_by", time.monotonic() + PREPARE_SECONDS
    with open(note, "a") as file:
        file.write(f"{rank} ")
    while time.monotonic() < deadline and len(note.read_text().split()) < 2:
        time.sleep(0.01)
    (disk / "data").touch()


def work(rank: int, world_size: int, rule: str, layout: str, folder: str) -> None:
    node_rank, local_rank = divmod(rank, NPROC_PER_NODE)
    disk = Path(folder) / (f"node{node_rank}" if layout == "local" else "shared")
    disk.mkdir(exist_ok=True)
    dist.barrier()  # all start at once
    turn = {"local_rank": local_rank, "rank": rank}
    with file_lock(disk) if rule == "file lock" else zero_first(turn[rule]):
        prepare(disk, rank)


def prepared_by(rule: str, layout: str) -> dict[str, list[int]]:
    """Run the four processes; return for each disk the ranks that prepared its data."""
    with tempfile.TemporaryDirectory() as folder:
        values(work, NNODES * NPROC_PER_NODE, rule, layout, folder)
        return {
            path.parent.name: sorted(map(int, path.read_text().split()))
            for path in sorted(Path(folder).glob("*/prepared_by"))
        }


def main() -> dict[str, bool]:
    print("ranks 0 and 1 are node 0, ranks 2 and 3 node 1; ranks that prepared each disk's data:")
    once = {}
    for rule in ("local_rank", "rank", "file lock"):
        cells = []
        for layout in ("local", "shared"):
            disks = prepared_by(rule, layout)
            once[rule, layout] = all(len(ranks) == 1 for ranks in disks.values())
            text = ", ".join(f"{disk} by {ranks}" for disk, ranks in disks.items())
            cells.append(text if once[rule, layout] else f"{text} RACE")
        print(f"  {rule:12}{cells[0]:44}{cells[1]}")
    return {
        "zero first by local_rank is right if each node has its own disk, and a race on a shared "
        "disk": once["local_rank", "local"] and not once["local_rank", "shared"],
        "zero first by rank is right on a shared disk, and a race on the disks of other nodes": (
            once["rank", "shared"] and not once["rank", "local"]
        ),
        "cure: a file lock is right on both, without a process group": once["file lock", "local"]
        and once["file lock", "shared"],
    }


if __name__ == "__main__":
    start(main)
