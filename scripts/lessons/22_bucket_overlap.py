"""Does DDP send all gradients at the end of the backward, or some of them before?

The model has three layers with 1.37 MiB of gradients each, and DDP's buckets hold 1 MiB. In the
second step

a) the gradients of layer 3 are sent before those of layer 1 are computed.
b) all are sent when those of layer 1 are computed.
c) those of layer 1 are sent first.

These ranks are CPUs and use gloo. On GPUs a bucket is sent at the same moment. Whether the GPU
computes meanwhile depends on NCCL's class ("nccl" or "nccl-legacy" in torch 2.15), and
scripts/gpu_check.sh measures it.
"""

from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="a")
WIDTH = 600
BYTES = 4 * WIDTH * WIDTH  # of a layer's gradients
CASES: dict[str, dict[str, Any]] = {
    "buckets of 1 MiB": {"bucket_cap_mb": 1.0},
    "one bucket for all": {"bucket_cap_mb": 100.0},
    "the default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
}


def work(rank: int, world_size: int, options: dict[str, Any]) -> list[list[tuple[str, int]]]:
    """Return what each of two backwards did, in order: an event, and the bytes that were sent."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    model = DistributedDataParallel(nn.Sequential(*layers), **options)
    events: list[tuple[str, int]] = []

    def send(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Do what DDP does without a hook: start an all-reduce, and return before it ends."""
        events.append((f"send {bucket.index()}", bucket.buffer().nbytes))
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    def note(number: int) -> Any:
        return lambda gradient: events.append((f"layer {number}", 0))

    for number, layer in enumerate(layers, start=1):
        layer.weight.register_hook(note(number))
    model.register_comm_hook(None, send)
    found = []
    for _ in range(2):
        events.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        found.append(events[:])
    return found


found = {}
for case, options in CASES.items():
    steps = lesson.run(work, 2, options)[0]
    print(f"{case}:")
    for step, events in enumerate(steps, start=1):
        words = [f"{event} ({size:,} bytes)" if size else event for event, size in events]
        print(f"  step {step}: {', '.join(words)}")
    found[case] = [
        ([event for event, _ in events], [size for _, size in events if size]) for events in steps
    ]
# The gradients appear from the last layer to the first. One bucket is sent when nothing is left.
assert found["one bucket for all"][1][0] == ["layer 3", "layer 2", "layer 1", "send 0"]
# The first backward sends everything at its end. DDP makes its buckets after it, in that order.
first, second = (events for events, _ in found["buckets of 1 MiB"])
assert first[-1] == "send 0"
assert second.index("send 0") < second.index("layer 1")
# By default the first bucket is full at 1 MiB, and the next one holds far more.
assert found["the default"][1][1] == [BYTES, 2 * BYTES]
# find_unused_parameters keeps the buckets of the beginning, in which the small one is the last.
assert [sizes for _, sizes in found["find_unused_parameters"]] == [[2 * BYTES, BYTES]] * 2

lesson.claim("a full bucket is sent while the backward computes the gradients of earlier layers.")
