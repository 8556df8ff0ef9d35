"""The rendezvous: all ranks meet in a store of rank 0 before anything else is set up.

Rank 0 opens a ``TCPStore`` where all ranks look for it. Each rank registers there, compares itself
with rank 0 alone, and counts itself. Then all wait at one barrier. The last rank to come opens it.
A rank that finds a problem writes the problem there instead, so nothing of the size of the world
goes to each rank. ``init_process_group`` then uses the same store. Like every store of PyTorch it
listens on all addresses of the machine, without a password.
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
from utils.cluster.addresses import Address, own_addresses, probe
from utils.cluster.calls import POLL_SECONDS, call_within
from utils.errors import UserError

COMPLETE = "complete"  # what stands at the barrier once all ranks are there
MAX_SHOWN = 8  # ranks that a message lists
LONG = timedelta(hours=1)  # ``meet`` limits the whole wait
OTHER = "another program, or another job, has this port"
# Errors at a port that has no store of this job.
NO_STORE = (OSError, RuntimeError, ValueError, LookupError, TypeError)


class RendezvousError(UserError):
    """The ranks did not find each other, or do not belong together."""


def _host_name() -> str:
    """Return the name of this machine, and on Linux a number that tells apart two of one name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}".strip()


@dataclass
class Peer:
    """A rank, as it introduces itself.

    Attributes:
        facts: what has to be the same everywhere, name to value.
        host: the machine's name, and what tells it apart from others of this name.
        address: from which it reached rank 0. Empty for rank 0 itself.
        liveness_port: which it keeps open as long as it lives, and on which it never answers.
    """

    rank: int
    facts: dict[str, str] = field(default_factory=dict)
    host: str = field(default_factory=_host_name)
    pid: int = field(default_factory=os.getpid)
    address: str = ""
    liveness_port: int = 0

    def __str__(self) -> str:
        return f"{self.rank} ({self.host.split()[0]} pid {self.pid})"


@dataclass
class Peers:
    """All ranks after they have met, as one of them sees them.

    Attributes:
        own: this rank.
        main: rank 0.
        store_timeout: seconds for the store to answer, and for all ranks to read a report.
        store: of rank 0.
        address: where this rank reaches the store, a host and a port.
        local_ranks: the ranks of this machine, in order.
        sharing_cores: how many ranks share the cores of this rank, itself included.
        next: the address of the next rank's liveness port, or of rank 0's for the last rank.
        interface: of the network over which the machines met. Empty if there is one machine.
    """

    own: Peer
    world_size: int
    main: Peer
    store_timeout: float = 4.0
    store: Any = field(default_factory=dist.HashStore)  # in the stubs a store has no append
    address: tuple[str, int] = ("", 0)
    local_ranks: list[int] = field(default_factory=lambda: [0])
    sharing_cores: int = 1
    interface: str = ""
    listener: socket.socket | None = None
    next: tuple[str, int] = ("", 0)


def read_ranks(store: dist.Store, key: str) -> set[int]:
    """Return the ranks that have appended themselves to a list."""
    return {*map(int, store.get(key).split())} if store.check([key]) else set()


def _read_peer(store: dist.Store, rank: int) -> Peer:
    return Peer(**json.loads(store.get(f"peer/{rank}")))


def name_ranks(store: dist.Store, ranks: Sequence[int]) -> str:
    """Return the first ranks for a message, with their processes, and the number of the others."""
    names = []
    for rank in ranks[:MAX_SHOWN]:
        is_here = store.check([f"peer/{rank}"])
        names.append(str(_read_peer(store, rank)) if is_here else str(rank))
    more = len(ranks) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def meet(place: Address, own: Peer, world_size: int, seconds: float) -> Peers:
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
    peers = Peers(own, world_size, own, 4.0 + 0.01 * world_size)
    peers.listener = socket.create_server(("", 0))
    own.liveness_port = peers.listener.getsockname()[1]
    deadline = time.monotonic() + seconds
    attend, retried = (_visit, NO_STORE) if own.rank else (_host, (TimeoutError,))
    while True:
        limit = deadline + 4 * peers.store_timeout - time.monotonic()
        try:
            call_within(limit, attend, peers, place, deadline, check=signals.check)
            return peers
        except retried as error:
            if time.monotonic() > deadline:
                reason = getattr(error, "strerror", OTHER) or error
                raise RendezvousError(
                    f"rank {own} waited {seconds:.0f} s for rank 0 at {place}: {reason}. Was it"
                    " started, are MASTER_ADDR and MASTER_PORT its own, and is the port open?"
                ) from error
        signals.sleep(POLL_SECONDS)


def _host(peers: Peers, place: Address, deadline: float) -> None:
    """Open the store as rank 0, and wait for all ranks."""
    port, nonce = place.port, ""
    if place.is_published:
        port, nonce = 0, secrets.token_hex(8)  # any port that is free
    try:
        # For several tenants, since ``init_process_group`` opens a store on the same port.
        peers.store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=LONG,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("message: ")[2]
        raise RendezvousError(
            f"rank {peers.own} cannot listen on port {port} ({reason}): take another MASTER_PORT"
        ) from error
    peers.address = "127.0.0.1", peers.store.port
    peers.store.set(f"nonce/{nonce}", "")
    place.publish(peers.store.port, nonce)
    _register(peers, deadline)


