"""Who a rank is, as it introduces itself, and what keeps it from joining the others."""

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

MAX_TEXT = 255  # characters of each text that a rank tells
MAX_NUMBER = 2**31
MAX_SHOWN = 8  # ranks that a message lists


def _cores() -> str:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return f"{sum(1 << core for core in cores):x}"


def host_identity() -> str:
    """Return what tells this host, or container, from others that may have the same name."""
    parts = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


@dataclass
class Member:
    """A rank, as it introduces itself.

    Attributes:
        facts: what has to be the same everywhere, name to value.
        local_rank: -1 where the launcher gives none.
        gpus: UUIDs of the GPUs that it may use, one of which it needs for itself; "" for one whose
            UUID is not known.
        wait_seconds: that it is still going to wait.
        address: the one from which it reaches rank 0, and
        main_address: the one at which it found rank 0.
        host: tells hosts apart; the first word is the name.
        cores: those that it may run on, as a mask; ranks with the same mask share them.
    """

    rank: int
    world_size: int
    facts: dict[str, str] = field(default_factory=dict)
    local_rank: int = -1
    gpus: list[str] = field(default_factory=list)
    wait_seconds: float = 0.0
    address: str = ""
    main_address: str = ""
    host: str = field(default_factory=host_identity)
    pid: int = field(default_factory=os.getpid)
    cores: str = field(default_factory=_cores)

    @property
    def process(self) -> str:
        return f"{self.host.partition(' ')[0]} pid {self.pid}"

    def __str__(self) -> str:
        return f"{self.rank} ({self.process})"


KINDS = {name: type(value) for name, value in vars(Member(0, 1)).items()}


def parse_member(content: Any) -> Member:
    """Return what another process says about itself, once each part of it has been checked.

    Raises:
        ValueError: no rank says such a thing.
    """
    if not isinstance(content, dict) or {k: type(v) for k, v in content.items()} != KINDS:
        raise ValueError("no member")
    member = Member(**content)
    texts = [*member.facts, *member.facts.values(), *member.gpus]
    texts += [member.host, member.cores, member.address, member.main_address]
    if not (
        all(isinstance(text, str) and text.isprintable() for text in texts)
        and all(len(text) <= MAX_TEXT for text in texts)
        and 0 <= member.rank < member.world_size <= MAX_NUMBER
        and -1 <= member.local_rank <= MAX_NUMBER
        and 0 < member.pid <= MAX_NUMBER
        and 0 <= member.wait_seconds <= MAX_NUMBER
    ):
        raise ValueError("no member")
    return member


def find_problem(members: dict[int, Member], new: Member) -> str:
    """Return why ``new`` cannot join rank 0 and the others, or nothing."""
    main, seated = members[0], members.get(new.rank)
    if new.world_size != main.world_size:
        return (
            f"rank {new} has WORLD_SIZE {new.world_size}, rank {main} has {main.world_size}: use"
            " the same number of nodes, and of processes on each, everywhere"
        )
    if seated and seated.process != new.process:
        return describe_doubled(seated, new)
    for name, value in main.facts.items():
        if new.facts.get(name) != value:
            return (
                f"rank {new} has {name} {new.facts.get(name)}, rank {main} has {value}: start"
                " every rank with the same command and packages"
            )
    return ""


def describe_doubled(first: Member, second: Member) -> str:
    """Return what to say where two processes claim one rank."""
    return (
        f"two processes claim rank {first.rank}: {first.process} and {second.process}: the same"
        " node_rank or RANK was given twice, or one rank was started again: restart all"
    )


def describe_missing(members: dict[int, Member], world_size: int, waited: float) -> str:
    """Return who is here, who is missing, and what the reason may be."""
    here = [members[rank] for rank in sorted(members)]
    missing = (rank for rank in range(world_size) if rank not in members)
    return (
        f"after {waited:.0f} s {len(here)} of {world_size} ranks are here:"
        f" {shorten(here, len(here))}; missing: {shorten(missing, world_size - len(here))}. Is"
        " WORLD_SIZE (nodes * processes on each) right, MASTER_ADDR rank 0's own address, every"
        " node started, each with its own node_rank, and this port open to all?"
    )


def shorten(items: Iterable[object], count: int) -> str:
    """Return the first of ``count`` items for a message, and how many there are besides."""
    more = f" and {count - MAX_SHOWN} more" if count > MAX_SHOWN else ""
    return ", ".join(map(str, islice(items, MAX_SHOWN))) + more
