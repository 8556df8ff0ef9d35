"""Where DDP communicates: the collectives of each phase, as the profiler sees them.

It prints the collectives of the constructor, the forward, the backward and the optimizer.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from _lesson import start, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints when it starts
Calls = dict[str, dict[str, int]]


@contextmanager
def watch(phase: str, calls: Calls) -> Iterator[None]:
    """Store under ``phase`` how often each collective was called."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield
    names = [event.name for event in profiler.events() if event.name.startswith("c10d::")]
    calls[phase] = dict(Counter(name.removeprefix("c10d::").rstrip("_") for name in names))


def work(rank: int, world_size: int, norm: bool) -> tuple[Calls, bool]:
    """Return the calls of each phase, and whether rank 0's weights replaced those of rank 1."""
    torch.manual_seed(rank)
    layer = nn.Linear(4, 8)
    mine = layer.weight.detach().clone()
    raw_model = nn.Sequential(layer, nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 2))
    inputs, calls = torch.randn(6, 4), Calls()
    with watch("DistributedDataParallel(model)", calls):
        model = DistributedDataParallel(raw_model)
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.1)
    is_replaced = torch.equal(layer.weight, mine) == (rank == 0)
    # After the first step DDP rebuilds its buckets, which would add a collective.
    model(inputs).square().mean().backward()
    model(inputs).square().mean().backward()

    optimizer.zero_grad()
    with watch("forward", calls):
        loss = model(inputs).square().mean()
    with watch("backward", calls):
        loss.backward()
    with watch("the optimizer's step", calls):
        optimizer.step()
    with watch("forward without gradients, after a step", calls), torch.no_grad():
        model(inputs)
    with watch("forward with gradients, after that one", calls):
        model(inputs)
    return calls, is_replaced


def main() -> dict[str, bool]:
    plain, with_buffers = (values(work, 2, norm) for norm in (False, True))
    tables = [ranks[0][0] for ranks in (plain, with_buffers)]
    print(f"{'':42}{'without buffers':30}with batch normalisation")
    for phase in tables[0]:
        cells = [", ".join(f"{n} {name}" for name, n in t[phase].items()) or "-" for t in tables]
        print(f"{phase:42}{cells[0]:30}{cells[1]}")
    without, norm = tables
    return {
        "the constructor compares the models (allgather) and broadcasts rank 0's weights, which "
        "replace the other ranks' own": without["DistributedDataParallel(model)"].keys()
        == {"allgather", "broadcast"}
        and all(is_replaced for _, is_replaced in (*plain, *with_buffers)),
        "backward all-reduces the gradients": without["backward"] == {"allreduce": 1},
        "the optimizer's step does not communicate": not without["the optimizer's step"],
        "forward broadcasts buffers, if there are any, and nothing else": not without["forward"]
        and norm["forward"].keys() == {"broadcast"},
        "it does so if the forward before it had gradients and synchronised: therefore the first "
        "forward of an evaluation broadcasts, and the first one after it does not": norm[
            "forward without gradients, after a step"
        ].keys()
        == {"broadcast"}
        and not norm["forward with gradients, after that one"],
    }


if __name__ == "__main__":
    start(main)
