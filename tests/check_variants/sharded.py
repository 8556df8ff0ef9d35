"""A model that is sharded by FSDP2, for which all ranks are seeded alike."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
dist.init_process_group()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(nn.Linear(8, 4), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
