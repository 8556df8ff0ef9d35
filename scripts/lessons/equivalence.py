"""One global batch on one device, with DP and with DDP: equal updates, and what changes them.

It prints how far the weights of each technique are from those of one device.
"""

import torch
import torch.nn.functional as F
from _lesson import start, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from utils.data_parallel import CPUDataParallel

Batch = tuple[Tensor, Tensor]
RATE, BATCH = 0.1, 16  # BATCH is the global one
HARMLESS = ("nothing changed", "weights' seed per rank", "unequal shares, weighted losses")
HARMLESS_TO_DP = ("unequal shares", "order's seed per rank")  # one process, one loss
HARMFUL = ("batch normalisation", "dropout", "half the steps, twice the batch", "... and the rate")


def build(knob: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(8) if "norm" in knob else nn.Dropout(0.5 if "dropout" in knob else 0)
    return nn.Sequential(nn.Linear(4, 8), middle, nn.Tanh(), nn.Linear(8, 3)).double()


def data(knob: str) -> Batch:
    torch.manual_seed(1)
    count = 2 * BATCH if knob in HARMFUL[2:] else BATCH
    return torch.randn(count, 4, dtype=torch.float64), torch.randint(3, (count,))


def update(model: nn.Module, batch: Batch, rate: float, weight: float = 1.0) -> Tensor:
    """Make a step of plain SGD; return the change of the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer.zero_grad()
    torch.manual_seed(2)  # dropout draws from here
    (weight * F.cross_entropy(model(batch[0]), batch[1])).backward()
    before = nn.utils.parameters_to_vector(model.parameters())
    optimizer.step()
    return (nn.utils.parameters_to_vector(model.parameters()) - before).detach()


def on_ranks(rank: int, world_size: int) -> dict[str, Tensor]:
    updates = {}
    for knob in HARMLESS + HARMLESS_TO_DP + HARMFUL:
        inputs, labels = data(knob)
        share: slice | list[int] = slice(rank, None, world_size)
        if "shares" in knob:
            share = slice(12 * rank, 12 + 4 * rank)  # 12 samples and 4
        elif "order" in knob:  # each rank cuts its share out of another permutation
            share = list(DistributedSampler(inputs, world_size, rank, seed=rank))  # type: ignore[arg-type]
        # DDP divides by the number of ranks, as if all shares had the same size.
        weight = len(labels[share]) * world_size / len(labels) if "weighted" in knob else 1.0
        model = DistributedDataParallel(build(knob, seed=rank if "weights" in knob else 0))
        rate = 2 * RATE if knob == HARMFUL[3] else RATE
        updates[knob] = update(model, (inputs[share], labels[share]), rate, weight)
    return updates


def main() -> dict[str, bool]:
    ddp = values(on_ranks, 2)[0]
    print(f"{'relative difference from one device':40}{'DP':>10}{'DDP':>10}")
    off: dict[str, list[float]] = {}
    for knob in HARMLESS + HARMLESS_TO_DP + HARMFUL:
        inputs, labels = data(knob)
        model = build(knob)
        steps = zip(inputs.split(BATCH), labels.split(BATCH), strict=True)
        single = sum((update(model, batch, RATE) for batch in steps), torch.zeros(()))
        dp_model = CPUDataParallel(build(knob), 3 if "shares" in knob else 2)  # 16 is 6, 6 and 4
        dp = update(dp_model, (inputs, labels), 2 * RATE if knob == HARMFUL[3] else RATE)
        off[knob] = [float((u - single).norm() / single.norm()) for u in (dp, ddp[knob])]
        print(f"{knob:40}{off[knob][0]:10.3f}{off[knob][1]:10.3f}")
    print("(dropout in DP: its threads share one generator, so the result depends on their order)")
    dp_equal, ddp_equal = ([k for k in off if off[k][i] < 1e-12] for i in (0, 1))
    half, twice = off[HARMFUL[2]][1], off[HARMFUL[3]][1]
    return {
        "with equal or weighted shares, DDP makes one device's update, whatever seed each rank "
        "took for its weights": tuple(ddp_equal) == HARMLESS,
        "DP makes it with any shares, since its loss is that of the gathered batch": tuple(dp_equal)
        in (HARMLESS + HARMLESS_TO_DP, (*HARMLESS, *HARMLESS_TO_DP, "dropout")),
        "half the steps go half as far, and twice the rate compensates for most of it": (
            twice < 0.1 and 0.4 < half < 0.6
        ),
    }


if __name__ == "__main__":
    start(main)
