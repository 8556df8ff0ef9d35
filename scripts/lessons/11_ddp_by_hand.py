"""How does DistributedDataParallel average gradients, and why is it fast?

The model has eight layers with 16 gradients, 4.7 MB in all, on two ranks.

a) It sends all gradients after the backward, as one buffer.
b) It sends them in buckets, while the backward computes others.
c) It sends them in optimizer.step().

Four versions by hand stand beside the real one. The first averages gradient by gradient, after the
backward. The second sends all gradients in one buffer, also after the backward. The third sends
each gradient from a hook as soon as it exists, while the backward computes the others. The fourth
sends buckets from hooks, as DDP does.
"""

import copy
from collections.abc import Callable
from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

lesson.start(__doc__, answer="b")
WORLD_SIZE = 2
LAYERS = 8  # 16 gradients
WIDTH = 384  # 4.7 MB
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


def work(rank: int, world_size: int) -> tuple[list[Tensor], list[list[int]]]:
    """Return each way's gradients, and what was missing when the hooks sent."""
    torch.manual_seed(rank)  # other weights and other samples on each rank
    raw_model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    inputs = torch.randn(16, WIDTH)
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
    for model, average in zip(models, averages, strict=True):
        model(inputs).square().mean().backward()
        average()
    return [parameters_to_vector(gradients(each)) for each in all_parameters], missing


(first, missing), (second, _) = lesson.run(work, WORLD_SIZE)
for way, mine, theirs in zip(WAYS, first, second, strict=True):
    same = "the same" if torch.equal(mine, theirs) else "other"
    off = (mine - first[4]).abs().max() / first[4].abs().max()
    print(f"  {way:36}{same} gradients on both ranks, {off:.0e} off those of DDP")
# Without averaging each rank has gradients of its own.
assert not torch.equal(first[5], second[5])
# With each way the ranks have the same gradients, to the bit, and they are DDP's.
for i in range(5):
    assert torch.equal(first[i], second[i])
    assert torch.allclose(first[i], first[4], rtol=1e-4, atol=1e-8)
# The hooks send while gradients are missing. Buckets send the same numbers in fewer calls.
each, buckets = missing
print(f"gradients that are missing when each bucket is sent: {buckets}")
assert each == list(range(15, -1, -1))
assert buckets == [12, 8, 4, 0]

lesson.claim("DDP averages gradients in the backward, a bucket at a time, and not in the step.")
