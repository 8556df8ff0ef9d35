"""What has to be drawn alike on all ranks, and what has to differ?

A script draws the first weights, a split into training and test, the augmentation and the dropout.
DDP compares the ranks' models, and not their data. So a wrong seed raises no error.

a) All four alike.
b) The split alike. Augmentation and dropout have to differ, and the weights may.
c) Weights and augmentation alike. The split has to differ.

Asked in facebookresearch/detr#297 and huggingface/transformers#37932.
"""

import os
import subprocess
import sys
from typing import Any

import _lesson as lesson
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import random_split

lesson.start(__doc__, answer="b")
CLASSES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")
Draws = tuple[list[int], list[int], float, list[int]]


def work(rank: int, world_size: int, seed: int, split_seed: int | None) -> Draws:
    """Return the shifts of four images, a dropout mask, a weight, and the test samples."""
    torch.manual_seed(seed + rank if seed else 0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5)))
    shifts = torch.randint(-3, 4, (4,))  # in pixels: a random augmentation
    kept = (model(torch.ones(1, 2)) != 0).int()
    weight = model.module[0].weight[0, 0].item()
    # Ranks that a launcher has started begin with different seeds, if nobody sets one.
    torch.seed()
    generator = torch.Generator().manual_seed(split_seed) if split_seed is not None else None
    samples: Any = range(100)
    parts = random_split(samples, [0.8, 0.2], generator)  # training and test
    return shifts.tolist(), kept[0].tolist(), weight, sorted(parts[1].indices)


def show(title: str, seed: int, split_seed: int | None) -> list[Draws]:
    print(f"{title}:")
    ranks = lesson.run(work, 2, seed, split_seed)
    for rank, (shifts, kept, weight, test) in enumerate(ranks):
        print(f"  rank {rank}: shifts {shifts}, dropout keeps {kept}, weight {weight:.4f}", end="")
        print(f", test samples {test[:4]}...")
    return ranks


first, second = show("one seed on all ranks, an unseeded split", 0, None)
# The ranks augment and drop alike, so the global batch has half of the variety.
assert first[:2] == second[:2]
# An unseeded split differs, so one rank trains on what another one tests.
print(f"  {len(set(first[3]) - set(second[3]))} of rank 0's 20 test samples are trained on rank 1")
assert first[3] != second[3]

first, second = show("seed + rank, a split with one seed", 1, 0)
assert first[0] != second[0]
assert first[1] != second[1]
assert first[3] == second[3]
# The weights need no equal seeds: DDP broadcasts those of rank 0.
assert first[2] == second[2]

# A set of strings has another order in another process, and so have class numbers made of it.
orders = []
for seed in ("1", "2"):  # without this variable each Python draws a seed
    command = [sys.executable, "-c", f"print(*set({CLASSES}))"]
    environment = os.environ | {"PYTHONHASHSEED": seed}
    orders.append(subprocess.check_output(command, env=environment, text=True).split())
    print(f"enumerate(set(names)) in a process: {' '.join(orders[-1])}")
assert orders[0] != orders[1]
assert sorted(orders[0]) == sorted(orders[1])  # the cure: sort the names

lesson.claim("augmentation and dropout must differ; splits and class numbers must be the same.")
