"""Each host begins to count the ranks anew."""

import os

import torch
import torch.distributed as dist
from common import network
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("nccl", rank=rank, world_size=2)  # finds: equal ranks
model = DistributedDataParallel(network())
torch.save(model.module.state_dict(), "model.pt")
