"""The ranks of a job meet in a store of rank 0 before anything else is set up.

Rank 0 opens a ``TCPStore`` where all ranks look for it. Each rank claims its seat there, compares
itself with rank 0 alone, and counts itself. The last rank writes that all are there. A rank that
finds a problem writes the problem instead. All ranks wait for this one verdict, so nothing of the
size of the world goes to each rank. The process group then uses the same store. Like every store of
PyTorch it listens on all addresses of the host, without a password.
"""

import json
import os
import resource
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils import signals
from utils.cluster.calls import POLL_SECONDS, call_within
from utils.cluster.places import Address, own_addresses, probe
from utils.errors import UserError

COMPLETE = "complete"
MAX_SHOWN = 8  # ranks that a message lists
LONG = timedelta(hours=1)  # ``meet`` limits the whole wait
OTHER = "another program, or another job, has this port"
# Errors at a port that has no store of this job.
NO_STORE = (OSError, RuntimeError, ValueError, LookupError, TypeError)


class RendezvousError(UserError):
    """The ranks did not find each other, or do not belong together."""


def _host_name() -> str:
    """Return the name of this host, and on Linux a number that sets apart hosts of one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}".strip()


@dataclass
class Member:
    """A rank, as it introduces itself.

    Attributes:
        facts: what has to be the same everywhere, name to value.
        host: its name, and what sets it apart from other hosts of this name.
        address: from which it reached rank 0. Empty for rank 0 itself.
        door: a port that it keeps open as long as it lives, and on which it never answers.
    """

    rank: int
    facts: dict[str, str] = field(default_factory=dict)
    host: str = field(default_factory=_host_name)
    pid: int = field(default_factory=os.getpid)
    address: str = ""
    door: int = 0

    def __str__(self) -> str:
        return f"{self.rank} ({self.host.split()[0]} pid {self.pid})"


@dataclass
class Meeting:
    """All ranks after they have met, as one of them sees them.

    Attributes:
        own: this rank.
        main: rank 0.
        patience: seconds for the store to answer, and for all ranks to read a verdict.
        store: of rank 0.
        mates: the ranks of this host, in order.
        sharing_cores: how many ranks share the cores of this rank, itself included.
        next: where the next rank has its door, or rank 0 for the last one.
        interface: of the network over which the hosts met. Empty if there is one host.
    """

    own: Member
    world_size: int
    main: Member
    patience: float = 4.0
    store: Any = field(default_factory=dist.HashStore)  # in the stubs a store has no append
    mates: list[int] = field(default_factory=lambda: [0])
    sharing_cores: int = 1
    interface: str = ""
    door: socket.socket | None = None
    next: tuple[str, int] = ("", 0)


def read_ranks(store: dist.Store, key: str) -> set[int]:
    """Return the ranks that have appended themselves to a list."""
    return {*map(int, store.get(key).split())} if store.check([key]) else set()


def _read_member(store: dist.Store, rank: int) -> Member:
    return Member(**json.loads(store.get(f"member/{rank}")))


def name(store: dist.Store, ranks: Sequence[int]) -> str:
    """Return the first ranks for a message, with their processes, and the number of the others."""
    are_here = {rank: store.check([f"member/{rank}"]) for rank in ranks[:MAX_SHOWN]}
    first = [str(_read_member(store, r) if is_here else r) for r, is_here in are_here.items()]
    return ", ".join(first) + f" and {len(ranks) - MAX_SHOWN} more" * (len(ranks) > MAX_SHOWN)


def meet(place: Address, own: Member, world_size: int, seconds: float) -> Meeting:
    """Find the other ranks.

    Args:
        place: where this rank looks for rank 0, again and again.
        own: this rank.
        seconds: to wait at most.

    Raises:
        RendezvousError: ranks are missing, exist twice, or do not belong together, or another
            program has the port of rank 0.
        Stopped: a stop signal came.
    """
    # PyTorch looks up the name of every address that it connects to, at both ends. If a name
    # server does not answer, that takes ten seconds. glibc reads this at its first lookup.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    # Rank 0 has three connections of each rank to its store, and the backend's own to each rank.
    needed = 4 * world_size + 128
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # even the hard limit is lower, which the doctor finds
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    meeting = Meeting(own, world_size, own, 4.0 + 0.01 * world_size)
    meeting.door = socket.create_server(("", 0))
    own.door = meeting.door.getsockname()[1]
    deadline = time.monotonic() + seconds
    attend, retried = (_visit, NO_STORE) if own.rank else (_host, (TimeoutError,))
    while True:
        limit = deadline + 4 * meeting.patience - time.monotonic()
        try:
            call_within(limit, attend, meeting, place, deadline, check=signals.check)
            return meeting
        except retried as error:
            if time.monotonic() > deadline:
                reason = getattr(error, "strerror", OTHER) or error
                raise RendezvousError(
                    f"rank {own} waited {seconds:.0f} s for rank 0 at {place}: {reason}. Was it"
                    " started, are MASTER_ADDR and MASTER_PORT its own, and is the port open?"
                ) from error
        signals.sleep(POLL_SECONDS)


def _host(meeting: Meeting, place: Address, deadline: float) -> None:
    """Open the store as rank 0, and wait for all ranks."""
    # Other places publish a port that is free, with a nonce.
    port, nonce = (place.port, "") if type(place) is Address else (0, secrets.token_hex(8))
    try:
        meeting.store = dist.TCPStore("127.0.0.1", port, None, True, LONG, False)
    except RuntimeError as error:
        reason = str(error).rpartition("message: ")[2]
        raise RendezvousError(
            f"rank {meeting.own} cannot listen on port {port} ({reason}): take another MASTER_PORT"
        ) from error
    meeting.store.set(f"nonce/{nonce}", "")
    place.publish(meeting.store.port, nonce)
    _take_seat(meeting, deadline)


def _visit(meeting: Meeting, place: Address, deadline: float) -> None:
    """Look for rank 0 once, and if it is there, meet the others.

    Raises:
        NO_STORE: nothing listens there, rank 0 has left, or the store is of another job.
        RendezvousError: the ranks cannot work together.
    """
    host, port, nonce = place.find()
    # Try a plain connection first. PyTorch would print pages about one that fails.
    ends = probe(host, port)
    # Rank 0 of an earlier attempt may leave at this moment, and PyTorch would keep trying.
    store = call_within(meeting.patience, dist.TCPStore, ends[0], port, None, False, LONG, False)
    if not store.check([f"nonce/{nonce}", "member/0"]):
        raise ValueError("rank 0 has no seat here, or not yet")
    meeting.store, meeting.main = store, _read_member(store, 0)
    _take_seat(meeting, deadline, ends)


def _take_seat(meeting: Meeting, deadline: float, ends: tuple[str, str] = ("", "")) -> None:
    """Claim the seat of this rank, and wait until all are there.

    Args:
        deadline: of the wait.
        ends: rank 0's address, and the address from which this host reached it.
    """
    store, own, main, begin = meeting.store, meeting.own, meeting.main, time.monotonic()
    own.address = ends[1]
    store.add("arrived", 1)
    entry = store.compare_set(f"member/{own.rank}", "", json.dumps(vars(own)))
    problem = _find_problem(main, Member(**json.loads(entry)), own)
    if problem and store.compare_set("verdict", "", problem).decode() == COMPLETE:
        raise ConnectionError(problem)  # the others train, or still end a failed attempt
    if own.host != main.host:
        store.set("main_address", ends[0])
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ""
    seats, cores = f"host/{own.host}", f"cores/{own.host}/{affinity}"
    store.append("seats", f"{own.rank} ")
    store.append(seats, f"{own.rank} ")
    store.add(cores, 1)
    if store.add("seated", 1) == meeting.world_size:
        store.compare_set("verdict", "", COMPLETE)
    try:
        store.wait(["verdict"], timedelta(seconds=max(deadline - begin, POLL_SECONDS)))
    except dist.DistStoreError:
        store.compare_set("verdict", "", _describe_missing(meeting, time.monotonic() - begin))
    verdict = store.get("verdict").decode()
    if verdict == COMPLETE:
        _look_around(meeting, seats, cores, ends)
    error = RendezvousError(verdict)
    error.reported_elsewhere = read_by_all(meeting, "verdict", store.add("arrived", 0))
    if verdict != COMPLETE:
        raise error


def _look_around(meeting: Meeting, seats: str, cores: str, ends: tuple[str, str]) -> None:
    """Note who is on this host, and where the others are, once all have met."""
    store, own = meeting.store, meeting.own
    following = _read_member(store, (own.rank + 1) % meeting.world_size)
    meeting.next = following.address or ends[0], following.door
    meeting.mates, meeting.sharing_cores = sorted(read_ranks(store, seats)), store.add(cores, 0)
    if len(meeting.mates) < meeting.world_size:
        # Gloo itself takes the address of the hostname. On Debian this is often 127.0.1.1, where
        # other hosts cannot reach it.
        used = store.get("main_address").decode() if own.host == meeting.main.host else ends[1]
        meeting.interface = own_addresses().get(used, "")


def _find_problem(main: Member, seated: Member, own: Member) -> str:
    """Return why this rank cannot join rank 0 and the others, or nothing."""
    for fact, value in main.facts.items():
        if own.facts.get(fact) != value:
            return (
                f"rank {own} has {fact} {own.facts.get(fact)}, rank {main} has {value}: start"
                " every rank with the same command and packages, as many on each node"
            )
    if seated == own:
        return ""
    return (
        f"two processes claim the same rank: {seated} and {own}: the same node_rank or RANK was"
        " given twice, or one rank was started again: restart all"
    )


def _describe_missing(meeting: Meeting, waited: float) -> str:
    """Return who is here, who is missing, and what the reason may be."""
    size, here = meeting.world_size, sorted(read_ranks(meeting.store, "seats"))
    missing = sorted({*range(size)} - {*here})
    return (
        f"after {waited:.0f} s {len(here)} of {size} ranks are here: {name(meeting.store, here)};"
        f" missing: {name(meeting.store, missing)}. Is WORLD_SIZE (nodes * processes on each) right"
        ", was every node started with its own node_rank, and is this port open to all?"
    )


def read_by_all(meeting: Meeting, key: str, readers: int, speaks: bool = True) -> bool:
    """Return whether another rank of this host reports what ``key`` says.

    The store ends with rank 0. So rank 0 waits for a while until all ranks have read it.

    Args:
        readers: how many ranks will read it.
        speaks: whether this rank could report it.
    """
    store, own, end = meeting.store, meeting.own, time.monotonic() + 2 * meeting.patience
    is_reported = store.add(f"{key}/{own.host}", int(speaks)) > 1
    store.add(f"{key}/read", 1)
    while own.rank == 0 and store.add(f"{key}/read", 0) < readers and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return is_reported
