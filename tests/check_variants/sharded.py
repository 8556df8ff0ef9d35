"""A model that is sharded by FSDP2."""

import torch
from common import loss_of, network, start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, world_size = start()
model = fully_shard(network(), mesh=init_device_mesh("cpu", (world_size,)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss_of(model, rank).backward()
optimizer.step()
