"""Break it: each rank stops early on its own validation loss, and they stop at different epochs.

It prints the epoch at which each rank stops, and how the others end. Asked in
Lightning-AI/pytorch-lightning#379 and pytorch/pytorch#134920.
"""

import torch
import torch.distributed as dist
from _lesson import show, start

PATIENCE = 2  # epochs without a better loss
# The validation loss of each rank's share, epoch by epoch: rank 0's is best early, rank 1's late.
# Their mean is best in epoch 4.
LOSSES = ((1.0, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9), (1.2, 1.1, 1.0, 0.9, 0.8, 0.9, 0.9))


def work(rank: int, world_size: int, case: str) -> int:
    """Return the number of epochs after which this rank stops."""
    best, waited = float("inf"), 0
    epochs = 0
    for loss in LOSSES[rank]:
        epochs += 1
        if case == "the loss of all":
            sums = torch.tensor([loss * 100, 100.0])  # of loss and count: shares may be unequal
            dist.all_reduce(sums)
            loss = float(sums[0] / sums[1])
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        stop = torch.tensor(int(waited >= PATIENCE))
        if case == "all stop with the first":
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            break
    return epochs


def main() -> dict[str, bool]:
    cases = ("its own loss", "all stop with the first", "the loss of all")
    outcomes = (show("stops after epoch {}", work, case) for case in cases)
    own, first, together = ([outcome.value for outcome in ranks] for ranks in outcomes)
    return {
        "by its own loss rank 0 leaves after epoch 4, and rank 1's next backward waits for it in "
        "vain (break_rank_zero_collective shows how such a wait ends)": own == [4, 7],
        "cure: the maximum of the ranks' flags stops all ranks in the same epoch": first == [4, 4],
        "cure: a loss summed over the ranks is the same on all ranks, and is the loss of the whole "
        "validation set": together == [7, 7]
        and min(range(7), key=lambda e: sum(loss[e] for loss in LOSSES)) == 4,
    }


if __name__ == "__main__":
    start(main, "A rank stops when its own loss stops falling. What happens to the other?")
