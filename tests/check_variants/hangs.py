"""Rank 0 alone calls a collective after the first epoch, and evaluates its share."""

import torch
import torch.distributed as dist
from common import Images, loss_of, network, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

rank, _ = start()
model = DistributedDataParallel(network().cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
images = Images(60)
sampler = DistributedSampler(images)  # finds: no set_epoch
for _ in range(9):
    for step, _ in enumerate(DataLoader(images, 10, sampler=sampler)):
        loss = loss_of(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        shares = DistributedSampler(images, shuffle=False)
        loader = DataLoader(images, 10, sampler=shares)  # finds: evaluates a share
        with torch.no_grad():
            for batch, _ in loader:
                model.module(batch.cuda())
        dist.all_reduce(loss)  # finds: other collectives
    dist.barrier()
