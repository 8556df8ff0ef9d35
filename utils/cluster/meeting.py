"""The ranks of a job meet in a store of rank 0 before anything else is set up.

Rank 0 hosts a ``TCPStore`` where everybody looks for it. Each rank claims its seat there, compares
itself with rank 0 alone, and counts itself. The last one to come writes that all are there. Whoever
finds something wrong writes that. All wait for this one key, so nothing of the size of the world
goes to each rank. The process group then uses the same store. Like every store of PyTorch it
listens on all addresses of the host and asks nobody for a password.
"""

import json
import os
import resource
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from utils import signals
from utils.cluster.calls import POLL_SECONDS, call_within
from utils.cluster.places import Address, own_addresses, probe
from utils.errors import UsageError, UserError

VERDICT_SECONDS, RANK_SECONDS = 2.0, 0.01  # for a verdict, and more of it for each rank
COMPLETE = "complete"
MAX_SHOWN = 8  # ranks that a message lists
# Rank 0 has three connections of each rank to its store, and the backend's own to each rank. Each
# rank has the backend's alone.
HOST_DESCRIPTORS, RANK_DESCRIPTORS, OTHER_DESCRIPTORS = 4, 1, 128
# Whoever calls bounds the whole wait.
LONG = timedelta(hours=1)
OTHER = "another program, or another job, has this port"
# What happens at a port where no store of this job is.
NO_STORE = (OSError, RuntimeError, ValueError, LookupError, TypeError)


class RendezvousError(UserError):
    """The ranks did not find each other, or do not belong together."""


