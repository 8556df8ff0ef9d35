"""Break it: one seed on all ranks, and all draw the same augmentation and the same dropout.

It prints what each rank draws, with one seed and with a seed for each rank. Asked in
facebookresearch/detr#297 and huggingface/transformers#37932.
"""

import torch
from _lesson import show, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

BATCH = 4
Draws = tuple[list[int], list[int], list[int], float]


def work(rank: int, world_size: int, case: str) -> Draws:
    """Return this rank's images, their shifts, its dropout mask, and its first weight."""
    torch.manual_seed(0 if case == "one seed" else rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5)))
    # This seed does not decide the order: the sampler has its own generator.
    sampler: DistributedSampler = DistributedSampler(range(8), world_size, rank)  # type: ignore[arg-type]
    if case == "one seed, until the model is built":
        torch.manual_seed(1000 + rank)
    shifts = torch.randint(-3, 4, (BATCH,))  # in pixels: a random augmentation
    kept = (model(torch.ones(1, 2)) != 0).int()
    return list(sampler), shifts.tolist(), kept[0].tolist(), model.module[0].weight[0, 0].item()


def main() -> dict[str, bool]:
    told = "images {0[0]} shifted by {0[1]}, dropout keeps {0[2]}, weight {0[3]:.4f}"
    cases = ("one seed", "seed + rank", "one seed, until the model is built")
    same, own, later = ([rank.value for rank in show(told, work, case)] for case in cases)
    return {
        "with one seed the ranks draw the same shifts and drop the same units for different "
        "images, so a global batch has half the variety": same[0][1:] == same[1][1:],
        "cure: with seed + rank each rank draws its own": (
            own[0][1] != own[1][1] and own[0][2] != own[1][2]
        ),
        "cure: one seed for the model, and another one per rank after it is built": (
            later[0][1] != later[1][1] and later[0][2] != later[1][2]
        ),
        "the weights are rank 0's in any case, since DDP broadcasts them": (
            own[0][3] == own[1][3] == same[0][3]
        ),
        "the order is the same in any case, and each rank has another share of it": all(
            sorted(ranks[0][0] + ranks[1][0]) == list(range(8)) and ranks[0][0] == same[0][0]
            for ranks in (same, own, later)
        ),
    }


if __name__ == "__main__":
    start(main, "All ranks have the same seed. Do their dropout masks differ?")