def _visit(peers: Peers, place: Address, deadline: float) -> None:
    """Look for rank 0 once, and if it is there, meet the others.

    Raises:
        NO_STORE: nothing listens there, rank 0 has left, or the store is of another job.
        RendezvousError: the ranks cannot work together.
    """
    host, port, nonce = place.find()
    # Try a plain connection first. PyTorch would print pages about one that fails.
    main_address, peers.own.address = probe(host, port)

    def connect() -> dist.TCPStore:
        return dist.TCPStore(main_address, port, timeout=LONG, wait_for_workers=False)

    # Rank 0 of an earlier attempt may leave at this moment, and PyTorch would keep trying.
    store = call_within(peers.store_timeout, connect)
    if not store.check([f"nonce/{nonce}", "peer/0"]):
        raise ValueError("rank 0 is not registered here, or not yet")
    peers.store, peers.main, peers.address = store, _read_peer(store, 0), (main_address, port)
    _register(peers, deadline)


def _register(peers: Peers, deadline: float) -> None:
    """Claim this rank, and wait at the barrier until all are there, until ``deadline`` at most."""
    store, own, main, begin = peers.store, peers.own, peers.main, time.monotonic()
    store.add("arrived", 1)
    entry = store.compare_set(f"peer/{own.rank}", "", json.dumps(vars(own)))
    problem = _find_problem(main, Peer(**json.loads(entry)), own)
    if problem and store.compare_set("barrier", "", problem).decode() == COMPLETE:
        raise ConnectionError(problem)  # the others train, or still end a failed attempt
    if own.host != main.host:
        store.set("main_address", peers.address[0])
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ""
    local, cores = f"host/{own.host}", f"cores/{own.host}/{affinity}"
    store.append("registered", f"{own.rank} ")
    store.append(local, f"{own.rank} ")
    store.add(cores, 1)
    if store.add("count", 1) == peers.world_size:
        store.compare_set("barrier", "", COMPLETE)
    try:
        store.wait(["barrier"], timedelta(seconds=max(deadline - begin, POLL_SECONDS)))
    except dist.DistStoreError:
        store.compare_set("barrier", "", _describe_missing(peers, time.monotonic() - begin))
    outcome = store.get("barrier").decode()
    if outcome == COMPLETE:
        peers.local_ranks = sorted(read_ranks(store, local))
        peers.sharing_cores = store.add(cores, 0)
        _find_next(peers)
    is_reported = read_by_all(peers, "barrier", store.add("arrived", 0))
    if outcome != COMPLETE:
        error = RendezvousError(outcome)
        error.reported_elsewhere = is_reported
        raise error


def _find_next(peers: Peers) -> None:
    """Note where the next rank is, and over which network the machines have met."""
    store, own = peers.store, peers.own
    following = _read_peer(store, (own.rank + 1) % peers.world_size)
    peers.next = following.address or peers.address[0], following.liveness_port
    if len(peers.local_ranks) < peers.world_size:
        # Gloo itself takes the address of the hostname. On Debian this is often 127.0.1.1, where
        # other machines cannot reach it.
        used = own.address
        if own.host == peers.main.host:
            used = store.get("main_address").decode()
        peers.interface = own_addresses().get(used, "")


def _find_problem(main: Peer, registered: Peer, own: Peer) -> str:
    """Return why this rank cannot join rank 0 and the others, or nothing."""
    for fact, value in main.facts.items():
        if own.facts.get(fact) != value:
            return (
                f"rank {own} has {fact} {own.facts.get(fact)}, rank {main} has {value}: start"
                " every rank with the same command and packages, as many on each machine"
            )
    if registered == own:
        return ""
    return (
        f"two processes claim the same rank: {registered} and {own}: the same --node_rank or RANK"
        " was given twice, or one rank was started again: restart all"
    )


def _describe_missing(peers: Peers, waited: float) -> str:
    """Return who is here, who is missing, and what the reason may be."""
    store, size = peers.store, peers.world_size
    here = sorted(read_ranks(store, "registered"))
    missing = sorted({*range(size)} - {*here})
    return (
        f"after {waited:.0f} s {len(here)} of {size} ranks are here: {name_ranks(store, here)};"
        f" missing: {name_ranks(store, missing)}. Is WORLD_SIZE (machines * processes on each)"
        " right, was each machine started with its own --node_rank, and is this port open to all?"
    )


def read_by_all(peers: Peers, key: str, readers: int, speaks: bool = True) -> bool:
    """Return whether another rank of this machine reports what ``key`` says.

    The store ends with rank 0. So rank 0 waits for a while until all ranks have read it.

    Args:
        readers: how many ranks will read it.
        speaks: whether this rank could report it.
    """
    store, own = peers.store, peers.own
    end = time.monotonic() + 2 * peers.store_timeout
    is_reported = store.add(f"{key}/{own.host}", int(speaks)) > 1
    store.add(f"{key}/read", 1)
    while own.rank == 0 and store.add(f"{key}/read", 0) < readers and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return is_reported
