"""All-reduces between the ranks of a job, timed and checked, for scaling.py and doctor.py."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist


def largest(number: int) -> int:
    """Return the largest ``number`` of all ranks. Collective."""
    values = torch.tensor(number)  # on the CPU, which every group of this project serves
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return int(values)


def time_all_reduce(
    sizes: Sequence[int], device: torch.device, repeats: int = 4
) -> dict[int, tuple[float, bool]]:
    """Return the least seconds for each message size in bytes, and whether all sums were right.

    Collective.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {}
    for size in sizes:
        times, is_right = [], True
        for _ in range(repeats):
            values = torch.full((size // 4,), float(rank + 1), device=device)
            largest(0)  # all begin together
            begin = time.perf_counter()
            dist.all_reduce(values)
            values[0].item()  # waits for a GPU
            times.append(time.perf_counter() - begin)
            is_right &= bool((values == world_size * (world_size + 1) / 2).all())
        results[size] = min(times), is_right
    return results
