"""The world size is 3, and two processes start: which of them says what is wrong?

The same question for a rank that is too large, and for two processes with rank 0. Two launchers
with `--node_rank 0` start such processes, and so does a second job with the port of the first.

a) Both at once, because the third rank is not there.
b) Both after the timeout. Rank 0 says how many ranks came.
c) Rank 0 after the timeout. It names the rank that is missing.
"""

from datetime import timedelta

import _lesson as lesson
import torch
import torch.distributed as dist

lesson.start(__doc__, answer="b")


def join(number: int, started: int, ranks: list[int], world_size: int, port: int) -> str:
    """Join as ``ranks[number]`` of ``world_size``, however many processes were started."""
    # gloo's timeout is 30 minutes by default, so that a wrong start looks like a hang.
    limit = timedelta(seconds=30 if sorted(ranks) == list(range(world_size)) else 2)
    address = f"tcp://127.0.0.1:{port}"  # of rank 0's machine: other machines need its own address
    dist.init_process_group("gloo", address, limit, world_size, ranks[number])
    count = torch.ones(())
    dist.all_reduce(count)
    return f"counted {count:.0f} ranks"


def show(title: str, ranks: list[int], world_size: int) -> list[str]:
    print(f"{title}: world size {world_size}, started with ranks {ranks}")
    arguments = (ranks, world_size, lesson.free_port())
    said = lesson.run(join, len(ranks), *arguments, timeout=None, may_fail=True)
    for rank, text in zip(ranks, said, strict=True):
        print(f"  rank {rank}: {text[:150]}")
    return said


missing = show("one process too few", [0, 1], 3)
# Rank 0 waits until the timeout. It says how many came, and not who is missing.
assert "2/3 clients joined" in missing[0]
assert "timeout after 2000ms" in missing[1]

too_large = show("a rank that is too large", [0, 2], 2)
# The store does not look at the ranks. gloo does, when both have come.
assert "rank < size. 2 vs 2" in too_large[1]

twice = show("two processes are rank 0", [0, 0], 2)
# Each rank 0 opens the port. On two machines both would open one, and wait for rank 1.
assert any("EADDRINUSE" in text for text in twice)

right = show("ranks from 0, and a free port", [0, 1], 2)
assert right == ["counted 2 ranks"] * 2
# Port 0 lets the system choose a free one: torchrun --standalone does this.
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(f"a TCPStore on port 0 listens on port {store.port}")
assert store.port != 0

lesson.claim("rank 0 says how many came, after its timeout; nobody names the rank that is missing.")
