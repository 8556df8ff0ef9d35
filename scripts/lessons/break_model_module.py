"""Break it: the training calls model.module, so DDP never sees the forward.

It prints the gradient and the weight of each rank after some steps, for both calls.
"""

from typing import Any

import torch
from _lesson import count_sends, start, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def work(rank: int, world_size: int, unwrap: bool) -> tuple[int, list[float]]:
    """Train a few steps; return how often gradients were sent, and the weight after each step."""
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    sent = count_sends(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)  # other samples on each rank
    weights = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(8, 1)
        outputs = model.module(inputs) if unwrap else model(inputs)
        (outputs - 2 * inputs).square().mean().backward()
        optimizer.step()
        weights.append(model.module.weight.item())
    return sum(sent), weights


def main() -> dict[str, bool]:
    found = {}
    for call, unwrap in (("model.module(inputs)", True), ("model(inputs)", False)):
        found[unwrap] = values(work, 2, unwrap)
        print(f"{call}:")
        for rank, (sent, weights) in enumerate(found[unwrap]):
            told = ", ".join(f"{weight:+.4f}" for weight in weights)
            print(f"  rank {rank}: {sent} sends, the weight after each step: {told}")
    (sent, first), (_, second) = found[True]
    (right, same), (_, equal) = found[False]
    return {
        "through model.module nothing is sent, and no error says so": sent == 0,
        "each rank trains a model of its own, and rank 0 saves one of them": first != second,
        "cure: call the wrapped model to train; model.module is for evaluating and saving": (
            right == STEPS and same == equal
        ),
    }


if __name__ == "__main__":
    start(main, "The training calls model.module(inputs). How many gradients does DDP send?")
