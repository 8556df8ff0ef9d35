"""Break it: two forwards of a DDP model before the backward, as a GAN or a siamese network does.

It prints the gradients of both ranks for each order of forwards and backwards. Asked in
pytorch/pytorch#22095 and pytorch/pytorch#62474.
"""

from typing import Any

import torch
from _lesson import Outcome, show, start
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# Since torch 2.13 DDP hides the broadcast from autograd, and the flag has another name. The former
# one also skips the first synchronisation.
HIDDEN = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
FLAG = "forward_sync_buffers" if HIDDEN else "broadcast_buffers"


class Scaled(nn.Module):
    """A layer whose backward needs a buffer, as a normalisation's may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.full((2,), 2.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) * self.scale


def work(rank: int, world_size: int, case: str) -> tuple[float, float]:
    """Return two sums: this rank's gradient, and the gradient of one device with all samples."""
    torch.manual_seed(0)
    first, second = torch.rand(2, world_size, 4, 3)
    single = Scaled()
    loss = single(first).sum() + single(second).square().sum()
    (loss / world_size).backward()  # DDP averages over the ranks
    options: Any = {FLAG: case == "DDP"}
    model = DistributedDataParallel(Scaled(), **options)
    model.module.load_state_dict(single.state_dict())
    if case == "one forward of both":
        one, two = model(torch.cat((first[rank], second[rank]))).chunk(2)
    else:
        one = model(first[rank])
        if case == "two backwards, each after its forward":
            one.sum().backward()
        if case == "a broadcast in between":
            with torch.no_grad():  # DDP itself calls this at the start of a forward
                model._sync_module_buffers(authoritative_rank=0)
        two = model(second[rank])
    if case == "two backwards":
        one.sum().backward()
    if case.startswith("two backwards"):
        two.square().sum().backward()
    else:
        (one.sum() + two.square().sum()).backward()
    layers = (model.module.linear, single.linear)
    return tuple(round(float(layer.weight.grad.sum()), 3) for layer in layers)  # type: ignore[return-value, union-attr]


def right(outcomes: list[Outcome]) -> bool:
    return all(o.value is not None and o.value[0] == o.value[1] for o in outcomes)


def main() -> dict[str, bool]:
    print(f"torch {torch.__version__}")
    cases = (
        *("a broadcast in between", "DDP", f"{FLAG}=False", "one forward of both"),
        *("two backwards", "two backwards, each after its forward"),
    )
    told = "gradient {0[0]:.3f}, of one device {0[1]:.3f}"
    between, own, without, joined, twice, in_turn = (show(told, work, case) for case in cases)
    said = "modified by an inplace operation"
    return {
        "a broadcast into a buffer that a backward still needs makes that backward fail": all(
            said in outcome.error for outcome in between
        ),
        "DDP broadcasts buffers before a forward if the forward before it had gradients, which "
        f"failed until it hid the broadcast from autograd (this version hides it: {HIDDEN})": (
            right(own) if HIDDEN else said in own[0].error
        ),
        f"cure: with {FLAG}=False two forwards and one backward are right": right(without),
        "cure: one forward of both batches is right": right(joined),
        "of two backwards after two forwards DDP averages the first only, without an error": (
            all(o.value[0] != o.value[1] for o in twice) and twice[0].value != twice[1].value
        ),
        "cure: each backward right after its forward is averaged": right(in_turn),
    }


if __name__ == "__main__":
    start(main, "Two forwards, then two backwards. Do the ranks end with the same gradients?")
