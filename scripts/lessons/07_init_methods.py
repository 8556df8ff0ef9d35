"""How do the processes find each other: env://, tcp://, file://, or a store?

Each process needs its rank, the world size, and a place where all meet. Which of the four ways
needs no argument for the rank and the world size?

a) env:// alone.
b) env:// and tcp://.
c) All but the store.

- env:// is the default. It reads MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE from the
  environment, where torchrun has set them.
- tcp://ADDRESS:PORT is an address of rank 0's machine. Rank and world size are arguments.
- file:///PATH is a file that does not exist yet, on a disk that all processes see. Rank and world
  size are arguments.
- store= is an object that you made, for example a TCPStore. Rank and world size are arguments.
"""

import inspect
import os
import tempfile
from datetime import timedelta
from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist

lesson.start(__doc__, answer="a")


def meet(rank: int, world_size: int, way: str, place: str) -> str:
    options: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if way == "env://":
        host, port = place.split(":")
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, RANK=f"{rank}", WORLD_SIZE="2")
        options = {}
    elif way == "store=":
        host, port = place.split(":")
        options["store"] = dist.TCPStore(host, int(port), world_size, is_master=rank == 0)
    else:
        options["init_method"] = f"{way}{place}"
    dist.init_process_group("gloo", timeout=timedelta(seconds=30), **options)
    count = torch.ones(())
    dist.all_reduce(count)
    found = f"rank {dist.get_rank()} of {dist.get_world_size()} counted {count:.0f} ranks"
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return found


print("init_process_group, its arguments and their defaults:")
for name, parameter in list(inspect.signature(dist.init_process_group).parameters.items())[:6]:
    print(f"  {name} = {parameter.default}")
for call in (dist.get_rank, dist.get_world_size):
    print(f"before it, {call.__name__}() says: {(said := lesson.error_of(call))}")
    assert "Default process group has not been initialized" in said

with tempfile.TemporaryDirectory() as folder:
    for way in ("env://", "tcp://", "file://", "store="):
        place = f"{folder}/meet" if way == "file://" else f"127.0.0.1:{lesson.free_port()}"
        ranks = lesson.run(meet, 2, way, place, timeout=None)
        print(f"{way:8} {'; '.join(ranks)}")
        assert ranks == [f"rank {rank} of 2 counted 2 ranks" for rank in range(2)]

# What is missing is said at once. Only env:// looks into the environment.
unset = lesson.error_of(lambda: dist.init_process_group("gloo"))
no_rank = lesson.error_of(lambda: dist.init_process_group("gloo", "tcp://127.0.0.1:1"))
both = lesson.error_of(lambda: dist.init_process_group("gloo", "env://", store=dist.HashStore()))
print(unset, no_rank, both, sep="\n")
assert "environment variable RANK expected, but not set" in unset
assert "rank parameter missing" in no_rank
assert "Cannot specify both init_method and store" in both

lesson.claim("all four ways bring the ranks together; only env:// needs no argument.")
