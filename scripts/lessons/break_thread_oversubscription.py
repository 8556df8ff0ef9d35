"""Break it: each process starts as many threads as there are cores, and all become slow.

It prints the images per second of the same work with a fair share of threads and with too many.
"""

import time

import torch
import torch.distributed as dist
from _lesson import start, values
from torch import nn

from utils.device import usable_cores

WORLD_SIZE, BATCH_SIZE = 2, 16
ROUNDS, SECONDS = 5, 0.4


def work(rank: int, world_size: int, counts: list[int]) -> list[float]:
    """Train beside the other ranks with each number of threads; return the images per second."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    images = torch.randn(BATCH_SIZE, 1, 28, 28)
    steps = [0] * len(counts)
    for _ in range(ROUNDS):  # in turns, so that other programs disturb all of them alike
        for case, threads in enumerate(counts):
            torch.set_num_threads(threads)
            model(images).sum().backward()
            dist.barrier()
            begin = time.perf_counter()
            while time.perf_counter() < begin + SECONDS:
                model(images).sum().backward()
                steps[case] += 1
    return [count * BATCH_SIZE / (ROUNDS * SECONDS) for count in steps]


def main() -> dict[str, bool]:
    cores = usable_cores()
    cases = {
        "cores / processes": max(1, cores // WORLD_SIZE),
        "all cores for each": cores,
        "as 8 processes would be": 8 * cores // WORLD_SIZE,
    }
    print(f"{WORLD_SIZE} processes on {cores} cores")
    ranks = values(work, WORLD_SIZE, [*cases.values()])
    speeds = [sum(of_ranks) for of_ranks in zip(*ranks, strict=True)]
    for (name, threads), speed in zip(cases.items(), speeds, strict=True):
        print(f"  {name:27} {threads:3} threads each: {speed:9,.0f} images/s together")
    fair, _, crowded = speeds
    print(f"the fair share is {fair / crowded:.1f} times as fast as the crowd")
    return {
        "with more threads than cores the processes do less work (cure: set_num_threads(cores // "
        "processes), or OMP_NUM_THREADS before the start)": fair > 1.2 * crowded,
    }


if __name__ == "__main__":
    start(main, "Each process starts a thread for every core. Is the work done sooner?")
