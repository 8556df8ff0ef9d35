"""Break it: ranks whose data sets have the same length, but not the same samples or labels.

DDP compares models, not data, so the run ends without an error. Two causes are common. The order of
a set of strings differs from process to process, and so do class numbers that follow this order. A
split without a seed also differs. Then one rank trains on samples that another rank tests.

It prints what each rank holds for a class, and what the comparison finds.
"""

import os
import subprocess
import sys
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _lesson import start, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import random_split

CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")
SAMPLES, TEST, STEPS = 512, 128, 60


def list_the_set(seed: int) -> tuple[str, ...]:
    """Return the set's order in a new process. Python draws the seed itself if none is given."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-c", f"print(*set({CLASSES}))"]
    return tuple(subprocess.check_output(command, env=environment, text=True).split())


def work(rank: int, world_size: int, orders: list[tuple[str, ...]], seed: int | None) -> Any:
    """Train; return the accuracy, the test samples, the training samples and the labels' CRC."""
    generator = torch.Generator().manual_seed(0)  # the files are the same for all ranks
    names = torch.randint(len(CLASSES), (SAMPLES,), generator=generator)
    noise = torch.randn(SAMPLES, len(CLASSES), generator=generator)
    points = F.one_hot(names).float() + 0.1 * noise
    numbers = torch.tensor([orders[rank].index(name) for name in CLASSES])
    labels = numbers[names]
    # A launcher's ranks start with different seeds. A lesson's are forks of one process.
    torch.seed()
    own = None if seed is None else torch.Generator().manual_seed(seed)
    samples: Any = range(SAMPLES)
    train, test = (part.indices for part in random_split(samples, [SAMPLES - TEST, TEST], own))
    mine, shard = train[rank::world_size], test[rank::world_size]
    model = DistributedDataParallel(nn.Linear(len(CLASSES), len(CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(points[mine]), labels[mine]).backward()
        optimizer.step()
    correct = (model.module(points[shard]).argmax(1) == labels[shard]).sum()
    sums = torch.tensor([int(correct), len(shard)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]), set(test), set(train), crc32(labels.numpy().tobytes())


def show(title: str, orders: list[tuple[str, ...]], seed: int | None) -> tuple[float, int, bool]:
    (accuracy, test, _, labels), (_, _, train, others) = values(work, 2, orders, seed)
    leaked, same = len(test & train), labels == others
    print(f"{title}: accuracy {accuracy:.1%}")
    print(f"  {leaked} of rank 0's {TEST} test samples are in rank 1's training set")
    print(f"  the labels' checksums are {'equal' if same else 'different'}")
    return accuracy, leaked, same


def main() -> dict[str, bool]:
    of_sets = [list_the_set(seed) for seed in (1, 2)]
    of_lists = [tuple(sorted(CLASSES))] * 2
    for rank, order in enumerate(of_sets):
        print(f"rank {rank}'s set: {' '.join(order)}")
    numbers = show("enumerate(set(names)), seeded split", of_sets, 0)
    split = show("enumerate(sorted(names)), unseeded split", of_lists, None)
    right = show("enumerate(sorted(names)), seeded split", of_lists, 0)
    return {
        "a set of strings has another order in another process": of_sets[0] != of_sets[1],
        "ranks with other class numbers train against each other, without an error": (
            numbers[0] < 0.8
        ),
        "with an unseeded split, rank 1 trains on samples that rank 0 tests, and the accuracy does "
        "not show it": split[1] > 0 and split[0] > 0.95,
        "a checksum of the labels, compared before the first step, finds the class numbers": (
            right[2] and not numbers[2]
        ),
        "cure: sorted names, and one seed for the split": right[0] > 0.95 and right[1] == 0,
    }


if __name__ == "__main__":
    start(main, "Two ranks number the classes by a Python set. Does the training raise an error?")
