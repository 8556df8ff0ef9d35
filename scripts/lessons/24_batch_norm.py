"""Do the ranks share batch normalisation, and does SyncBatchNorm raise the accuracy?

Eight ranks have 32 samples each, or 2. Each layer normalises by the statistics of its rank's share,
or, with SyncBatchNorm, by those of all ranks.

a) They do not share it, and SyncBatchNorm helps with 2 samples only.
b) They do not share it, and SyncBatchNorm helps with 32 samples, too.
c) They share it, because DDP broadcasts buffers. SyncBatchNorm changes nothing.

With SyncBatchNorm every layer waits for every rank, which is slower. It runs on GPUs only. So the
second part imitates eight ranks in one process: a layer that normalises each share, or the whole
batch. (Here all shares update the running statistics, whereas DDP keeps those of rank 0.)
"""

from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="a")
RANKS = 8
CLASSES = 10
FEATURES = 32


def work(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Train; return a weight, and the answers to the same inputs before and after a broadcast."""
    torch.manual_seed(0)
    raw_model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    same = torch.randn(100, 4)
    model = DistributedDataParallel(raw_model)
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    raw_model.eval()
    with torch.no_grad():
        before = raw_model(same)
        for buffer in raw_model.buffers():
            dist.broadcast(buffer, src=0)
        return raw_model[0].weight.detach(), before, raw_model(same)


class NormOfShares(nn.BatchNorm1d):
    """Batch normalisation in which each share of the batch has statistics of its own."""

    shares = 1

    def forward(self, inputs: Tensor) -> Tensor:
        shares = inputs.chunk(self.shares if self.training else 1)
        return torch.cat([super(NormOfShares, self).forward(share) for share in shares])


def samples(count: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(CLASSES, (count,))
    return centres[labels] + 1.5 * torch.randn(count, FEATURES), labels


def accuracy(share: int, shares: int, seed: int) -> float:
    """Train with ``share`` samples of each rank in a step, and test."""
    torch.manual_seed(seed)
    NormOfShares.shares = shares
    layers = (nn.Linear(FEATURES, 64), NormOfShares(64), nn.ReLU(), nn.Linear(64, CLASSES))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(150):
        inputs, labels = samples(share * RANKS)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    inputs, labels = samples(5000)
    return (model.eval()(inputs).argmax(1) == labels).double().mean().item()


(weight, before, after), (other, before_there, after_there) = lesson.run(work, 2)
apart = ((before - before_there).abs().mean() / before.abs().mean()).item()
print(f"The ranks' weights are equal, and their answers are apart by {apart:.1%} on average.")
# Equal weights and other running statistics. An evaluation needs a broadcast of rank 0's buffers.
assert torch.equal(weight, other)
assert apart > 0.01
assert torch.equal(after, after_there)

centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
gain = {}
for share in (32, 2):
    means = [sum(accuracy(share, n, seed) for seed in range(4)) / 4 for n in (RANKS, 1)]
    gain[share] = means[1] - means[0]
    print(f"{share:2} samples on each rank: {means[0]:.1%} by shares, {means[1]:.1%} by all ranks")
assert abs(gain[32]) < 0.01
assert gain[2] > 0.05

lesson.claim("each rank has its own statistics; SyncBatchNorm helps where a share is very small.")
