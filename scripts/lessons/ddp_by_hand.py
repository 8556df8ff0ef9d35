"""DistributedDataParallel in four steps, by hand, each timed beside the real one.

Each step averages the gradients of all ranks. The first step does so after the backward, gradient
by gradient. The second one sends all gradients in one buffer, also after the backward. The third
and the fourth step send while the backward computes other gradients. The third sends each gradient
as soon as it exists, and the fourth sends buckets, as DDP does.

It prints the time of each step, and when the buckets of the fourth one are sent.
"""

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from _lesson import start, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from utils.device import usable_cores

WORLD_SIZE, LAYERS, WIDTH, BATCH = 2, 8, 384, 128  # 16 gradients, 4.7 MB
WARM_UP, ROUNDS = 2, 15
Parameters = list[Any]  # nn.Parameter, whose grad is None until the backward has computed it
ALONE, DDP = "0 no averaging", "DistributedDataParallel"
BY_HAND = (
    "1 each gradient, after the backward",
    "2 one buffer, after the backward",
    "3 each gradient, from a hook",
    "4 buckets of four, from hooks",
)
STEPS = (ALONE, *BY_HAND, DDP)
sends: list[tuple[float, int]] = []  # when each began, and how many gradients were missing then


def gradients(parameters: Parameters) -> list[Tensor]:
    return [parameter.grad for parameter in parameters]


def missing(parameters: Parameters) -> int:
    return sum(parameter.grad is None for parameter in parameters)


def each_gradient(parameters: Parameters) -> None:
    for gradient in gradients(parameters):
        dist.all_reduce(gradient)  # returns once the sum is in the gradient's place
        gradient /= WORLD_SIZE


def one_buffer(parameters: Parameters) -> None:
    flat = parameters_to_vector(gradients(parameters))
    dist.all_reduce(flat)  # 16 small sends would pay the latency of a send 16 times
    vector_to_parameters(flat / WORLD_SIZE, gradients(parameters))


def during_backward(parameters: Parameters, size: int) -> Callable[[], None]:
    """Send from hooks; return what to call after backward() and before optimizer.step()."""
    # Gradients come from the last layer to the first. DDP counts bytes: its first bucket closes at
    # 1 MiB, the others at 25 MiB.
    buckets = [parameters[::-1][i : i + size] for i in range(0, len(parameters), size)]
    pending: list[tuple[Tensor, Any]] = []

    def send_full_buckets(_: Any) -> None:
        # All ranks send in this order. Otherwise different buckets would be added to each other.
        while len(pending) < len(buckets) and not missing(buckets[len(pending)]):
            sends.append((time.perf_counter(), missing(parameters)))
            flat = parameters_to_vector(gradients(buckets[len(pending)]))
            pending.append((flat, dist.all_reduce(flat, async_op=True)))  # returns at once

    def finish() -> None:
        for (flat, work), bucket in zip(pending, buckets, strict=True):
            work.wait()
            vector_to_parameters(flat / WORLD_SIZE, gradients(bucket))
        pending.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(send_full_buckets)
    return finish


def work(rank: int, world_size: int) -> dict[str, Any]:
    """Return for each step: seconds, checksum of its gradients, distance to DDP's, its sends."""
    torch.manual_seed(rank)  # other weights and other samples on each rank
    raw_model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    inputs = torch.randn(BATCH, WIDTH)
    for parameter in raw_model.parameters():
        dist.broadcast(parameter.data, src=0)  # DDP's constructor also does this
    models: dict[str, nn.Module] = {name: copy.deepcopy(raw_model) for name in STEPS}
    first, second, third, fourth = (list(models[name].parameters()) for name in BY_HAND)
    finish: dict[str, Callable[[], None]] = {
        BY_HAND[0]: partial(each_gradient, first),
        BY_HAND[1]: partial(one_buffer, second),
        BY_HAND[2]: during_backward(third, 1),
        BY_HAND[3]: during_backward(fourth, 4),
    }
    models[DDP] = DistributedDataParallel(models[DDP])
    seconds: dict[str, list[float]] = {name: [] for name in STEPS}
    events = {}
    for _ in range(WARM_UP + ROUNDS):
        for name, model in models.items():  # in turns: other programs disturb all of them alike
            model.zero_grad()
            sends.clear()
            dist.barrier()
            begin = time.perf_counter()
            model(inputs).square().mean().backward()
            ended = time.perf_counter()
            if name in finish:
                finish[name]()
            seconds[name].append(time.perf_counter() - begin)
            events[name] = [(t - begin, count) for t, count in [*sends, (ended, 0)]]
    found = {}
    right = parameters_to_vector(gradients(list(models[DDP].parameters())))
    for name, model in models.items():
        flat = parameters_to_vector(gradients(list(model.parameters())))
        off = float((flat - right).norm() / right.norm())
        checksum = crc32(flat.numpy().tobytes())
        found[name] = median(seconds[name][WARM_UP:]), checksum, off, events[name]
    return found


def main() -> dict[str, bool]:
    ranks = values(work, WORLD_SIZE)
    print(f"{WORLD_SIZE} ranks, {usable_cores()} cores; forward, backward, averaging (median):")
    for name in STEPS:
        print(f"  {name:37}{ranks[0][name][0] * 1e3:7.1f} ms")
    took = [ranks[0][name][0] for name in BY_HAND]
    if took != sorted(took, reverse=True):
        print("A later step is not always faster in this run: threads that send need cores too.")
    timeline = ", ".join(f"{t * 1e3:.1f} ({n})" for t, n in ranks[0][BY_HAND[3]][3])
    print(f"step 4, its sends and the backward's end, in ms (gradients missing): {timeline}")
    checksums = {name: {rank[name][1] for rank in ranks} for name in STEPS}
    hooks, buckets = ([n for _, n in ranks[0][name][3][:-1]] for name in BY_HAND[2:])
    return {
        "without averaging each rank has its own gradients": len(checksums[ALONE]) == WORLD_SIZE,
        "after each step all ranks have the same gradients, bit by bit, as with DDP": all(
            len(checksums[name]) == 1 and rank[name][2] < 1e-5 for name in BY_HAND for rank in ranks
        ),
        "steps 3 and 4 begin while gradients are missing": hooks[0] > 0 < buckets[0],
        "step 4 sends the same numbers in fewer calls": len(hooks) > len(buckets) > 1,
    }


if __name__ == "__main__":
    start(main)
