"""Which process prepares the data, and how do the others wait for it?

Four processes play two machines here. A disk is a folder, of one machine or shared by both. Each
machine has a disk of its own, and the data is not there yet. Who prepares it?

a) Local rank 0 of each machine, while the others wait at a barrier.
b) Rank 0, while the others wait at a barrier.
c) Rank 0, which then sends it to the others.

`torch_distributed_zero_first(local_rank)` of many repositories lets local rank 0 of each machine go
first. It means "no process group" by -1: a single process calls no barrier. PyTorch itself reads
nothing ahead for other processes. The barrier moves no data, and the others read the files.
"""

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import _lesson as lesson
import torch.distributed as dist

lesson.start(__doc__, answer="a")
memory: list[str] = []


@contextmanager
def zero_first(rank: int) -> Iterator[None]:
    if rank not in (-1, 0):
        dist.barrier()  # wait until rank 0 is in its barrier, after its work
    yield
    if rank == 0:
        dist.barrier()


@contextmanager
def file_lock(disk: Path) -> Iterator[None]:
    with open(disk / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the next process waits here, without a process group
        yield


def prepare(disk: Path, rank: int) -> None:
    """Prepare the data if there is none yet, and write down this rank."""
    if (disk / "data").exists():
        return
    with open(disk / "prepared_by", "a") as file:
        file.write(f"{rank} ")
    time.sleep(1)  # a download
    (disk / "data").touch()
    memory.append("data")


def work(rank: int, world_size: int, rule: str, disks: str, folder: str) -> int:
    node_rank, local_rank = divmod(rank, 2)
    disk = Path(folder, "shared" if disks == "one shared disk" else f"disk{node_rank}")
    disk.mkdir(exist_ok=True)
    dist.barrier()  # all start at once
    turn = local_rank if rule == "local rank 0 first" else rank
    with file_lock(disk) if rule == "a file lock" else zero_first(turn):
        prepare(disk, rank)
    return len(memory)


once = {}
for rule in ("local rank 0 first", "rank 0 first", "a file lock"):
    for disks in ("a disk each", "one shared disk"):
        with tempfile.TemporaryDirectory() as folder:
            in_memory = lesson.run(work, 4, rule, disks, folder)
            found = {p.parent.name: p.read_text().split() for p in Path(folder).glob("*/prepared*")}
        once[rule, disks] = all(len(ranks) == 1 for ranks in found.values())
        told = ", ".join(f"{disk} by {' and '.join(found[disk])}" for disk in sorted(found))
        print(f"{rule:19}{disks:16}{'once' if once[rule, disks] else 'RACE'}: {told}")
        # Whoever did not prepare the data has nothing in its memory.
        assert sum(in_memory) == sum(map(len, found.values())) < 4

# Each rule for its disks. A file lock belongs to its disk, and is right on both.
assert once["local rank 0 first", "a disk each"]
assert not once["local rank 0 first", "one shared disk"]
assert once["rank 0 first", "one shared disk"]
assert not once["rank 0 first", "a disk each"]
assert once["a file lock", "a disk each"]
assert once["a file lock", "one shared disk"]
# Without a process group a barrier fails. -1 needs none.
with zero_first(-1):
    print("-1: a single process calls no barrier")
said = lesson.error_of(dist.barrier)
assert "not been initialized" in said

lesson.claim("one process for each disk prepares the data; a barrier makes the others wait.")
