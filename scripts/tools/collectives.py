"""Measure an all-reduce between the ranks of a job: its latency, its bandwidth, its sums.

    torchrun --standalone --nproc_per_node 2 scripts/tools/collectives.py

The tool prints seconds by bytes, as JSON. scaling.py and doctor.py also measure with it.
"""

import json
import os
import sys
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


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("collectives.py: error: it measures between ranks: start it with torchrun")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    found = time_all_reduce((4, 2**10, 2**20, 2**22), device, 20)
    if dist.get_rank() == 0:
        print(json.dumps({size: seconds for size, (seconds, _) in found.items()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
