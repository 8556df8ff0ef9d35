"""One rank has fewer batches than the others, or stops early: what do the others do?

Rank 0 has three batches and rank 1 has five. Rank 0 ends, or goes on to add up its metrics.

a) Rank 1 makes its last two steps alone.
b) Rank 1 waits in its fourth backward, or fails there.
c) DDP ends the epoch of rank 1 after three steps.

Each backward of DDP waits for all ranks. So all must make the same number of steps. Early stopping
by each rank's own loss breaks this. Asked in Lightning-AI/pytorch-lightning#379 and
pytorch/pytorch#134920.
"""

from contextlib import nullcontext

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="b")
BATCHES = (3, 5)  # of rank 0 and of rank 1
# The validation loss of each rank's share, epoch by epoch. Patience is two epochs.
LOSSES = ((1.0, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9), (1.2, 1.1, 1.0, 0.9, 0.8, 0.9, 0.9))


def train(rank: int, world_size: int, case: str) -> tuple[int, list[float]]:
    """Return the number of steps of this rank, and its weights."""
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))  # a gradient of 3 numbers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    number = min(BATCHES) if case == "equal numbers" else BATCHES[rank]
    steps = 0
    with Join([model]) if "Join" in case else nullcontext():
        for _ in range(number):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            steps += 1
            if case == "Join, and metrics in every step":
                dist.all_reduce(torch.ones(3))
    if case == "metrics after the epoch":
        dist.all_reduce(torch.ones(8))  # rank 0 is here while rank 1 still computes gradients
    return steps, model.module.weight.flatten().tolist()


def stop_early(rank: int, world_size: int, case: str) -> int:
    """Return the epoch after which this rank stops."""
    best = float("inf")
    waited = 0
    for epoch in range(len(LOSSES[rank])):
        loss = LOSSES[rank][epoch]
        if case == "the mean loss":
            mean = torch.tensor(loss / world_size)
            dist.all_reduce(mean)
            loss = mean.item()
        waited = 0 if loss < best else waited + 1
        best = min(loss, best)
        stop = torch.tensor(int(waited == 2))
        if case == "one flag for all":
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            break
    return epoch + 1


def show(work, case: str, timeout: float = 30.0) -> list:
    ranks = lesson.run(work, 2, case, timeout=timeout, may_fail=True)
    print(f"{case}:")
    for rank, found in enumerate(ranks):
        print(f"  rank {rank}: {str(found).split('] ')[-1][:100]}")
    return ranks


# Rank 0's metrics meet a gradient of rank 1, which has another size. Both fail.
assert all(isinstance(text, str) for text in show(train, "metrics after the epoch"))
# In Join the rank that is early answers the other one's collectives, and both end alike.
joined = show(train, "Join")
assert [steps for steps, _ in joined] == [3, 5]
assert joined[0][1] == joined[1][1]
# Join answers the collectives of DDP only.
assert all(isinstance(text, str) for text in show(train, "Join, and metrics in every step", 2.0))
assert [steps for steps, _ in show(train, "equal numbers")] == [3, 3]

# By its own loss rank 0 stops after epoch 4. A backward of rank 1 would then wait for it.
assert show(stop_early, "its own loss") == [4, 7]
# Cures: the maximum of the flags, or a loss that is the same on all ranks.
assert show(stop_early, "one flag for all") == [4, 4]
assert show(stop_early, "the mean loss") == [7, 7]

lesson.claim("the others wait until the timeout, or fail; all ranks need equally many steps.")
