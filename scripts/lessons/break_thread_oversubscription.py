"""Break it: each process starts as many threads as there are cores, and all become slow.

python scripts/lessons/break_thread_oversubscription.py

It prints the seconds of the same work with too many threads and with a fair share.
"""

import time

import torch
import torch.distributed as dist
from _lesson import run_ranks, start
from torch import nn

from utils.device import usable_cores

WORLD_SIZE, SECONDS, BATCH_SIZE = 2, 1.5, 16


def work(rank: int, world_size: int, threads: int) -> float:
    """Train beside the other ranks for a while; return this rank's images per second."""
    torch.set_num_threads(threads)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    images = torch.randn(BATCH_SIZE, 1, 28, 28)
    model(images).sum().backward()
    dist.barrier()
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + SECONDS:
        model(images).sum().backward()
        steps += 1
    return steps * BATCH_SIZE / (time.perf_counter() - begin)


def main() -> dict[str, bool]:
    cores = usable_cores()
    share = max(1, cores // WORLD_SIZE)
    cases = {
        "cores / processes": share,
        "all cores for each": cores,
        "as 8 processes would be": 8 * cores // WORLD_SIZE,
    }
    print(f"{WORLD_SIZE} processes on {cores} cores")
    speeds = {}
    for name, threads in cases.items():
        ranks = [outcome.value for outcome in run_ranks(work, WORLD_SIZE, threads)]
        speeds[name] = sum(ranks)
        print(f"  {name:27} {threads:3} threads each: {speeds[name]:9,.0f} images/s together")
    fair, _, crowded = speeds.values()
    print(f"the fair share is {fair / crowded:.1f} times as fast as the crowd")
    return {
        "with more threads than cores the processes do less work (cure: set_num_threads(cores // "
        "processes), or OMP_NUM_THREADS before the start)": fair > 1.2 * crowded,
    }


if __name__ == "__main__":
    start(main, ask="Each process starts a thread for every core. Is the work done sooner?")
