"""Break it: DistributedSampler repeats samples to make the shares equal, and the accuracy is off.

python scripts/lessons/break_padded_evaluation.py
"""

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from _lesson import Outcome, conclude, run_ranks
from torch.utils.data import DistributedSampler

WORLD_SIZE, SAMPLES = 4, 10
MISTAKES = {0, 1}  # the samples that the model gets wrong


def work(rank: int, world_size: int, case: str) -> tuple[list[int], int, int]:
    """Evaluate this rank's share; return it, and correct and count over all ranks."""
    samples = range(SAMPLES)
    share: Sequence[int] = samples[rank::world_size]  # shares may differ by one sample
    if case != "unpadded":
        drop_last = case == "drop_last=True"
        share = list(
            DistributedSampler(samples, world_size, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]
        )
    # Correct and count travel together and are divided last; nothing here needs equal shares.
    sums = torch.tensor([sum(sample not in MISTAKES for sample in share), len(share)])
    dist.all_reduce(sums)
    return list(share), int(sums[0]), int(sums[1])


def show(case: str) -> tuple[int, int]:
    outcomes: list[Outcome] = run_ranks(work, WORLD_SIZE, case)
    shares = [outcome.value[0] for outcome in outcomes]
    correct, count = outcomes[0].value[1:]
    print(f"{case:22} shares {shares}: {correct} of {count} = {correct / count:.1%}")
    return correct, count


def main() -> int:
    true = SAMPLES - len(MISTAKES)
    print(f"{SAMPLES} samples, {true} of them right: the accuracy is {true / SAMPLES:.1%}")
    padded = show("DistributedSampler")
    dropped = show("drop_last=True")
    exact = show("unpadded")
    return conclude(
        {
            "the sampler repeats the first samples until the shares are equal, and each counts "
            "again": padded == (8, 12),
            "with drop_last it leaves samples out instead": dropped[1] == 8,
            "samples[rank::world_size] counts each exactly once": exact == (true, SAMPLES),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
