"""With the same global batch, what makes the update of DDP differ from that of one device?

Each line changes one thing. The update is one step of plain SGD.

a) Nothing does.
b) The seed of the weights does, if it differs by rank.
c) Unequal shares, batch normalisation and dropout do.

Half of the steps with twice the batch is the usual case: the global batch grows with the number of
GPUs.
"""

import _lesson as lesson
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="c")
BATCH = 16
RATE = 0.1
HARMLESS = ("nothing", "another seed for each rank's weights", "unequal shares, weighted losses")
HARMFUL = ("unequal shares", "batch normalisation", "dropout", "half the steps, twice the batch")
AND_RATE = "half the steps, twice the batch and the rate"


def build(change: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(8) if "norm" in change else nn.Dropout(0.5 * ("dropout" in change))
    return nn.Sequential(nn.Linear(4, 8), middle, nn.Tanh(), nn.Linear(8, 3)).double()


def data(change: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    count = 2 * BATCH if "twice" in change else BATCH
    return torch.randn(count, 4, dtype=torch.float64), torch.randint(3, (count,))


def update(model: nn.Module, inputs: Tensor, labels: Tensor, rate: float, weight=1.0) -> Tensor:
    """Make a step; return the change of the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer.zero_grad()
    torch.manual_seed(2)  # dropout draws from here
    (weight * F.cross_entropy(model(inputs), labels)).backward()
    before = nn.utils.parameters_to_vector(model.parameters())
    optimizer.step()
    return (nn.utils.parameters_to_vector(model.parameters()) - before).detach()


def on_rank(rank: int, world_size: int, change: str) -> Tensor:
    inputs, labels = data(change)
    share = slice(rank, None, world_size)
    if "unequal" in change:
        share = slice(12 * rank, 12 + 4 * rank)  # 12 samples and 4
    # DDP divides by the number of ranks, as if all shares had the same size.
    weight = len(labels[share]) * world_size / BATCH if "weighted" in change else 1.0
    model = DistributedDataParallel(build(change, seed=rank if "seed" in change else 0))
    rate = 2 * RATE if change == AND_RATE else RATE
    return update(model, inputs[share], labels[share], rate, weight)


off = {}
for change in (*HARMLESS, *HARMFUL, AND_RATE):
    model = build(change)
    inputs, labels = data(change)
    steps = zip(inputs.split(BATCH), labels.split(BATCH), strict=True)
    single = torch.stack([update(model, *batch, RATE) for batch in steps]).sum(dim=0)
    ddp = lesson.run(on_rank, 2, change)[0]
    off[change] = ((ddp - single).norm() / single.norm()).item()
    print(f"{change:46} relative difference {off[change]:.3f}")
assert max(off[change] for change in HARMLESS) < 1e-12
assert min(off[change] for change in HARMFUL) > 1e-3
# Half the steps go half as far, and twice the rate makes up for most of it.
assert 0.4 < off["half the steps, twice the batch"] < 0.6
assert off[AND_RATE] < 0.1

lesson.claim("with equal shares DDP makes one device's update, except for BatchNorm and dropout.")
