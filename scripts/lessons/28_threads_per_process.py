"""Two processes start a thread for every core: is their work done sooner?

PyTorch starts as many threads as there are cores, in each process. If torchrun starts several, it
sets OMP_NUM_THREADS=1 where it is not set, which is safe and may be too few. The fair share is the
machine's cores divided by its processes.
"""

import os
import time

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import nn

lesson.start(__doc__)
WORLD_SIZE, BATCH, ROUNDS, SECONDS = 2, 16, 5, 0.4


def work(rank: int, world_size: int, counts: list[int]) -> list[float]:
    """Train beside the other rank with each number of threads; return the images per second."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3))
    images = torch.randn(BATCH, 1, 28, 28)
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
    return [count * BATCH / (ROUNDS * SECONDS) for count in steps]


cores = len(os.sched_getaffinity(0))
cases = {"cores / processes": max(1, cores // WORLD_SIZE), "all cores for each": cores}
print(f"{WORLD_SIZE} processes on {cores} cores")
ranks = lesson.run(work, WORLD_SIZE, [*cases.values()])
speeds = [sum(of_ranks) for of_ranks in zip(*ranks, strict=True)]
for (name, threads), speed in zip(cases.items(), speeds, strict=True):
    print(f"  {name:24} {threads:3} threads each: {speed:9,.0f} images/s together")
# Threads that wait for each other in vain cost more than they bring.
assert cores == 1 or speeds[0] > 1.2 * speeds[1]

lesson.claim("no, all become slower; give each process cores / processes threads.")
