"""Find the other ranks of a job: they meet in a store of rank 0 before anything else is set up.

Rank 0 hosts a ``TCPStore`` where everybody looks for it. Each other rank puts in who it is, and
rank 0 writes its verdict for all: the list of ranks, or what is wrong. The process group then uses
the same store. Like every store of PyTorch it listens on all addresses of the host and asks nobody
for a password: whoever reaches the port can disturb the job, though only with what passes the
checks here.
"""

import json
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from utils import signals
from utils.cluster.calls import POLL_SECONDS, call_within
from utils.cluster.members import (
    Member,
    describe_doubled,
    describe_missing,
    find_problem,
    parse_member,
)
from utils.cluster.network import listen, probe
from utils.cluster.places import MAX_BYTES, Address, Spot
from utils.errors import UserError, printable

VERDICT_SECONDS = 2.0  # for the verdict of rank 0 to arrive, and to be read by all
# Whoever calls bounds the whole wait; a store's own limit ends with a page of C++ frames.
LONG = timedelta(hours=1)
OTHER = "another program, or a job that has begun, has this port"

Meeting = tuple[dist.Store, list[Member]]  # rank 0's store, and all ranks in order


class RendezvousError(UserError):
    """The ranks did not find each other, or do not belong together.

    Attributes:
        present: the ranks that know of this error, as far as known.
    """

    def __init__(self, message: str, present: Sequence[Member] = ()) -> None:
        super().__init__(message)
        self.present = present


def meet(place: Address, own: Member) -> Meeting:
    """Find the other ranks; return rank 0's store, and all of them in order.

    Args:
        place: where rank 0 is looked for, again and again.
        own: this rank; its ``wait_seconds`` is how long to wait.

    Raises:
        RendezvousError: ranks are missing, twice there, or do not belong together, or the port of
            rank 0 is taken.
        UsageError: the place cannot be written.
        Stopped: a stop signal came.
    """
    if own.rank == 0:
        return _host(place, own)
    seconds = own.wait_seconds
    try:
        return call_within(seconds + VERDICT_SECONDS, _join, place, own, check=signals.check)
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {own} got no answer at {place} in {seconds:.0f} s: its name cannot be resolved,"
            f" its host is stopped, or {OTHER}"
        ) from error


def _host(place: Address, own: Member) -> Meeting:
    """Wait as rank 0 for all ranks."""
    if place.is_published:
        _challenge(place, own)
    try:
        listener = listen(0 if place.is_published else place.port)
    except OSError as error:
        _challenge(place, own)
        raise RendezvousError(
            f"rank {own} cannot listen on port {place.port} ({os.strerror(error.errno or 0)}):"
            " another program or job has it; choose another MASTER_PORT, or torchrun --standalone"
        ) from error
    port, nonce = listener.getsockname()[1], secrets.token_hex(8)
    store = dist.TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    store.set("nonce", nonce)  # proves to the others that this is the store that they look for
    place.publish(port, nonce)
    try:
        return store, _call_roll(store, own, place)
    finally:
        place.withdraw()


def _challenge(place: Address, own: Member) -> None:
    """Introduce a second rank 0 to the first, if there is one: it tells all ranks, and us."""
    with suppress(OSError):  # there is none, or it does not answer
        call_within(VERDICT_SECONDS, _visit, place, replace(own, wait_seconds=VERDICT_SECONDS))


