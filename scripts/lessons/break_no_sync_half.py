"""Break it: with accumulation, no_sync stands around one half of a micro-step only.

It prints how often each way sends gradients, and whether both ranks end with the same ones.
"""

from contextlib import nullcontext

import torch
from _lesson import count_sends, start, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MICRO_STEPS = 4
WAYS = {
    "no no_sync": (False, False),
    "around the backward only": (False, True),
    "around the forward only": (True, False),
    "around both": (True, True),
}


def work(rank: int, world_size: int, forward: bool, backward: bool) -> tuple[int, list[float]]:
    """Make one step of several micro-steps; return how often it sent, and the gradient."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    sent = count_sends(model)
    torch.manual_seed(rank)  # other samples on each rank
    for micro_step in range(MICRO_STEPS):
        is_last = micro_step == MICRO_STEPS - 1
        with model.no_sync() if forward and not is_last else nullcontext():
            loss = model(torch.randn(4, 3)).square().mean() / MICRO_STEPS
        with model.no_sync() if backward and not is_last else nullcontext():
            loss.backward()
    return sum(sent), model.module.weight.grad.flatten().tolist()


def main() -> dict[str, bool]:
    sends, equal, gradients = {}, {}, {}
    for way, halves in WAYS.items():
        (sends[way], gradients[way]), (_, other) = values(work, 2, *halves)
        equal[way] = gradients[way] == other
        words = "the ranks have the same gradient" if equal[way] else "each rank has its own"
        numbers = " ".join(f"{value:+.4f}" for value in gradients[way])
        print(f"{way:25} {sends[way]} sends; {words}; rank 0: {numbers}")
    nothing, backward, forward, both = WAYS
    right = torch.tensor(gradients[nothing])
    return {
        "around the backward alone it saves nothing: every micro-step sends": (
            sends[backward] == sends[nothing] == MICRO_STEPS
        ),
        "around the forward alone it works too, since DDP decides in the forward": (
            sends[forward] == sends[both] == 1
        ),
        "all four ways end with the same gradient on both ranks, so no error shows the loss of "
        "time": all(equal.values())
        and all(torch.allclose(torch.tensor(found), right) for found in gradients.values()),
    }


if __name__ == "__main__":
    start(main, "Four micro-steps, no_sync around the backward only. How often does DDP send?")