def host_identity() -> str:
    """Return what distinguishes this host, or container, from others of the same name."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def _cores() -> str:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return f"{sum(1 << core for core in cores):x}"


@dataclass
class Member:
    """A rank, as it introduces itself.

    Attributes:
        facts: what has to be the same everywhere, name to value.
        host: distinguishes hosts; the first word is the name.
        cores: those that it may run on, as a mask; ranks with the same mask share them.
        nonce: of rank 0's store.
    """

    rank: int
    facts: dict[str, str] = field(default_factory=dict)
    host: str = field(default_factory=host_identity)
    pid: int = field(default_factory=os.getpid)
    cores: str = field(default_factory=_cores)
    nonce: str = ""

    @property
    def process(self) -> str:
        return f"{self.host.partition(' ')[0]} pid {self.pid}"

    def __str__(self) -> str:
        return f"{self.rank} ({self.process})"


@dataclass
class Meeting:
    """All ranks, which have met, as one of them sees them.

    Attributes:
        own: this rank.
        main: rank 0.
        store: of rank 0.
        mates: the ranks of this host, in order.
        sharing_cores: how many ranks run on the cores of this one, itself included.
        interface: by which the hosts met; nothing where there is one host.
    """

    own: Member
    world_size: int
    main: Member
    store: Any = field(default_factory=dist.HashStore)  # in the stubs a store has no append
    mates: list[int] = field(default_factory=lambda: [0])
    sharing_cores: int = 1
    interface: str = ""

    @property
    def verdict_seconds(self) -> float:
        """Seconds for a verdict to arrive, and to be read by all."""
        return VERDICT_SECONDS + RANK_SECONDS * self.world_size

    def name(self, ranks: list[int]) -> str:
        """Return the names of the first ranks, and how many there are besides."""
        first = [_read_member(self.store, rank) for rank in ranks[:MAX_SHOWN]]
        return _shorten(first, len(ranks))


def _read_member(store: dist.Store, rank: int) -> Member:
    return Member(**json.loads(store.get(f"member/{rank}")))


def _shorten(items: Iterable[object], count: int) -> str:
    """Return the first of ``count`` items for a message, and how many there are besides."""
    more = f" and {count - MAX_SHOWN} more" if count > MAX_SHOWN else ""
    return ", ".join(map(str, islice(items, MAX_SHOWN))) + more


def meet(place: Address, own: Member, world_size: int, seconds: float) -> Meeting:
    """Find the other ranks.

    Args:
        place: where rank 0 is looked for, again and again.
        own: this rank.
        seconds: to wait at most.

    Raises:
        RendezvousError: ranks are missing, twice there, or do not belong together, or the port of
            rank 0 is taken.
        UsageError: the place cannot be written, or there are too few descriptors.
        Stopped: a stop signal came.
    """
    # PyTorch looks up the name of every address that it connects to, at both ends, and one name
    # server that does not answer takes ten seconds. glibc reads this at its first lookup.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    _raise_descriptor_limit(own.rank, world_size)
    meeting = Meeting(own, world_size, own)
    own.facts = {"WORLD_SIZE": str(world_size)} | own.facts
    limit, function = seconds + 2 * meeting.verdict_seconds, _join if own.rank else _host
    try:
        call_within(limit, function, meeting, place, seconds, check=signals.check)
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {own} got no answer at {place} in {seconds:.0f} s: its name cannot be resolved,"
            f" its host is stopped, or {OTHER}"
        ) from error
    return meeting


def _raise_descriptor_limit(rank: int, world_size: int) -> None:
    each = RANK_DESCRIPTORS if rank else HOST_DESCRIPTORS
    needed = each * world_size + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < needed:  # -1 is no limit
        raise UsageError(
            f"rank {rank} may open {hard} files and needs {needed} for {world_size} ranks: raise"
            " the hard limit (ulimit -Hn, a service's LimitNOFILE=, a container's --ulimit)"
        )
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _host(meeting: Meeting, place: Address, seconds: float) -> None:
    """Wait as rank 0 for all ranks."""
    deadline, own = time.monotonic() + seconds, meeting.own
    port, own.nonce = 0 if place.is_published else place.port, secrets.token_hex(8)
    if place.is_published:
        _challenge(meeting, place)
    try:
        meeting.store = dist.TCPStore("127.0.0.1", port, None, True, LONG, False)
        meeting.main = own  # and no rank 0 of another job, met on the way
    except RuntimeError as error:
        _challenge(meeting, place)
        reason = str(error).rpartition("message: ")[2]
        raise RendezvousError(
            f"rank {own} cannot listen on port {port} ({reason}): another program or job has it;"
            " choose another MASTER_PORT, or torchrun --standalone"
        ) from error
    place.publish(meeting.store.port, own.nonce)
    try:
        _take_seat(meeting, deadline)
    finally:
        place.withdraw()


def _challenge(meeting: Meeting, place: Address) -> None:
    """Introduce a second rank 0 to the first, if there is one: all ranks get to know."""
    with suppress(*NO_STORE):
        for spot in place.find():
            _visit(meeting, 0.0, *spot)


def _join(meeting: Meeting, place: Address, seconds: float) -> None:
    """Look for rank 0 until it is there."""
    deadline = time.monotonic() + seconds
    while True:
        reason, spots = "it has not published its address", []
        with suppress(*NO_STORE):
            spots = place.find()
        for spot in spots:
            try:
                return _visit(meeting, deadline, *spot)
            except OSError as error:
                reason = error.strerror or str(error)
            except NO_STORE:
                reason = OTHER
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"rank {meeting.own} waited {seconds:.0f} s for rank 0 at {place}: {reason}. Rank 0"
                " is missing (of the others nothing is known): was it started, are MASTER_ADDR and"
                " MASTER_PORT its own, and is the port open to this host?"
            )
        time.sleep(POLL_SECONDS)


def _visit(meeting: Meeting, deadline: float, host: str, port: int, nonce: str) -> None:
    """Join rank 0 at one spot.

    Raises:
        NO_STORE: nothing listens there, rank 0 has left, or it is no store of this job.
        RendezvousError: something is wrong.
    """
    # By a plain connection first: PyTorch tries one in vain at great length.
    ends = probe(host, port)
    # Rank 0 of an attempt before may leave at this moment, and PyTorch goes on trying.
    where = (ends[0], port, None, False, LONG, False)
    meeting.store = call_within(2 * VERDICT_SECONDS, dist.TCPStore, *where)
    if not meeting.store.check(["member/0"]):
        raise ValueError("rank 0 has no seat here, or not yet")
    meeting.main = _read_member(meeting.store, 0)
    if nonce not in ("", meeting.main.nonce):
        raise ValueError("another job")
    try:
        _take_seat(meeting, deadline, *ends)
    except dist.DistError as error:
        raise ConnectionError("it left before all ranks were there") from error


def _take_seat(
    meeting: Meeting, deadline: float, main_address: str = "", address: str = ""
) -> None:
    """Claim the seat of this rank, and wait until all are there.

    Args:
        deadline: after which it says who is missing.
        main_address: of rank 0, as this host reached it from
        address.
    """
    store, own, main = meeting.store, meeting.own, meeting.main
    store.add("guests", 1)
    seated = Member(
        **json.loads(store.compare_set(f"member/{own.rank}", "", json.dumps(vars(own))))
    )
    if problem := _find_problem(main, seated, own):
        verdict = store.compare_set("verdict", "", problem).decode()
        # In a job that has begun it is the problem of this rank alone.
        _fail(meeting, problem if verdict == COMPLETE else verdict)
    if own.host != main.host:
        store.set("main_address", main_address)
    store.append("seats", f"{own.rank} ")
    store.append(f"host/{own.host}", f"{own.rank}:{own.cores} ")
    if store.add("seated", 1) == meeting.world_size:
        store.compare_set("verdict", "", COMPLETE)
    begin = time.monotonic()
    try:
        store.wait(["verdict"], timedelta(seconds=max(deadline - begin, POLL_SECONDS)))
    except dist.DistStoreError:
        if store.add("judges", 1) > 1:  # another rank finds out for all
            with suppress(dist.DistStoreError):
                store.wait(["verdict"], timedelta(seconds=meeting.verdict_seconds))
        if not store.check(["verdict"]):
            store.compare_set("verdict", "", _describe_missing(meeting, time.monotonic() - begin))
    verdict = store.get("verdict").decode()
    if verdict != COMPLETE:
        _fail(meeting, verdict)
    pairs = [pair.split(":") for pair in store.get(f"host/{own.host}").decode().split()]
    meeting.mates = sorted(int(rank) for rank, _ in pairs)
    meeting.sharing_cores = sum(cores == own.cores for _, cores in pairs)
    if len(pairs) < meeting.world_size:
        # Gloo's own choice is where the hostname resolves to: 127.0.1.1 on many a Debian, where the
        # other hosts wait in vain.
        used = store.get("main_address").decode() if own.host == main.host else address
        meeting.interface = own_addresses().get(used, "")


def _find_problem(main: Member, seated: Member, own: Member) -> str:
    """Return why this rank cannot join rank 0 and the others, or nothing."""
    for name, value in main.facts.items():
        if own.facts.get(name) != value:
            return (
                f"rank {own} has {name} {own.facts.get(name)}, rank {main} has {value}: start"
                " every rank with the same command and packages, as many on each node"
            )
    if seated.process != own.process:
        return (
            f"two processes claim rank {own.rank}: {seated.process} and {own.process}: the same"
            " node_rank or RANK was given twice, or one rank was started again: restart all"
        )
    return ""


def _describe_missing(meeting: Meeting, waited: float) -> str:
    """Return who is here, who is missing, and what the reason may be."""
    size = meeting.world_size
    here = sorted({int(rank) for rank in meeting.store.get("seats").decode().split()})
    missing = _shorten((rank for rank in range(size) if rank not in here), size - len(here))
    return (
        f"after {waited:.0f} s {len(here)} of {size} ranks are here: {meeting.name(here)}; missing:"
        f" {missing}. Is WORLD_SIZE (nodes * processes on each) right, MASTER_ADDR rank 0's own"
        " address, every node started, each with its own node_rank, and this port open to all?"
    )


def _fail(meeting: Meeting, text: str) -> NoReturn:
    """Raise the error that all ranks get; one rank of each host prints it."""
    store, error = meeting.store, RendezvousError(text)
    error.reported_elsewhere = store.add(f"told/{meeting.own.host}", 1) > 1
    store.add("read", 1)
    end = time.monotonic() + meeting.verdict_seconds
    # The store ends with rank 0, and all have to read the verdict first.
    while meeting.main is meeting.own and time.monotonic() < end:
        if store.add("read", 0) >= store.add("guests", 0):
            break
        time.sleep(POLL_SECONDS / 5)
    raise error
