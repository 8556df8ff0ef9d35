"""What does nn.DataParallel do in each step, and what does that cost?

A batch of 512 goes through a network on two devices. In its forward the network also counts its
calls and its samples.

a) It copies the model once, and in each step it averages the copies' gradients.
b) In each step it copies the model, and averages the copies' gradients.
c) In each step it copies the model, and adds up the copies' gradients.

Without GPUs nn.DataParallel only calls the model. So its steps are done by hand here, on CPU cores:
scatter the batch, replicate the model, run each replica in a thread of its own, and gather the
outputs. The backward goes the same way back. On GPUs each replica has a device of its own, and DP
moves data and weights between them. Here each move is a copy within one memory.
"""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any

import _lesson as lesson
import torch
import torch.nn.functional as F
from torch import Tensor, nn

lesson.start(__doc__, answer="c")
ROUNDS = 10
STEPS = ("scatter", "replicate", "parallel apply", "gather", "backward")


class Network(nn.Module):
    """A network that also counts its calls and its samples, in three usual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        self.calls = 0
        self.in_place: Tensor
        self.assigned: Tensor
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        self.in_place += len(images)
        self.assigned = self.assigned + len(images)
        return self.layers(images)


def replicate(module: nn.Module, is_first: bool) -> nn.Module:
    """Copy a module so that gradients flow through the copy into the original."""
    replica: Any = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        replica._modules[name] = replicate(child, is_first)
    for name, parameter in module.named_parameters(recurse=False):
        setattr(replica, name, parameter.clone())  # no parameter, but the result of a copy
    for name, buffer in module.named_buffers(recurse=False):
        # As on GPUs, the first replica shares its buffers with the original.
        replica._buffers[name] = buffer if is_first else buffer.clone()
    return replica


def data_parallel(model: nn.Module, images: Tensor, n: int) -> tuple[Tensor, Any, list[float]]:
    """Do a forward of DP on ``n`` devices; return the logits, the outputs, and the moments."""
    moments = [time.perf_counter()]
    shares = images.chunk(n)
    moments.append(time.perf_counter())
    replicas = [replicate(model, is_first=i == 0) for i in range(len(shares))]
    moments.append(time.perf_counter())
    with ThreadPoolExecutor(n) as pool:
        outputs = list(pool.map(lambda pair: pair[0](pair[1]), zip(replicas, shares, strict=True)))
    moments.append(time.perf_counter())
    logits = torch.cat(outputs)
    moments.append(time.perf_counter())
    return logits, outputs, moments


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
images = torch.randn(512, 784)
labels = torch.randint(10, (512,))
model = Network()
single = copy.deepcopy(model)
counter = copy.deepcopy(model)

rounds = []
for _ in range(ROUNDS):
    model.zero_grad()
    logits, outputs, moments = data_parallel(model, images, 2)
    logits.retain_grad()
    outputs[1].retain_grad()
    F.cross_entropy(logits, labels).backward()
    moments.append(time.perf_counter())
    rounds.append([end - begin for begin, end in pairwise(moments)])
print(f"One step on 2 replicas, batch 512, median of {ROUNDS}:")
for step, seconds in zip(STEPS, zip(*rounds, strict=True), strict=True):
    print(f"  {step:16}{median(seconds) * 1e3:8.2f} ms")

# One loss, of all outputs: the gradients are those of one device.
loss = F.cross_entropy(single(images), labels)
loss.backward()
assert torch.allclose(gradient(model), gradient(single), atol=1e-12)
# They are the sum of the shares' gradients, each divided by the size of the whole batch.
single.zero_grad()
for images_share, labels_share in zip(images.chunk(2), labels.chunk(2), strict=True):
    (F.cross_entropy(single(images_share), labels_share, reduction="sum") / 512).backward()
assert torch.allclose(gradient(model), gradient(single), atol=1e-12)
# The backward scatters the gradient of the outputs, not the loss: each replica gets its rows.
assert logits.grad is not None
assert torch.equal(outputs[1].grad, logits.grad[256:])

# A small batch: some devices have fewer samples, or none.
sizes = [[len(share) for share in torch.zeros(batch).chunk(4)] for batch in (10, 3)]
print(f"Batch 10 on 4 devices is split {sizes[0]}, batch 3 {sizes[1]}")
assert sizes == [[3, 3, 3, 1], [1, 1, 1]]

# A loss that the forward computes is gathered as one number for each replica. Their mean gives the
# only sample of the last replica as much weight as three others.
outputs = data_parallel(single, images[:10], 4)[1]
losses = [F.cross_entropy(*pair) for pair in zip(outputs, labels[:10].chunk(4), strict=True)]
right = F.cross_entropy(torch.cat(outputs), labels[:10])
print(f"The loss of these 10 is {right:.4f}, and the mean of the replicas' losses is", end=" ")
print(f"{sum(losses) / 4:.4f}")
assert abs(sum(losses) / 4 - right) > 1e-3

# What a forward sets belongs to a replica, which is thrown away after the step.
data_parallel(counter, images, 2)
print(f"After a forward of 512: self.calls is {counter.calls}, a buffer changed in place", end=" ")
print(f"{counter.in_place:.0f}, a buffer that was assigned {counter.assigned:.0f}")
assert (counter.calls, counter.in_place, counter.assigned) == (0, 256, 0)

lesson.claim("DP copies the model in each step, adds up gradients, and loses what a forward sets.")
