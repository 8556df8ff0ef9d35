"""Break it: one rank stops early on its own validation loss, and the others wait for it.

python scripts/lessons/break_early_stop.py

Asked in Lightning-AI/pytorch-lightning#379 and pytorch/pytorch#134920.
"""

import sys
import time

import torch
import torch.distributed as dist
from _lesson import Outcome, conclude, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = 2.0  # seconds; gloo's default is 30 minutes, in which all seem to hang
PATIENCE = 2  # epochs without a better loss
# The validation loss of each rank's share, epoch by epoch: rank 0 improves twice, rank 1 for long.
# Of both together (the means) the best is that of epoch 4.
LOSSES = ((1.0, 0.8, 0.9, 0.9, 0.9, 0.9, 0.9), (1.2, 1.1, 1.0, 0.9, 0.8, 0.9, 0.9))


def work(rank: int, world_size: int, case: str) -> int:
    """Train until it is time to stop; return the number of epochs."""
    model = DistributedDataParallel(nn.Linear(2, 1))
    best, waited = float("inf"), 0
    epochs = 0
    for loss in LOSSES[rank]:
        epochs += 1
        model(torch.ones(4, 2)).sum().backward()  # a whole epoch, which all ranks do together
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
    if case == "its own loss, the others are busy":
        time.sleep(2 * TIMEOUT if rank == 0 else 0)  # a test, an upload
    return epochs


def show(case: str, timeout: float = 30.0) -> list[Outcome]:
    outcomes = run_ranks(work, 2, case, timeout=timeout)
    print(f"{case}:")
    for outcome in outcomes:
        print(f"  rank {outcome.rank}: {outcome.error[:160] or f'stopped after {outcome.value}'}")
    return outcomes


def main() -> int:
    busy = show("its own loss, the others are busy", TIMEOUT)
    gone = show("its own loss, the others have ended")
    first = show("all stop with the first")
    together = show("the loss of all")
    return conclude(
        {
            "rank 0 leaves after epoch 4, and rank 1 waits in its next backward until the "
            "timeout": busy[0].value == 4 and "Timed out waiting 2000ms" in busy[1].error,
            "or until rank 0 has ended, and then blames the connection": "onnection"
            in gone[1].error,
            "the largest of all flags stops all in the same epoch": [o.value for o in first]
            == [4, 4],
            "so does a loss that is summed over the ranks: it is the same on all, and that of the "
            "whole validation set": [o.value for o in together] == [7, 7],
        }
    )


if __name__ == "__main__":
    sys.exit(main())
