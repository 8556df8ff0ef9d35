"""Which gradients does DDP never average, without a word?

A model is a body and a head, and is wrapped once. Which of these steps goes wrong?

a) The forward and the backward of two micro-batches, one after the other.
b) A step after the body, which was frozen when the model was wrapped, has been unfrozen.
c) A step in which the ranks have other samples.

DDP averages the gradients of a backward whose forward went through the wrapper, for the parameters
that had requires_grad when the model was wrapped. In the first, third and fifth case here the ranks
go on with gradients of their own, and no error says so. Rank 0 then saves one of several models.
Two forwards were asked about in pytorch/pytorch#62474.
"""

from collections.abc import Iterator
from typing import Any

import _lesson as lesson
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="b")


def losses(case: str, model: Any, inputs: Tensor) -> Iterator[Tensor]:
    """Yield the losses whose backwards follow each other in a step."""
    first, second = inputs.chunk(2)
    if case == "forward of model.module":
        yield model.module(inputs).square().mean()
    elif case == "two forwards, then two backwards":
        outputs = [model(first), model(second)]
        yield from (output.square().mean() for output in outputs)
    elif case == "each backward after its forward":
        for share in (first, second):
            yield model(share).square().mean()
    else:
        yield model(inputs).square().mean()


def work(rank: int, world_size: int, case: str) -> list[float]:
    """Make a step; return the sum of each layer's gradient."""
    torch.manual_seed(0)
    raw_model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    raw_model[0].requires_grad_("unfrozen" not in case)
    model = DistributedDataParallel(raw_model)
    raw_model[0].requires_grad_(True)  # the usual second phase of a fine-tuning
    if case == "unfrozen, and wrapped again":
        model = DistributedDataParallel(raw_model)
    torch.manual_seed(rank)  # other samples on each rank
    for loss in losses(case, model, torch.randn(8, 4)):
        loss.backward()
    return [layer.weight.grad.sum().item() for layer in raw_model]


is_averaged = {}
print(f"{'the sum of the gradients of':36}{'body, rank 0 and 1':24}head, rank 0 and 1")
for case in (
    "forward of model.module",
    "forward of model",
    "unfrozen after wrapping",
    "unfrozen, and wrapped again",
    "two forwards, then two backwards",
    "each backward after its forward",
):
    first, second = lesson.run(work, 2, case)
    pairs = [f"{a:9.5f} {b:9.5f}" for a, b in zip(first, second, strict=True)]
    print(f"{case:36}{pairs[0]:24}{pairs[1]}")
    is_averaged[case] = [a == b for a, b in zip(first, second, strict=True)]
# The wrapper has not seen this forward, so its hooks do nothing.
assert is_averaged["forward of model.module"] == [False, False]
assert is_averaged["forward of model"] == [True, True]
# The wrapper has no hook for a layer that was frozen.
assert is_averaged["unfrozen after wrapping"] == [False, True]
assert is_averaged["unfrozen, and wrapped again"] == [True, True]
# One forward prepares one backward. The second backward adds the rank's own gradients.
assert is_averaged["two forwards, then two backwards"] == [False, False]
assert is_averaged["each backward after its forward"] == [True, True]

lesson.claim("call the wrapper, unfreeze before you wrap, and one backward follows each forward.")
