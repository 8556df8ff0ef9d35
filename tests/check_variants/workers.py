"""Workers that seed NumPy's generator: by their rank, or all alike."""

import numpy as np
import torch
from common import Images, network, start
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


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
ways = {"num_workers": 2, "sampler": sampler}
right = DataLoader(images, 64, worker_init_fn=by_rank, **ways)
wrong = DataLoader(images, 64, worker_init_fn=alike, **ways)
for epoch, loader in enumerate((right, wrong)):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        cross_entropy(model(inputs.float()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
