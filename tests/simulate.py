"""Let a large world meet on this machine, and lose a rank: how long it takes, and what it needs.

    python tests/simulate.py --ranks 64

Ranks are threads of a few processes. Rank 0 and the rank that gets lost have processes of their
own. Stores, messages and connections are those of a job. It prints for each size: seconds until all
know that all are there, with MB and descriptors of rank 0; seconds after the deadline until all
name a rank that never comes; seconds until all name a rank that was killed; each with the number of
ranks that were right.
"""

import argparse
import ctypes
import fcntl
import multiprocessing
import os
import queue
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils.early  # noqa: F401

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from utils.cluster.job import Job
from utils.cluster.meeting import Member, meet
from utils.cluster.places import Address

PROCESSES = 4  # that share the threads
RANKS_PER_HOST = 8
START_SECONDS = 1.0  # for the processes to be there
STEP = 87
CLONE_NEWNET = 0x40000000  # unshare(2)
SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # netdevice(7)
BYTES_IN_TCP_INFO = 120  # tcpi_bytes_acked and tcpi_bytes_received, see linux/tcp.h
LIMIT_SECONDS = 120.0  # for all ranks to answer
HEADER: tuple[str, ...] = ("ranks", "  met", "meeting s", "    MB", "descriptors")
HEADER += ("missing s", "right", "lost s", "   MB", "right")
LOST = "gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


def traffic() -> tuple[float, int]:
    """Return MB that the open connections of this process carried, and how many descriptors."""
    total, numbers = 0, os.listdir("/proc/self/fd")
    for number in numbers:
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += sum(struct.unpack_from("QQ", info, BYTES_IN_TCP_INFO))
    return total / 1e6, len(numbers)


def live(
    ranks: list[int], size: int, port: int, seconds: float, begin: Any, lose: Any, results: Any
) -> None:
    """Be some ranks of the world: meet, and once ``lose`` is set name the lost one."""
    # Nothing is sent by this process group. With it the ranks count as being in training.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    jobs, stores = dict[int, Job](), list[dist.Store]()

    def in_threads(function: Callable[[int], Any]) -> list[Any]:
        def answer(rank: int) -> tuple[Any, float]:
            try:
                return function(rank), time.time()
            except Exception as error:
                return str(error), time.time()

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(answer, ranks))

    def arrive(rank: int) -> str:
        own = Member(rank, {"model": "convnet"}, f"host{rank // RANKS_PER_HOST}")
        jobs[rank] = Job(meet(Address("127.0.0.1", port), own, size, seconds), seconds)
        stores.append(jobs[rank].rendezvous())  # a connection more
        return "met"

    def name_lost(rank: int) -> list[int]:
        return jobs[rank].explain(RuntimeError(LOST), STEP).ranks  # type: ignore[attr-defined]

    begin.wait()
    results.put((in_threads(arrive), None))
    if ranks == [size - 2]:
        signal.pause()  # the one that gets lost: an event would wait for it
    lose.wait()
    before = traffic()
    results.put((in_threads(name_lost), (before, traffic()) if ranks == [0] else None))
    signal.pause()  # rank 0's store has to be there until all have answered


def leave_network() -> None:
    """Go on in a network of our own, where root may have one.

    Rank 0's store asks a name server about each connection. One that drops them spoils it all.
    """
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


class World:
    """The processes of one world, in which ranks wait for ``seconds``, and one may be absent."""

    def __init__(self, size: int, seconds: float, absent: int | None = None) -> None:
        context = multiprocessing.get_context("fork")
        self.begin, self.lose, self.results = context.Event(), context.Event(), context.Queue()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        lost = size - 2
        shared = [rank for rank in range(1, size) if rank != lost]
        groups = [[0], *(shared[part::PROCESSES] for part in range(PROCESSES)), [lost]]
        common = (size, port, seconds, self.begin, self.lose, self.results)
        self.processes = []
        for group in groups:
            if group and group != [absent]:
                process = context.Process(target=live, args=(group, *common), daemon=True)
                process.start()
                self.processes.append(process)
        time.sleep(START_SECONDS)
        self.start = time.time()
        self.begin.set()

    def collect(self, count: int) -> tuple[list[Any], float, Any]:
        """Return the answers of ``count`` ranks, when the last one came, and rank 0's figures."""
        answers: list[tuple[Any, float]] = []
        figures, deadline = ((0.0, 0), (0.0, 0)), time.monotonic() + LIMIT_SECONDS
        with suppress(queue.Empty):
            while len(answers) < count:
                more, told = self.results.get(timeout=max(0, deadline - time.monotonic()))
                answers += more
                figures = told or figures
        last = max((when for _, when in answers), default=float("nan"))
        return [told for told, _ in answers], last, figures

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def simulate(size: int) -> tuple[float, ...]:
    """Return a row: what a world of ``size`` ranks takes."""
    world = World(size, LIMIT_SECONDS)
    told, end, _ = world.collect(size)
    met, meeting_s = told.count("met"), end - world.start
    world.processes[-1].kill()
    start = time.time()
    world.lose.set()
    told, end, ((megabytes, descriptors), (with_loss, _)) = world.collect(size - 1)
    world.end()
    lost = end - start, with_loss - megabytes, told.count([size - 2])

    seconds = 2 * meeting_s + 4.0
    world = World(size, seconds, absent=size - 2)
    told, end, _ = world.collect(size - 1)
    world.end()
    missing = end - world.start - seconds, sum(f"missing: {size - 2}." in str(t) for t in told)
    return (size, met, meeting_s, megabytes, descriptors, *missing, *lost)


def main() -> int:
    """Simulate each size, and return 1 if a rank got another answer than the right one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    sizes = parser.parse_args().ranks
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    leave_network()
    print(*HEADER, sep="  ")
    is_right = True
    for size in sizes:
        row = simulate(size)
        cells = (f"{x:.1f}" if isinstance(x, float) else str(x) for x in row)
        print(*(c.rjust(len(name)) for c, name in zip(cells, HEADER, strict=True)), sep="  ")
        is_right &= (row[1], row[6], row[9]) == (size, size - 1, size - 1)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
