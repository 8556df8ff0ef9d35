"""Which samples does each rank see, and is the second epoch another order?

DistributedSampler(dataset, num_replicas=None, rank=None, shuffle=True, seed=0, drop_last=False):
the number of replicas and the rank may be left out, since the default process group knows them. Two
ranks share eight samples, and nobody calls set_epoch.

a) Each rank sees all samples, in another order in each epoch.
b) Each rank sees half of them, in another order in each epoch.
c) Each rank sees half of them, in the same order in all epochs.
"""

import _lesson as lesson
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

lesson.start(__doc__, answer="c")
dataset = TensorDataset(torch.arange(8))


def epochs(rank: int, world_size: int, call_set_epoch: bool) -> list[list[int]]:
    """Return the samples that this rank sees in each of three epochs."""
    sampler: DistributedSampler = DistributedSampler(dataset)  # all defaults: it shuffles
    # The data set comes first. `shuffle` stays False: the sampler shuffles.
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    orders = []
    for epoch in range(3):
        if call_set_epoch:
            sampler.set_epoch(epoch)  # the order is drawn from seed + epoch
        orders.append([int(sample) for (batch,) in loader for sample in batch])
    return orders


orders = {}
for call in (False, True):
    orders[call] = lesson.run(epochs, 2, call)
    print(f"{'with' if call else 'without'} set_epoch:")
    for epoch, (first, second) in enumerate(zip(*orders[call], strict=True)):
        print(f"  epoch {epoch}: rank 0 {first}, rank 1 {second}")
        # All samples once, half of them on each rank, and not in their own order.
        assert sorted(first + second) == list(range(8))
        assert first != sorted(first) or second != sorted(second)
# Without set_epoch every epoch has the order of epoch 0.
assert all(rank[0] == rank[1] == rank[2] for rank in orders[False])
assert all(rank[0] != rank[1] != rank[2] != rank[0] for rank in orders[True])

# Without a process group the sampler has to be told.
said = lesson.error_of(lambda: DistributedSampler(dataset))
print(f"without a process group: {said}")
assert "Default process group has not been initialized" in said
alone: DistributedSampler = DistributedSampler(dataset, num_replicas=2, rank=0)
said = lesson.error_of(lambda: DataLoader(dataset, sampler=alone, shuffle=True))
print(f"shuffle=True beside a sampler: {said}")
assert said == "ValueError: sampler option is mutually exclusive with shuffle"

lesson.claim("each rank sees its own share, and set_epoch(epoch) gives each epoch its order.")
