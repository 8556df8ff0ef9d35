"""What is a process group, and when do you need another one?

All ranks are in the default group, and data parallelism needs no other. `dist.new_group(ranks)`
makes a smaller one, for sums over a part of the ranks, for example over those of one machine. There
are four ranks. Who has to call `dist.new_group([0, 1])`?

a) Rank 0.
b) Ranks 0 and 1.
c) All four.

A new group may also have another backend: `dist.new_group(backend="gloo")` reduces metrics without
the GPU.
"""

from datetime import timedelta
from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist

lesson.start(__doc__, answer="c")
PAIRS = ([0, 1], [2, 3])  # two machines with two ranks each


def work(rank: int, world_size: int) -> tuple[list[int], float, float]:
    """Return this rank's numbers in its pair and in the other pair, and the sums of two groups."""
    groups: list[Any] = [dist.new_group(pair) for pair in PAIRS]  # every rank makes both
    machine = rank // 2
    of_all = torch.tensor([10.0**rank])
    of_pair = of_all.clone()
    dist.all_reduce(of_all)
    dist.all_reduce(of_pair, group=groups[machine])
    numbers = [dist.get_rank(groups[machine]), dist.get_rank(groups[1 - machine])]
    return numbers, of_all.item(), of_pair.item()


def own_group_only(rank: int, world_size: int) -> float:
    """Wrong: only its members make a group."""
    limit = timedelta(seconds=2)  # a new group does not inherit the timeout of the default group
    if rank in PAIRS[0]:
        dist.new_group(PAIRS[0], limit)
    late: Any = dist.new_group([0, 2], limit)
    value = torch.ones(())
    if rank in (0, 2):
        dist.all_reduce(value, group=late)
    return value.item()


ranks = lesson.run(work, 4)
for rank, (numbers, of_all, of_pair) in enumerate(ranks):
    print(f"rank {rank} gives {10**rank:4}: the sum of all is {of_all:.0f}, of its pair", end=" ")
    print(f"{of_pair:.0f}; it is number {numbers[0]} of its pair")
assert [of_all for _, of_all, _ in ranks] == [1111] * 4
assert [of_pair for _, _, of_pair in ranks] == [11, 11, 1100, 1100]
# A rank has another number in a smaller group, and -1 where it is not a member.
assert [numbers for numbers, _, _ in ranks] == [[0, -1], [1, -1], [0, -1], [1, -1]]

wrong = lesson.run(own_group_only, 4, may_fail=True)
print("Ranks 0 and 1 make a group alone. After that all make a group of ranks 0 and 2:")
for rank, text in enumerate(wrong):
    print(f"  rank {rank}: {str(text)[:110]}")
# The ranks now number their groups differently, so that ranks 0 and 2 do not find each other.
assert all("time" in wrong[rank].lower() for rank in (0, 2))

lesson.claim("a group is a set of ranks that communicate; all ranks have to make each group.")
