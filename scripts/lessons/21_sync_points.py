"""When do the processes of DDP communicate: in the constructor, forward, backward or step?

The profiler counts the collectives of each phase, for a model without and with buffers (those of
batch normalisation). With buffers, DDP communicates

a) in the constructor, in the backward and in optimizer.step().
b) in the constructor, in the forward and in the backward.
c) in the backward only.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import _lesson as lesson
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

lesson.start(__doc__, answer="b")
calls: dict[str, Counter] = {}


@contextmanager
def watch(phase: str) -> Iterator[None]:
    """Count the collectives that are called meanwhile."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield
    names = [event.name for event in profiler.events() if event.name.startswith("c10d::")]
    calls[phase] = Counter(name.removeprefix("c10d::").rstrip("_") for name in names)


def work(rank: int, world_size: int, has_buffers: bool) -> tuple[dict[str, Counter], float]:
    torch.manual_seed(rank)
    middle = nn.BatchNorm1d(8) if has_buffers else nn.Tanh()
    raw_model = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 2))
    inputs = torch.randn(6, 4)
    with watch("constructor"):
        model = DistributedDataParallel(raw_model)
    weight = next(raw_model.parameters()).sum().item()
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.1)
    for _ in range(2):  # DDP makes its buckets after the first step, which is one more collective
        model(inputs).square().mean().backward()
        optimizer.zero_grad()
    with watch("forward"):
        loss = model(inputs).square().mean()
    with watch("backward"):
        loss.backward()
    with watch("optimizer.step()"):
        optimizer.step()
    with watch("forward of an evaluation"), torch.no_grad():
        model(inputs)
    with watch("forward after it"):
        model(inputs)
    return calls, weight


plain = lesson.run(work, 2, False)
buffers = lesson.run(work, 2, True)
print(f"{'':26}{'without buffers':30}with batch normalisation")
for phase in plain[0][0]:
    cells = [
        ", ".join(f"{n} {name}" for name, n in t[0][0][phase].items()) for t in (plain, buffers)
    ]
    print(f"{phase:26}{cells[0] or '-':30}{cells[1] or '-'}")
without = plain[0][0]
norm = buffers[0][0]
# The constructor compares the models, and then broadcasts rank 0's weights.
assert without["constructor"].keys() == {"allgather", "broadcast"}
assert plain[0][1] == plain[1][1]
# The backward averages the gradients. The step is the same on all ranks, and needs no collective.
assert without["backward"] == norm["backward"] == {"allreduce": 1}
assert not without["optimizer.step()"]
assert not norm["optimizer.step()"]
# The forward broadcasts the buffers, if there are any.
assert not without["forward"]
assert norm["forward"].keys() == {"broadcast"}
# It does so if the forward before it had gradients. So the first one of an evaluation does, too.
assert norm["forward of an evaluation"].keys() == {"broadcast"}
assert not norm["forward after it"]

lesson.claim("weights are sent when wrapping, buffers in forward, gradients in backward.")
