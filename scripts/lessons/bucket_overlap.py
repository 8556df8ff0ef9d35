"""When DDP sends gradients: bucket by bucket, while the backward still computes the others.

python scripts/lessons/bucket_overlap.py
"""

from typing import Any

import torch
import torch.distributed as dist
from _lesson import run_ranks, start
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH = 3, 600  # a layer's weights are 1.4 MB


def work(rank: int, world_size: int, bucket_cap_mb: float) -> tuple[list[str], list[int]]:
    """Return what a backward did, in order, and the bytes of each bucket."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb)  # type: ignore[arg-type]
    events: list[str] = []
    sizes: list[int] = []

    def note(event: str) -> Any:
        def hook(gradient: Tensor) -> None:
            events.append(event)

        return hook

    def send(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Do what DDP does by itself: start an all-reduce, and return without its result."""
        events.append(f"send {bucket.index()}")
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    for number, layer in enumerate(layers, start=1):
        layer.weight.register_hook(note(f"layer {number}"))
    model.register_comm_hook(None, send)
    for _ in range(2):  # the first step's order of gradients decides on the buckets of the others
        events.clear()
        sizes.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
    return events, sizes


def main() -> dict[str, bool]:
    found = {}
    for title, bucket_cap_mb in (("buckets of 1 MiB", 1.0), ("one bucket for all", 100.0)):
        events, sizes = run_ranks(work, 2, bucket_cap_mb)[0].value
        found[title] = events
        print(f"{title}: {' '.join(f'{size:,}' for size in sizes)} bytes")
        print(f"  {', '.join(events)}")
    small, large = found.values()
    return {
        "the gradients come from the last layer to the first": [
            event for event in large if event.startswith("layer")
        ]
        == [f"layer {number}" for number in range(LAYERS, 0, -1)],
        "a bucket is sent as soon as it is full, before the gradients of the earlier layers "
        "are there": small.index("send 0") < small.index("layer 1"),
        "one bucket for all is sent when the backward has nothing left to compute": large[-1]
        == "send 0",
    }


if __name__ == "__main__":
    start(main, ddp=True)
