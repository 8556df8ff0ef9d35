"""Threads, processes and the GIL: which calls let other threads of a process run.

It prints how often another thread, and another process, runs during a call, and how many cores two
threads keep busy.
"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from _lesson import start, values

PAUSE = 0.005  # seconds between two ticks


def python_call() -> None:
    """One call into C that works on Python objects, and so holds the GIL to its end."""
    sum(range(20_000_000))


def torch_call() -> None:
    """One call into torch, which releases the GIL while it computes."""
    torch.ones(2500, 2500) @ torch.ones(2500, 2500)


def python_loop() -> None:
    """Many small steps of the interpreter, which can release the GIL between them."""
    for _ in range(8_000_000):
        pass


def ticks_during(call: Callable[[], None]) -> int:
    """Count how often another thread of this process runs during ``call``."""
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(PAUSE)

    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.perf_counter()
    call()
    end = time.perf_counter()
    done.set()
    # The call releases the GIL at its end.
    return sum(begin < moment < end - 4 * PAUSE for moment in ticks)


def ticks_beside(rank: int, world_size: int) -> int:
    """Count how often rank 1 runs while rank 0, another process, is in ``python_call``."""
    dist.barrier()
    if rank == 0:
        python_call()
    meeting: Any = dist.barrier(async_op=True)  # complete after rank 0's call
    ticks = 0
    while not meeting.is_completed():
        ticks += 1
        time.sleep(PAUSE)
    return ticks


def cores_used_by_two_threads() -> float:
    """Run the loop in two threads; return how many seconds of CPU they got per second."""
    wall, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(python_loop)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def main() -> dict[str, bool]:
    # A free-threaded build (python3.13t and later) may have none; older versions always have one.
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    in_python, in_torch = ticks_during(python_call), ticks_during(torch_call)
    in_process, cores = values(ticks_beside, 2)[1], cores_used_by_two_threads()
    print(f"Python {sys.version.split()[0]}, GIL {'on' if gil else 'off'}; this thread ran, times")
    print(f"  while another thread was in sum(range(...))  {in_python:5}")
    print(f"  while another thread was in a torch product  {in_torch:5}")
    print(f"  while another process was in sum(range(...)) {in_process:5}")
    print(f"two threads in a Python loop kept {cores:.2f} cores busy")
    with_gil = "one thread's Python code blocks the others, and two threads use one core at most"
    without = "without a GIL, one thread's Python code lets the others run"
    return {
        with_gil if gil else without: (in_python < in_process / 4 and cores < 1.2) == gil,
        "torch releases the GIL while it computes: there DataParallel's threads can overlap, in "
        "the Python code around it they take turns": in_torch > 0,
        "another process has its own GIL and blocks no other": in_process > 0,
    }


if __name__ == "__main__":
    start(main)
