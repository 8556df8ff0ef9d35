"""All-reduces between the ranks of a job, timed and checked, for scaling.py and doctor.py."""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

SMALLEST = 4  # bytes: what such a message takes is latency
SIZES = [2**20 * 4**i for i in range(5)]  # bytes: 1 MiB to 256 MiB
ROUNDS = 3
IN_FLIGHT = 20  # calls: a single one would time its launch
ENOUGH = 0.2  # seconds for the calls of a round. A link that needs more for one gets no larger size


class Timing(NamedTuple):
    """What an all-reduce of ``size`` bytes took: seconds of one call, the least of some rounds."""

    size: int
    seconds: float
    is_right: bool

    def bus_bandwidth(self, world_size: int) -> float:
        """Return bytes per second over each link, as nccl-tests counts them for a ring.

        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        return 2 * (world_size - 1) / world_size * self.size / self.seconds


def largest(number: int) -> int:
    """Return the largest ``number`` of all ranks. Collective."""
    values = torch.tensor(number)  # on the CPU, which every group of this project serves
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return int(values)


def time_all_reduce(device: torch.device, most: int = SIZES[-1]) -> list[Timing]:
    """Time messages of ``SMALLEST`` bytes, and of ``SIZES`` up to the first of ``most`` or more.

    On a GPU all calls of a round are in its queue at once, between two events. The sums of one
    call are checked. Collective.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    timings = []
    for size in [SMALLEST, *SIZES]:
        values = torch.full((size // 4,), float(rank + 1), device=device)
        dist.all_reduce(values)  # this one connects the ranks, and is not timed
        is_right = bool((values == world_size * (world_size + 1) / 2).all())
        values.zero_()  # so that sums stay numbers, however many there are
        one = largest(round(1e6 * _seconds_of(1, values))) / 1e6
        calls = min(IN_FLIGHT, max(1, round(ENOUGH / max(one, 1e-6))))
        times = [_seconds_of(calls, values) for _ in range(ROUNDS)]
        timings.append(Timing(size, max(1e-9, min(times)), is_right))
        if size >= most or one > ENOUGH:
            break
    return timings


def _seconds_of(calls: int, values: torch.Tensor) -> float:
    """Return the seconds of one call, where several follow one another. Collective."""
    largest(0)  # all begin together
    if values.device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(values)
        return (time.perf_counter() - begin) / calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(calls):
        dist.all_reduce(values)
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls
