"""Rank 0 evaluates through the wrapper in every so many steps, and a bad batch is left out."""

import sys

import torch
import torch.distributed as dist
from common import loss_of, network, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel

every = int(sys.argv[1])
rank, world_size = start()
model = DistributedDataParallel(network(nn.BatchNorm1d(16)).cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(12):
    if step % every == 0 and rank == 0:
        model.eval()
        with torch.no_grad():
            loss_of(model, rank, step)
        model.train()
    loss = loss_of(model, rank, step)
    if not torch.isfinite(loss):  # finds: leaves a batch out
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