def _call_roll(store: dist.Store, own: Member, place: Address) -> list[Member]:
    """Take in claims until all ranks are there or something is wrong; give all the verdict."""
    begin = time.monotonic()
    deadline = begin + own.wait_seconds
    members, problem, claims = {0: own}, "", 0
    while len(members) < own.world_size and not problem:
        signals.check()
        place.check_stop()
        if time.monotonic() > deadline:
            problem = describe_missing(members, own.world_size, time.monotonic() - begin)
            break
        if store.queue_len("claims") == 0:
            time.sleep(POLL_SECONDS / 2)
            continue
        try:
            claim = store.queue_pop("claims", False)
            new = parse_member(json.loads(claim[:MAX_BYTES]))
        except (ValueError, RecursionError):
            continue  # no rank of ours
        claims += 1
        problem = find_problem(members, new)
        if new.host != own.host:  # the address at which another host found us
            own.address = new.main_address
        members[new.rank] = new
        deadline = min(deadline, time.monotonic() + new.wait_seconds)
    # The facts agree, and N ranks would be sent those of N.
    told = [asdict(members[rank]) | {"facts": {}} for rank in sorted(members)]
    verdict = json.dumps({"problem": problem, "members": told})
    store.set("verdict", verdict)
    # The store ends, or stalls, with this process: all are to read the verdict first.
    end = time.monotonic() + VERDICT_SECONDS
    while store.queue_len("verdict_read") < claims and time.monotonic() < end:
        time.sleep(POLL_SECONDS / 10)
    return _parse_verdict(verdict)


def _parse_verdict(text: str | bytes) -> list[Member]:
    """Return the members that rank 0 names, or raise the error that it tells.

    Raises:
        ValueError: no verdict of rank 0.
    """
    try:
        verdict = json.loads(text)
        members = [parse_member(member) for member in verdict["members"]]
        problem = printable(verdict["problem"])
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError("no verdict") from error
    if problem:
        raise RendezvousError(problem, members)
    return members


def _join(place: Address, own: Member) -> Meeting:
    """Introduce this rank to rank 0, as soon as it is there."""
    seconds, deadline = own.wait_seconds, time.monotonic() + own.wait_seconds
    while True:
        try:
            return _visit(place, own)
        except ConnectionError as error:
            reason = str(error)
        own.wait_seconds = deadline - time.monotonic()
        if own.wait_seconds < 0:
            raise RendezvousError(
                f"rank {own} waited {seconds:.0f} s for rank 0 at {place}: {reason}. Rank 0 is"
                " missing (of the others nothing is known): was it started, are MASTER_ADDR and"
                " MASTER_PORT its own, and is the port open to this host?"
            )
        time.sleep(POLL_SECONDS)


def _visit(place: Address, own: Member) -> Meeting:
    """Look once for rank 0, and if it is there wait for its verdict.

    Raises:
        ConnectionError: it is not there; the message says why.
        RendezvousError: what rank 0 says is wrong.
    """
    reason = "it has not published its address"
    try:
        spots = place.find()
    except (OSError, RuntimeError) as error:
        raise ConnectionError("the place does not answer") from error
    for spot in spots:
        try:
            return _claim_seat(spot, own)
        except OSError as error:
            reason = error.strerror or str(error)
        except (RuntimeError, ValueError):
            reason = OTHER
    raise ConnectionError(reason)


def _claim_seat(spot: Spot, own: Member) -> Meeting:
    """Put in who this rank is, and wait for the verdict.

    Raises:
        OSError: nothing listens there, or rank 0 has left.
        RuntimeError: no store.
        ValueError: the store of another job, or of one that has begun.
    """
    # By a plain connection first: PyTorch tries one in vain at great length.
    own.main_address, own.address = probe(spot.host, spot.port)
    connect = partial(dist.TCPStore, timeout=LONG, wait_for_workers=False)
    # Rank 0 of an attempt before may leave at this moment, and PyTorch goes on trying.
    store = call_within(2 * VERDICT_SECONDS, connect, own.main_address, spot.port)
    nonce = store.get("nonce").decode() if store.check(["nonce"]) else ""
    if store.check(["verdict"]) or spot.nonce not in ("", nonce):
        raise ValueError("another job, or one that has begun")
    store.queue_push("claims", json.dumps(asdict(own)))
    try:
        verdict = store.get("verdict")
    except RuntimeError as error:
        reason = "it left before all ranks were there, or stopped answering"
        raise ConnectionError(reason) from error
    store.queue_push("verdict_read", "")
    members = _parse_verdict(verdict)
    if [member.rank for member in members] != list(range(own.world_size)):
        raise ValueError("not of this world")
    if members[own.rank].process != own.process:
        raise RendezvousError(describe_doubled(members[own.rank], own))
    return store, members
