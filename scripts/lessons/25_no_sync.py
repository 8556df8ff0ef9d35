"""Four micro-steps, `no_sync` around the backward only: how often does DDP send?

    loss = model(inputs).square().mean() / 4
    with model.no_sync() if micro_step < 3 else nullcontext():
        loss.backward()

a) Never.
b) Once, in the last micro-step.
c) Four times.

DDP decides in the forward whether the backward will send. So `no_sync` has to enclose the forward.
"""

from contextlib import nullcontext

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="c")
MICRO_STEPS = 4


def work(
    rank: int, world_size: int, forward: bool, backward: bool, last: int
) -> tuple[int, Tensor]:
    """Make one step; return how often gradients were sent, and the gradient.

    Args:
        last: from this micro-step on, there is no ``no_sync``.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    sent = []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    model.register_comm_hook(None, count)
    torch.manual_seed(rank)  # other samples on each rank
    for micro_step in range(MICRO_STEPS):
        with model.no_sync() if forward and micro_step < last else nullcontext():
            loss = model(torch.randn(4, 3)).square().mean() / MICRO_STEPS
        with model.no_sync() if backward and micro_step < last else nullcontext():
            loss.backward()
    return len(sent), model.module.weight.grad


def show(way: str, *arguments: bool | int) -> tuple[int, Tensor, bool]:
    (sends, gradient), (_, other) = lesson.run(work, 2, *arguments)
    same = "the same gradient" if torch.equal(gradient, other) else "a gradient of its own"
    print(f"{way:34} {sends} sends, and each rank has {same}")
    return sends, gradient, torch.equal(gradient, other)


nowhere = show("nowhere", False, False, 3)
backward = show("around the backward", False, True, 3)
forward = show("around the forward", True, False, 3)
both = show("around both", True, True, 3)
too_long = show("around both, in the last one, too", True, True, 4)
# Around the backward alone it saves nothing, and no error says so.
assert nowhere[0] == backward[0] == MICRO_STEPS
assert forward[0] == both[0] == 1
# The gradient is the same in any case: the sum of the micro-steps, averaged over the ranks.
for _, gradient, is_same in (nowhere, backward, forward, both):
    assert is_same
    assert torch.allclose(gradient, nowhere[1])
# But without a last micro-step outside of no_sync, nothing is averaged.
assert too_long[0] == 0
assert not too_long[2]

lesson.claim("no_sync encloses the forward of all micro-steps but the last one.")
