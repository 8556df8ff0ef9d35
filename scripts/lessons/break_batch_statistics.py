"""Break it: each rank evaluates with its own running statistics of batch normalisation.

It prints how far apart the ranks' answers to the same inputs are, before and after rank 0's
statistics are broadcast.
"""

from typing import Any

import torch
import torch.distributed as dist
from _lesson import start, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 20, 8  # of each rank


def work(rank: int, world_size: int) -> dict[str, Tensor]:
    """Train, and answer the same inputs twice; return a weight and the answers."""
    torch.manual_seed(0)
    raw_model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = DistributedDataParallel(raw_model)
    # As in train_ddp.py. With PyTorch's default the next forward of the wrapped model broadcasts
    # rank 0's buffers. An evaluation of the unwrapped model comes before that.
    model.broadcast_buffers = False
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.01)
    same, generator = torch.randn(100, 4), torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(BATCH, 4, generator=generator)).square().mean().backward()
        optimizer.step()
    raw_model.eval()
    with torch.no_grad():
        found = {"weight": raw_model[0].weight.clone(), "before": raw_model(same)}
        for buffer in raw_model.buffers():
            dist.broadcast(buffer, src=0)
        return found | {"after": raw_model(same)}


def main() -> dict[str, bool]:
    first, second = values(work, 2)
    apart = {}
    print("On average the ranks' answers are apart by:")
    for when in ("before", "after"):
        apart[when] = float((first[when] - second[when]).abs().mean() / first[when].abs().mean())
        print(f"  {when:6} the broadcast: {apart[when]:.1%}")
    return {
        "the ranks have equal weights, and answer differently": (
            torch.equal(first["weight"], second["weight"]) and apart["before"] > 0
        ),
        "cure: after a broadcast of rank 0's buffers all ranks answer alike": apart["after"] == 0,
    }


if __name__ == "__main__":
    start(main, "Both ranks have equal weights. Do they answer the same input alike?")
