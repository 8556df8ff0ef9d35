"""Let a large world meet on this machine, and lose a rank.

    python tests/simulate.py 64 256

Ranks are threads of a few processes; rank 0 and the rank that gets lost have processes of their
own. Stores, messages and connections are those of a job. For each size a line of JSON says how many
ranks met, named the rank that was killed, and named a rank that never came, in how many seconds,
and what rank 0's connections carried.
"""

import ctypes
import fcntl
import json
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
LIMIT_SECONDS = 120.0  # for all ranks to answer
CLONE_NEWNET = 0x40000000  # unshare(2)
SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # netdevice(7)
BYTES_IN_TCP_INFO = 120  # tcpi_bytes_acked and tcpi_bytes_received, see linux/tcp.h
LOST = "gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


def traffic() -> float:
    """Return MB that the open connections of this process carried."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(number))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += sum(struct.unpack_from("QQ", info, BYTES_IN_TCP_INFO))
    return total / 1e6


def live(
    ranks: list[int], size: int, port: int, seconds: float, begin: Any, lose: Any, results: Any
) -> None:
    """Be some ranks of the world: meet, and once ``lose`` is set name the lost one."""
    # Nothing is sent by this process group. With it the ranks count as being in training.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    jobs, stores = dict[int, Job](), list[dist.Store]()

    def in_threads(function: Callable[[int], Any]) -> list[Any]:
        def answer(rank: int) -> Any:
            try:
                return function(rank)
            except Exception as error:
                return str(error)

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(answer, ranks))

    def arrive(rank: int) -> str:
        own = Member(rank, {"model": "convnet"}, f"host{rank // RANKS_PER_HOST}")
        jobs[rank] = Job(meet(Address("127.0.0.1", port), own, size, seconds), seconds)
        stores.append(jobs[rank].rendezvous())  # a connection more
        return "met"

    def name_lost(rank: int) -> list[int]:
        return jobs[rank].explain(RuntimeError(LOST), 87).ranks  # type: ignore[attr-defined]

    begin.wait()
    results.put((in_threads(arrive), traffic() if ranks == [0] else 0.0))
    if ranks == [size - 2]:
        signal.pause()  # the one that gets lost: an event would wait for it
    lose.wait()
    results.put((in_threads(name_lost), traffic() if ranks == [0] else 0.0))
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
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        lost = size - 2
        shared = [rank for rank in range(1, size) if rank != lost]
        groups = [[0], *(shared[part::PROCESSES] for part in range(PROCESSES)), [lost]]
        groups = [group for group in groups if group and group != [absent]]
        begin = context.Barrier(len(groups) + 1)
        self.lose, self.results = context.Event(), context.Queue()
        common = (size, port, seconds, begin, self.lose, self.results)
        self.processes = [
            context.Process(target=live, args=(group, *common), daemon=True) for group in groups
        ]
        for process in self.processes:
            process.start()
        begin.wait()
        self.start = time.monotonic()

    def collect(self, count: int) -> tuple[list[Any], float, float]:
        """Return the answers of ``count`` ranks, the seconds since the start, and rank 0's MB."""
        answers, megabytes, end = list[Any](), 0.0, time.monotonic() + LIMIT_SECONDS
        with suppress(queue.Empty):
            while len(answers) < count:
                more, carried = self.results.get(timeout=max(0, end - time.monotonic()))
                answers, megabytes = answers + more, megabytes + carried
        return answers, time.monotonic() - self.start, megabytes

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def simulate(size: int) -> dict[str, float]:
    """Return what came of a world of ``size`` ranks."""
    world = World(size, LIMIT_SECONDS)
    told, seconds, megabytes = world.collect(size)
    facts = {"met": told.count("met"), "meeting_s": seconds, "meeting_MB": megabytes}
    world.processes[-1].kill()
    world.lose.set()
    told, end, carried = world.collect(size - 1)
    world.end()
    facts |= {"named_lost": told.count([size - 2]), "lost_s": end - seconds}

    wait = 3 * seconds + 10.0
    world = World(size, wait, absent=size - 2)
    told, end, _ = world.collect(size - 1)
    world.end()
    named = sum(f"missing: {size - 2}." in str(answer) for answer in told)
    facts |= {"named_missing": named, "missing_s": end - wait}
    return facts | {"lost_MB": carried - megabytes}


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    leave_network()
    for number in sys.argv[1:]:
        print(json.dumps(simulate(int(number))), flush=True)
