"""How does DistributedDataParallel average gradients, and why is it fast?

Four versions by hand, each timed beside the real one. The first averages gradient by gradient,
after the backward. The second sends all gradients in one buffer, also after the backward. The third
sends each gradient from a hook as soon as it exists, while the backward computes the others. The
fourth sends buckets from hooks, as DDP does.
"""

import copy
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

lesson.start(__doc__)
WORLD_SIZE, LAYERS, WIDTH, BATCH = 2, 8, 384, 128  # 16 gradients, 4.7 MB
WARM_UP, ROUNDS = 2, 10
WAYS = (
    "each gradient, after the backward",
    "one buffer, after the backward",
    "each gradient, from a hook",
    "buckets of four, from hooks",
    "DistributedDataParallel",
    "no averaging",
)
Parameters = list[Any]  # nn.Parameter, whose grad is None until the backward has computed it


def gradients(parameters: Parameters) -> list[Tensor]:
    return [parameter.grad for parameter in parameters]


def each_gradient(parameters: Parameters) -> None:
    for gradient in gradients(parameters):
        dist.all_reduce(gradient)  # returns once the sum is in the gradient's place
        gradient /= WORLD_SIZE


def one_buffer(parameters: Parameters) -> None:
    flat = parameters_to_vector(gradients(parameters))
    dist.all_reduce(flat)  # 16 small sends would pay for the start of a send 16 times
    vector_to_parameters(flat / WORLD_SIZE, gradients(parameters))


def from_hooks(parameters: Parameters, size: int, missing: list[int]) -> Callable[[], None]:
    """Send buckets from hooks; return what to call after backward() and before step().

    Args:
        missing: gets the number of gradients that do not exist yet, at each send.
    """
    # Gradients appear from the last layer to the first. DDP's buckets hold bytes: the first one
    # 1 MiB, the others 25 MiB.
    buckets = [parameters[::-1][i : i + size] for i in range(0, len(parameters), size)]
    pending: list[tuple[Tensor, Any]] = []

    def send_full_buckets(_: Any) -> None:
        # All ranks send in this order. Otherwise different buckets would be added to each other.
        while len(pending) < len(buckets):
            bucket = buckets[len(pending)]
            if any(parameter.grad is None for parameter in bucket):
                return
            missing.append(sum(parameter.grad is None for parameter in parameters))
            flat = parameters_to_vector(gradients(bucket))
            pending.append((flat, dist.all_reduce(flat, async_op=True)))  # returns at once

    def finish() -> None:
        for (flat, work), bucket in zip(pending, buckets, strict=True):
            work.wait()
            vector_to_parameters(flat / WORLD_SIZE, gradients(bucket))
        pending.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(send_full_buckets)
    return finish


def work(rank: int, world_size: int) -> tuple[list[float], list[Tensor], list[list[int]]]:
    """Return each way's seconds and gradients, and what was missing when the hooks sent."""
    torch.manual_seed(rank)  # other weights and other samples on each rank
    raw_model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    inputs = torch.randn(BATCH, WIDTH)
    for parameter in raw_model.parameters():
        dist.broadcast(parameter.data, src=0)  # DDP's constructor also does this
    models: list[nn.Module] = [copy.deepcopy(raw_model) for _ in WAYS]
    all_parameters = [list(model.parameters()) for model in models]
    missing: list[list[int]] = [[], []]
    averages: list[Callable[[], None]] = [
        lambda: each_gradient(all_parameters[0]),
        lambda: one_buffer(all_parameters[1]),
        from_hooks(all_parameters[2], 1, missing[0]),
        from_hooks(all_parameters[3], 4, missing[1]),
        lambda: None,
        lambda: None,
    ]
    models[4] = DistributedDataParallel(models[4])
    seconds: list[list[float]] = [[] for _ in WAYS]
    for _ in range(WARM_UP + ROUNDS):
        missing[0].clear()
        missing[1].clear()
        for i, model in enumerate(models):  # in turns: other programs disturb all of them alike
            model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            model(inputs).square().mean().backward()
            averages[i]()
            seconds[i].append(time.perf_counter() - begin)
    found = [parameters_to_vector(gradients(parameters)) for parameters in all_parameters]
    return [median(times[WARM_UP:]) for times in seconds], found, missing


ranks = lesson.run(work, WORLD_SIZE)
print(f"{WORLD_SIZE} ranks on {os.cpu_count()} cores: forward, backward and averaging (median)")
for way, seconds in zip(WAYS, ranks[0][0], strict=True):
    print(f"  {way:36}{seconds * 1e3:7.1f} ms")
first, second = ranks[0][1], ranks[1][1]
# Without averaging each rank has gradients of its own.
assert not torch.equal(first[5], second[5])
# With each way the ranks have the same gradients, to the bit, and they are DDP's.
for i in range(5):
    assert torch.equal(first[i], second[i])
    assert torch.allclose(first[i], first[4], rtol=1e-4, atol=1e-8)
# The hooks send while gradients are missing. Buckets send the same numbers in fewer calls.
each, buckets = ranks[0][2]
print(f"gradients that are missing when each bucket is sent: {buckets}")
assert each == list(range(15, -1, -1))
assert buckets == [12, 8, 4, 0]
print("Which way is the fastest depends on the cores: threads that send need cores, too.")

lesson.claim("DDP averages gradients in the backward, a bucket at a time, and not in the step.")
