"""Can two threads of one Python process compute at the same time?

DataParallel has a thread for each GPU, and DistributedDataParallel a process. The GIL is Python's
global lock: only the thread that holds it runs Python code. While a call computes, this lesson
counts how often another thread, or another process, gets to run.

a) Never: the GIL lets one thread compute at a time.
b) While one of them is in a product of torch, but not while it runs Python code.
c) Always, if the machine has two cores.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist

lesson.start(__doc__, answer="b")


def in_python() -> None:
    sum(range(20_000_000))  # one call that works on Python objects, and keeps the GIL to its end


def in_torch() -> None:
    torch.ones(2500, 2500) @ torch.ones(2500, 2500)  # one call that releases the GIL


def loop() -> None:
    for _ in range(8_000_000):  # the interpreter may give the GIL away between two rounds
        pass


def count_while(is_busy: Callable[[], bool]) -> int:
    """Count how often this thread runs until something else has ended."""
    count = 0
    while is_busy():
        count += 1
        time.sleep(0.005)
    return count


def beside_thread(call: Callable[[], None]) -> int:
    thread = threading.Thread(target=call)
    thread.start()
    return count_while(thread.is_alive)


def beside_process(rank: int, world_size: int) -> int:
    if rank == 0:
        in_python()
    meeting: Any = dist.barrier(async_op=True)  # complete after rank 0's call
    return count_while(lambda: not meeting.is_completed())


python = beside_thread(in_python)
product = beside_thread(in_torch)
process = lesson.run(beside_process, 2)[1]
print("This thread ran, times:")
print(f"  {python:4} while another thread was in sum(range(...))")
print(f"  {product:4} while another thread was in a torch product")
print(f"  {process:4} while another process was in sum(range(...))")
# One thread's Python code keeps the others from running. Another process has a GIL of its own.
assert python < process / 4
# torch releases the GIL while it computes. There the threads of DataParallel can overlap.
assert product > 4

wall = time.perf_counter()
cpu = time.process_time()
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda _: loop(), range(2)))
cores = (time.process_time() - cpu) / (time.perf_counter() - wall)
print(f"Two threads in a Python loop kept {cores:.2f} cores busy.")
assert cores < 1.2

lesson.claim("Python code of two threads takes turns; torch's arithmetic and processes overlap.")
