"""Break it: without set_epoch, every epoch shows the samples in the same order.

It prints the order of the samples in each epoch, without and with set_epoch.
"""

import torch
from _lesson import error_of, start
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

WORLD_SIZE, EPOCHS = 2, 3


def epochs(dataset: Dataset, rank: int, call_set_epoch: bool) -> list[list[int]]:
    """Return the samples that this rank sees in each epoch."""
    sampler: DistributedSampler = DistributedSampler(dataset, WORLD_SIZE, rank, seed=0)
    # shuffle stays False: the sampler shuffles, with a generator seeded by seed + epoch.
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    orders = []
    for epoch in range(EPOCHS):
        if call_set_epoch:
            sampler.set_epoch(epoch)
        orders.append([int(sample) for (batch,) in loader for sample in batch])
    return orders


def main() -> dict[str, bool]:
    dataset = TensorDataset(torch.arange(8))
    orders = {}
    for call in (False, True):
        print(f"{'with' if call else 'without'} set_epoch:")
        orders[call] = [epochs(dataset, rank, call) for rank in range(WORLD_SIZE)]
        for epoch, shares in enumerate(zip(*orders[call], strict=True)):
            ranks = "   ".join(f"rank {rank} {share}" for rank, share in enumerate(shares))
            print(f"  epoch {epoch}: {ranks}")
    sampler: DistributedSampler = DistributedSampler(dataset, WORLD_SIZE, 0)
    said = error_of(lambda: DataLoader(dataset, sampler=sampler, shuffle=True))
    print(f"shuffle=True beside a sampler: {said}")
    return {
        "without set_epoch all epochs have the order of epoch 0": all(
            rank.count(rank[0]) == EPOCHS for rank in orders[False]
        ),
        "cure: with set_epoch(epoch) each epoch has another order": all(
            rank[0] != rank[1] != rank[2] for rank in orders[True]
        ),
        "with or without it, the ranks' shares of these 8 samples do not overlap": all(
            sorted(first + second) == list(range(8))
            for ranks in orders.values()
            for first, second in zip(*ranks, strict=True)
        ),
        "the loader must not shuffle beside a sampler": (
            said == "ValueError: sampler option is mutually exclusive with shuffle"
        ),
    }


if __name__ == "__main__":
    start(main, "The sampler shuffles. Is the order of the second epoch another one?")
