"""When DDP sends gradients: bucket by bucket, while the backward computes the others.

These ranks are CPUs, and use gloo. On GPUs a bucket leaves at the same moment. What happens after
that depends on NCCL's class. With the one that torch 2.15 takes by default the GPU waits for each
bucket directly after it was sent, and computes nothing while it travels. TORCH_DIST_USE_NCCL2=0
chooses the class before it, where the GPU waits for all buckets at the end of the backward.
train_ddp.py sets this variable. With two GPUs scripts/tools/scaling.py measures which one you have.

It prints in which order gradients come and buckets leave, and the bytes of each bucket.
"""

from typing import Any

import torch
import torch.distributed as dist
from _lesson import start, values
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH = 3, 600
LAYER_BYTES = 4 * WIDTH * WIDTH  # 1.37 MiB


def work(rank: int, world_size: int, options: dict[str, Any]) -> list[tuple[list[str], list[int]]]:
    """Return what each of two backwards did, in order, and the bytes of each bucket."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers), **options)
    events: list[str] = []
    sizes: list[int] = []

    def note(event: str) -> Any:
        def hook(gradient: Tensor) -> None:
            events.append(event)

        return hook

    def send(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Do what DDP does without a hook: start an all-reduce, and return before it ends."""
        events.append(f"send {bucket.index()}")
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    for number, layer in enumerate(layers, start=1):
        layer.weight.register_hook(note(f"layer {number}"))
    model.register_comm_hook(None, send)
    found = []
    for _ in range(2):  # DDP makes its buckets after the first, in the order of the gradients
        events.clear()
        sizes.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        found.append((events[:], sizes[:]))
    return found


def main() -> dict[str, bool]:
    cases: dict[str, dict[str, Any]] = {
        "buckets of 1 MiB": {"bucket_cap_mb": 1.0},
        "one bucket for all": {"bucket_cap_mb": 100.0},
        "the default": {},
        "find_unused_parameters": {"find_unused_parameters": True},
    }
    found = {}
    for title, options in cases.items():
        found[title] = values(work, 2, options)[0]
        print(f"{title}:")
        for number, (events, sizes) in enumerate(found[title], start=1):
            print(f"  step {number}: {', '.join(events)}")
            print(f"          {' '.join(f'{size:,}' for size in sizes)} bytes")
    (first, _), (small, _) = found["buckets of 1 MiB"]
    large = found["one bucket for all"][1][0]
    searched = [sizes for _, sizes in found["find_unused_parameters"]]
    return {
        "the gradients come from the last layer to the first; one bucket for all is sent when the "
        "backward has nothing left to compute": large
        == ["layer 3", "layer 2", "layer 1", "send 0"],
        "the first backward sends one bucket of all gradients, at its end": first[-1] == "send 0",
        "later a bucket is sent as soon as it is full, before the gradients of the earlier layers "
        "exist": small.index("send 0") < small.index("layer 1"),
        "by default the first bucket closes at 1 MiB, and the next takes far more": (
            found["the default"][1][1] == [LAYER_BYTES, 2 * LAYER_BYTES]
        ),
        "with find_unused_parameters the buckets stay as they were made at first, the small one "
        "last": searched == [[2 * LAYER_BYTES, LAYER_BYTES]] * 2,
    }


if __name__ == "__main__":
    start(main)
