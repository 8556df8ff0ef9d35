"""Gradients are averaged by hand, but nobody makes the first weights equal."""

import torch
import torch.distributed as dist
from common import loss_of, network, start

rank, world_size = start()
model = network().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = loss_of(model, rank, step) / world_size
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()  # finds: other weights
