"""Each rank has statistics, and an order, of its own."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Images, network, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

rank, world_size = start()
model = network(nn.BatchNorm1d(16)).cuda()
model = DistributedDataParallel(model, broadcast_buffers=False)  # finds: buffers differ
optimizer = torch.optim.SGD(model.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

images = Images(640)
order = DistributedSampler(images, seed=rank)


class Loss(nn.Module):
    """Calls the model itself."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(inputs.cuda()), labels.cuda())


def batches() -> DataLoader:
    return DataLoader(images, 64, sampler=order)  # finds: equal shares


def train() -> None:
    for inputs, labels in batches():
        Loss()(inputs, labels).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # finds: averaged twice
        optimizer.step()
        optimizer.zero_grad()


if rank == 0:
    train()
    schedule.step(0.1)  # finds: schedule of one rank
else:
    train()
