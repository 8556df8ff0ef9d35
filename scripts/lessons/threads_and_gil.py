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
FEW = 4  # ticks before the call takes the GIL, or after it


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


def ticks_while(is_busy: Callable[[], bool]) -> int:
    """Count how often this thread runs while another thread or process is busy."""
    ticks = 0
    while is_busy():
        ticks += 1
        time.sleep(PAUSE)
    return ticks


def ticks_beside_thread(call: Callable[[], None]) -> int:
    other = threading.Thread(target=call)
    other.start()
    return ticks_while(other.is_alive)


def ticks_beside_process(rank: int, world_size: int) -> int:
    """Count on rank 1, while rank 0 is in ``python_call``."""
    dist.barrier()
    if rank == 0:
        python_call()
    meeting: Any = dist.barrier(async_op=True)  # complete after rank 0's call
    return ticks_while(lambda: not meeting.is_completed())


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
    in_python, in_torch = map(ticks_beside_thread, (python_call, torch_call))
    in_process, cores = values(ticks_beside_process, 2)[1], cores_used_by_two_threads()
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
        "the Python code around it they take turns": in_torch > FEW,
        "another process has its own GIL and blocks no other": in_process > FEW,
    }


if __name__ == "__main__":
    start(main)
