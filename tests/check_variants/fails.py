"""Rank 0 asks the wrapper for a method of the model, and rank 1 for what only rank 0 has set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
torch.manual_seed(0)  # finds: equal random numbers
model = DistributedDataParallel(nn.Linear(2, 2))
if dist.get_rank() == 0:
    best = 0.0
    model.predict()  # finds: asks the wrapper
if best < model(torch.ones(2)).sum():  # finds: a name of one rank
    torch.optim.SGD(model.parameters(), 0.1).step()
