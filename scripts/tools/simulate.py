"""Let a large world meet on this machine, and lose a rank, to see how long both take.

    python scripts/tools/simulate.py --ranks 64 256 1024

Ranks are threads of a few processes. Rank 0 and the rank that gets lost have processes of their
own. Stores and messages are the real ones, and each rank holds as many connections to rank 0's
store as a rank of a job does. The tool prints a row for each size:

- meeting: seconds from the first rank's start until every rank knows that all are there, and MB
  and descriptors of rank 0.
- missing: a rank never comes. Seconds from the end of the meeting's time until every rank knows.
- lost: a rank gets killed. Seconds until every other rank knows its number.

The exit status is 1 if a rank got a wrong answer.
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
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import utils.early  # noqa: F401

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from utils.cluster.failures import Job
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
LOST = "gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


class Row(NamedTuple):
    """The figures of one size. ``met`` and ``right`` count ranks with the right answer."""

    ranks: int
    met: int
    meeting_s: float
    meeting_mb: float
    descriptors: int
    missing_s: float
    missing_right: int
    lost_s: float
    lost_mb: float
    lost_right: int


def attend(rank: int, size: int, port: int, seconds: float) -> Job:
    """Meet the others as a rank does."""
    host = f"host{rank // RANKS_PER_HOST}"
    own = Member(rank, {"model": "convnet"}, host)
    job = Job(meet(Address("127.0.0.1", port), own, size, seconds), seconds)
    job.group_store = job.rendezvous()  # type: ignore[attr-defined]  # a connection more
    return job


def traffic() -> tuple[float, int]:
    """Return the MB that the open connections of this process carried, and its descriptors."""
    total, numbers = 0, os.listdir("/proc/self/fd")
    for number in numbers:
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += sum(struct.unpack_from("QQ", info, BYTES_IN_TCP_INFO))
    return total / 1e6, len(numbers)


def live(
    ranks: list[int], size: int, port: int, seconds: float, begin: Any, lose: Any, results: Any
) -> None:
    """Be some ranks of the world: meet, and name the lost rank once ``lose`` is set."""
    # This process group sends nothing. With it the ranks count as being in training.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    jobs: dict[int, Job] = {}

    def in_threads(function: Callable[[int], Any]) -> dict[int, Any]:
        answers: dict[int, Any] = {}

        def answer(rank: int) -> None:
            try:
                answers[rank] = function(rank), time.time()
            except Exception as error:
                answers[rank] = str(error), time.time()

        threads = [threading.Thread(target=answer, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def arrive(rank: int) -> str:
        jobs[rank] = attend(rank, size, port, seconds)
        return "met"

    def name_lost(rank: int) -> list[int]:
        return jobs[rank].explain(RuntimeError(LOST), STEP).ranks  # type: ignore[attr-defined]

    begin.wait()
    results.put((in_threads(arrive), None))
    if ranks == [size - 2]:
        signal.pause()  # the rank that gets lost, for which an event would wait
    lose.wait()
    before = traffic()
    results.put((in_threads(name_lost), (before, traffic()) if ranks == [0] else None))
    signal.pause()  # rank 0's store has to be there until all have answered


def leave_network() -> None:
    """Go on in a network of our own, if root may have one.

    The thread that serves rank 0's store looks up the host name of each new connection. A name
    server that drops some of these many questions would decide the result.
    """
    if os.geteuid() == 0 and ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


class World:
    """The processes of one world.

    Args:
        seconds: that each rank waits for the others.
        absent: a rank that never comes.
    """

    def __init__(self, size: int, seconds: float, absent: int | None = None) -> None:
        context = multiprocessing.get_context("fork")
        self.begin, self.lose, self.results = context.Event(), context.Event(), context.Queue()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        lost = size - 2
        shared = [rank for rank in range(1, size) if rank != lost]
        groups = [[0], *(shared[part::PROCESSES] for part in range(PROCESSES)), [lost]]
        common = (size, port, seconds, self.begin, self.lose, self.results)
        self.processes = [
            context.Process(target=live, args=(group, *common), daemon=True)
            for group in groups
            if group and group != [absent]
        ]
        for process in self.processes:
            process.start()
        time.sleep(START_SECONDS)
        self.start = time.time()
        self.begin.set()

    def collect(self, count: int) -> tuple[list[Any], float, Any]:
        """Return the answers of ``count`` ranks, when the last one came, and rank 0's figures."""
        answers: dict[int, Any] = {}
        figures, deadline = None, time.monotonic() + LIMIT_SECONDS
        with suppress(queue.Empty):
            while len(answers) < count:
                more, told = self.results.get(timeout=max(0, deadline - time.monotonic()))
                answers |= more
                figures = told or figures
        last = max((when for _, when in answers.values()), default=float("nan"))
        return [told for told, _ in answers.values()], last, figures

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def simulate(size: int) -> Row:
    """Return what a world of ``size`` ranks takes."""
    world = World(size, LIMIT_SECONDS)
    told, end, _ = world.collect(size)
    meeting_s = end - world.start
    met = told.count("met")
    world.processes[-1].kill()
    start = time.time()
    world.lose.set()
    told, end, figures = world.collect(size - 1)
    world.end()
    (megabytes, descriptors), (with_loss, _) = figures or ((0.0, 0), (0.0, 0))
    lost_s, lost_right = end - start, told.count([size - 2])

    seconds = 2 * meeting_s + 4.0
    world = World(size, seconds, absent=size - 2)
    told, end, _ = world.collect(size - 1)
    world.end()
    missing_s = end - world.start - seconds
    missing_right = sum(f"missing: {size - 2}." in str(answer) for answer in told)
    return Row(
        *(size, met, meeting_s, megabytes, descriptors),
        *(missing_s, missing_right, lost_s, with_loss - megabytes, lost_right),
    )


def main() -> int:
    """Simulate each size, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    sizes = parser.parse_args().ranks
    if min(sizes) < 3:
        parser.error("--ranks: a world has at least 3")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    leave_network()
    print("ranks    met  meeting s      MB  descriptors  missing s  right  lost s     MB  right")
    is_right = True
    for size in sizes:
        row = simulate(size)
        print(
            f"{row.ranks:5}  {row.met:5}  {row.meeting_s:9.1f}  {row.meeting_mb:6.1f}"
            f"  {row.descriptors:11}  {row.missing_s:9.1f}  {row.missing_right:5}"
            f"  {row.lost_s:6.1f}  {row.lost_mb:5.1f}  {row.lost_right:5}",
            flush=True,
        )
        is_right &= row.met == size and row.missing_right == row.lost_right == size - 1
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
