"""Rank 0 alone calls a collective."""

import torch
import torch.distributed as dist
from common import loss_of, network, start
from torch.nn.parallel import DistributedDataParallel

rank, world_size = start()
model = DistributedDataParallel(network().cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = loss_of(model, rank)
loss.backward()
optimizer.step()
if rank == 0:
    dist.all_reduce(loss)  # finds: other collectives
dist.barrier()
