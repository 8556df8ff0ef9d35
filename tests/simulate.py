"""Let a large world meet on this machine, and name a rank that does not answer or never came.

    python tests/simulate.py 256

Ranks are threads of this process. Stores, messages and connections are those of a job. A line of
JSON says how many ranks met and named that rank, in how many seconds, and what the network carried,
which root has for this alone.
"""

import ctypes
import fcntl
import json
import os
import re
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils.early  # noqa: F401

from utils.cluster.addresses import Address
from utils.cluster.job import Job
from utils.cluster.rendezvous import Peer, Peers, meet

RANKS_PER_HOST = 8
LIMIT_SECONDS = 60.0  # for all ranks to answer
CLONE_NEWNET = 0x40000000  # unshare(2)
SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # netdevice(7)
BROKEN = "gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


def leave_network():
    """Go on in a network of our own, and return whether root may have one here.

    Rank 0's store asks a name server about each connection. One that drops them spoils it all.
    """
    if os.geteuid() or ctypes.CDLL(None).unshare(CLONE_NEWNET):
        return False
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return True


def traffic():
    """Return MB that this network has carried."""
    (line,) = re.findall(r"lo: *(\d+)", Path("/proc/net/dev").read_text())
    return int(line) / 1e6


def in_threads(function, arguments):
    """Return what a function returns or raises for each argument, and the seconds of them all."""

    def call(argument):
        try:
            return function(argument)
        except Exception as error:
            return error

    begin = time.monotonic()
    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(call, arguments)), time.monotonic() - begin


def meet_all(size, ranks, seconds):
    """Let some ranks of a world meet in a store of their own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = Address("127.0.0.1", listener.getsockname()[1])

    def arrive(rank):
        own = Peer(rank, {"model": "convnet"}, f"host{rank // RANKS_PER_HOST}")
        return meet(place, own, size, seconds)

    return in_threads(arrive, ranks)


def simulate(size):
    """Return what came of a world of ``size`` ranks, of which the last but one gets lost."""
    lost = size - 2
    others = [rank for rank in range(size) if rank != lost]
    meetings, seconds = meet_all(size, range(size), LIMIT_SECONDS)
    met = sum(isinstance(peers, Peers) for peers in meetings)
    facts = {"met": met, "meeting_s": seconds, "meeting_MB": traffic()}

    jobs = [Job(meetings[rank], LIMIT_SECONDS) for rank in others]
    group = [job.store.clone() for job in jobs]  # a connection more, for the process group
    told, seconds = in_threads(lambda job: job.explain(RuntimeError(BROKEN)), jobs)
    named = sum(f"lost rank {lost} (" in str(error) for error in told)
    facts |= {"named_lost": named, "lost_s": seconds, "lost_MB": traffic() - facts["meeting_MB"]}
    del group

    patience = 1.0 + size / 50
    told, seconds = meet_all(size, others, patience)
    named = sum(f"missing: {lost}." in str(error) for error in told)
    return facts | {"named_missing": named, "missing_s": seconds - patience}


if __name__ == "__main__":
    own_network = leave_network()
    sys.setswitchinterval(0.1)  # a thousand threads that take turns would do little else
    print(json.dumps(simulate(int(sys.argv[1])) | {"own_network": own_network}), flush=True)
    os._exit(0)  # the jobs' threads wait for ever
