"""Batch normalisation over one process's share, or over all (SyncBatchNorm): what does it change?

SyncBatchNorm runs on GPUs only. So one process plays all of them here: a layer normalises each
share by its own statistics, as DDP does, or the whole batch, as SyncBatchNorm does.

It prints the test accuracy for both, with large and with small shares.
"""

import torch
from _lesson import start
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

CLASSES, FEATURES, STEPS, PROCESSES = 10, 32, 150, 8
SEEDS = range(5)


class NormOfShares(nn.BatchNorm1d):
    """Batch normalisation in which each share of the batch has statistics of its own."""

    shares = 1

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)
        return torch.cat([super(NormOfShares, self).forward(x) for x in inputs.chunk(self.shares)])


def samples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return points around a centre for each class, [N, FEATURES], and their classes [N]."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, FEATURES, generator=generator)
    return centres[labels] + 1.5 * noise, labels


def accuracy(share: int, is_synchronised: bool, seed: int) -> float:
    """Train with ``share`` samples of each process in a step, and test."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, 64), norm := NormOfShares(64), nn.ReLU(), nn.Linear(64, CLASSES)
    )
    norm.shares = 1 if is_synchronised else PROCESSES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        inputs, labels = samples(share * PROCESSES, generator)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    inputs, labels = samples(5000, torch.Generator().manual_seed(99))
    with torch.no_grad():
        return (model.eval()(inputs).argmax(1) == labels).double().mean().item()


def main() -> dict[str, bool]:
    gain = {}
    for share in (32, 2):
        own, common = ([accuracy(share, sync, seed) for seed in SEEDS] for sync in (False, True))
        means = [sum(each) / len(each) for each in (own, common)]
        gain[share] = means[1] - means[0]
        print(
            f"{PROCESSES} processes with {share:2} samples each: {means[0]:.1%} with statistics of"
            f" each share, {means[1]:.1%} over all ({len(SEEDS)} seeds)"
        )
    return {
        "with 32 samples on each process, statistics over all change the accuracy by less than 1 "
        "point of 100": abs(gain[32]) < 0.01,
        "with 2 samples on each process they raise it by more than 5": gain[2] > 0.05,
    }


if __name__ == "__main__":
    start(main)
