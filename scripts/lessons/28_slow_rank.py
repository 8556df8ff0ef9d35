"""One of three ranks is slower than the others: how long do they wait, and where is it seen?

Rank 1 needs 0.2 s more than the others to load each batch. A profile of rank 0 shows that

a) rank 0 does not wait, because each rank has its own speed.
b) rank 0 waits in its backward, as if the network were slow.
c) rank 0 waits in its next forward, which begins with a barrier.

DDP's backward averages the gradients of all ranks, so it ends when the last rank has sent its own.
On a GPU backward() returns before that. There the wait is seen where the script waits for the GPU,
for example in loss.item(), and in a profile as a long all-reduce kernel on the fast ranks.
"""

import time
from itertools import pairwise
from statistics import median

import _lesson as lesson
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="b")
WORLD_SIZE = 3
STEPS = 7
DELAY = 0.2  # seconds


def work(rank: int, world_size: int, case: str) -> list[float]:
    """Return the median seconds of loading, forward, backward, update, and of a whole step."""
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = []
    for step in range(STEPS):
        moments = [time.perf_counter()]
        if rank == (1 if case == "rank 1 is slow" else step % world_size):
            time.sleep(DELAY)  # a slow disk, a larger image, a busy core
        moments.append(time.perf_counter())
        loss = model(torch.ones(4, 8)).mean()
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        moments.append(time.perf_counter())
        phases = [end - begin for begin, end in pairwise(moments)]
        rows.append([*phases, sum(phases)])
    return [median(column) for column in zip(*rows, strict=True)]


def show(case: str) -> list[list[float]]:
    print(f"{case:27} loading  forward backward   update   together")
    ranks = lesson.run(work, WORLD_SIZE, case)
    for rank, seconds in enumerate(ranks):
        print(f"  rank {rank}, ms" + " " * 12 + "".join(f"{x * 1e3:9.0f}" for x in seconds))
    return ranks


ranks = show("rank 1 is slow")
# The fast ranks wait in the backward. The rank with the shortest backward is the slow one.
assert ranks[0][2] > DELAY / 2
assert ranks[2][2] > DELAY / 2
assert ranks[1][2] < DELAY / 2 < ranks[1][0]

ranks = show("each rank is slow in turn")
# Each rank is slow in a third of the steps only, and yet each step of each rank is slow.
assert all(seconds[0] < DELAY / 2 < seconds[-1] for seconds in ranks)

lesson.claim("in each step all wait for the slowest rank, and the fast ones do so in the backward.")
