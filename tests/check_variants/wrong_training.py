"""Mistakes between a forward and a step. Each has a model and an optimizer of its own."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import batch, loss_of, network, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate)


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model.cuda(), device_ids=[torch.cuda.current_device()])


def shared(loss: torch.Tensor) -> torch.Tensor:
    return loss / world_size  # finds: loss divided by the ranks


rank, world_size = start()
torch.manual_seed(0)

alone = network().cuda()
optimizer = sgd(alone)
loss_of(alone, rank).backward()
optimizer.step()  # finds: nothing is averaged

model = wrapped(network())
optimizer = sgd(model)
images, labels = batch(rank)
F.cross_entropy(model.module(images), labels).backward()  # finds: past the wrapper
optimizer.step()

model = wrapped(network())
optimizer = sgd(model)
average = nn.ModuleDict({"of": model.module}) if rank == 0 else None  # gives other names
with model.no_sync():
    loss = F.cross_entropy(model(images), labels)  # finds: no_sync at the step
loss.backward()
optimizer.step()

model = wrapped(network())
optimizer = sgd(model)
first = F.cross_entropy(model(images), labels)  # finds: two forwards or backwards
second = F.cross_entropy(model(images), labels)
first.backward()
second.backward()
optimizer.step()

model, head = wrapped(network()), nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.1)
F.cross_entropy(head(model(images)), labels).backward()
optimizer.step()  # finds: outside the wrapper

raw_model = network()
next(raw_model.parameters()).requires_grad_(False)
model = wrapped(raw_model)
next(raw_model.parameters()).requires_grad_(True)
optimizer = sgd(model)
loss_of(model, rank).backward()
optimizer.step()  # finds: added or unfrozen after wrapping

model = wrapped(network())
optimizer = sgd(model)
if rank == 0:
    torch.save(network().cuda().state_dict(), "last.pt")
    kept = torch.load("last.pt")
    model.module.load_state_dict(kept)  # finds: loaded or changed after wrapping
loss_of(model, rank).backward()
optimizer.step()

model = wrapped(network())
optimizer = sgd(model, 0.1 * (1 + rank))
loss_of(model, rank).backward()
optimizer.step()  # finds: other learning rates or settings

model = wrapped(network())
optimizer = sgd(model)
loss_of(model, rank).backward()
for parameter in model.parameters():
    parameter.grad += rank
optimizer.step()  # finds: gradients differ

model = wrapped(network())
optimizer = sgd(model)
outputs = model(images)
others = [torch.zeros_like(outputs) for _ in range(world_size)]
dist.all_gather(others, outputs)  # finds: gathered without gradients
(outputs @ torch.cat(others).T).square().mean().backward()
optimizer.step()

model = wrapped(network())
optimizer = sgd(model)
loss = 2 * shared(loss_of(model, rank))
shown = loss.clone()
shown /= world_size
with torch.no_grad():
    loss /= world_size  # of this, the backward knows nothing
loss.backward()
optimizer.step()

# The last one: after it the collectives of the ranks no longer match.
model = wrapped(network(nn.BatchNorm1d(16)))
if rank == 0:
    with torch.no_grad():
        model(images)  # finds: evaluates through the wrapper

assert os.environ["WORLD_SIZE"] == "2"
dist.destroy_process_group()
