"""The ranks read streams of unequal lengths."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from common import Images, network, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

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
