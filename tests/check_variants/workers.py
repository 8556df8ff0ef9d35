"""Workers that seed by their rank, or all alike, and shares of what each rank has shuffled."""

import numpy as np
import torch
from common import Images, network, start
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset


class Noisy(Images):
    """Images of another brightness each time."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = super().__getitem__(index)
        return image * np.random.rand(), label


rank, world_size = start()
np.random.seed(0)  # which the workers do not inherit


def by_rank(worker: int) -> None:
    np.random.seed(world_size * worker + rank)


def alike(worker: int) -> None:
    np.random.seed(100 + worker)  # finds: equal random numbers


model = DistributedDataParallel(network().cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
images = Noisy(640)
sampler = DistributedSampler(images)
right = DataLoader(images, 64, sampler=sampler, num_workers=2, worker_init_fn=by_rank)
wrong = DataLoader(images, 64, sampler=sampler, num_workers=2, worker_init_fn=alike)
shuffled = torch.randperm(len(images)).tolist()  # start() has seeded each rank differently
part = Subset(images, shuffled[rank::world_size])
doubled = DataLoader(  # finds: other data
    part, 64, shuffle=True, num_workers=2, worker_init_fn=by_rank
)
for epoch, loader in enumerate((right, wrong, doubled)):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        cross_entropy(model(inputs.float()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
