"""Break it: layers that were frozen are trained, but DDP was wrapped while they were frozen.

It prints how far the ranks' weights are apart after three steps, without and with a new wrapper.
"""

from typing import Any

import torch
import torch.distributed as dist
from _lesson import start, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
WAYS = ("unfrozen after wrapping", "wrapped again after unfreezing", "unfrozen before wrapping")


def work(rank: int, world_size: int, way: str) -> dict[str, float]:
    """Train a few steps; return how far this rank's weights are from rank 0's, for each layer."""
    torch.manual_seed(0)
    raw_model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    body = raw_model[0].weight
    body.requires_grad_(way == "unfrozen before wrapping")
    model = DistributedDataParallel(raw_model)
    body.requires_grad_(True)  # the usual second phase of a fine-tuning
    if way == "wrapped again after unfreezing":
        model = DistributedDataParallel(raw_model)
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.1)
    torch.manual_seed(rank)  # other samples on each rank
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    found = {}
    for name, layer in zip(("body", "head"), raw_model, strict=True):
        other = layer.weight.detach().clone()
        dist.broadcast(other, src=0)
        found[name] = float((layer.weight.detach() - other).abs().max())
    return found


def main() -> dict[str, bool]:
    apart = {}
    for way in WAYS:
        apart[way] = values(work, 2, way)[1]
        told = ", ".join(f"{name} {distance:.4f}" for name, distance in apart[way].items())
        print(f"{way:31} rank 1 is away from rank 0 by: {told}")
    late, again, before = (apart[way] for way in WAYS)
    return {
        "a layer that was frozen when DDP wrapped it trains on each rank alone, without an error": (
            late["body"] > 1e-3
        ),
        "cure: wrap the raw model again after unfreezing, or unfreeze before wrapping": (
            max(*again.values(), *before.values()) < 1e-6
        ),
    }


if __name__ == "__main__":
    start(main, "A layer is unfrozen after wrapping. Does DDP average its gradients?")
