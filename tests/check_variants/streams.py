"""The ranks read streams of unequal lengths, and a list again and again."""

from collections.abc import Iterator
from itertools import count

import torch
import torch.nn.functional as F
from common import Images, network, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

rank, world_size = start()


class Shard(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        images = Images(200)
        return map(images.__getitem__, range(rank, 100 * (1 + rank)))


model = DistributedDataParallel(network().cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    for images, labels in DataLoader(Shard(), 8):  # finds: unequal batches
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()

rows = list(map(Images(400).__getitem__, range(400)))
sampler = DistributedSampler(rows)
loader = DataLoader(rows, 8, sampler=sampler)  # finds: no set_epoch


def cycled() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        sampler.set_epoch(1)
        yield from loader


class Endless(Sampler[int]):
    """As those that have no length."""

    def __iter__(self) -> Iterator[int]:
        return count(rank, world_size)


images, labels = next(iter(DataLoader(Images(400), 8, sampler=Endless())))
F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
optimizer.step()

batches = cycled()
for _ in range(7):
    optimizer.zero_grad()
    images, labels = next(batches)
    F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
    optimizer.step()
