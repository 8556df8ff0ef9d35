"""Find the other ranks of a job: a roll call, held by rank 0 before anything else is set up.

Rank 0 listens where everybody looks for it. Each other rank connects, says who it is and keeps the
line open, until rank 0 gives all of them the same answer: the list of ranks, or what is wrong.
Plain sockets: PyTorch's ``TCPStore`` waits for ever when another program accepts the connection and
says nothing, and fills the screen with stack traces when its server goes away.
"""

import errno
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from utils import signals
from utils.config import UsageError

POLL_SECONDS = 0.1
ANSWER_SECONDS = 5.0  # after which whoever accepted a connection is not rank 0
GREETING = "roll call of mnist-data-parallel"
SIOCGIFADDR = 0x8915  # netdevice(7)

Spot = tuple[str, int, str]  # host, port, and the word by which rank 0 there proves itself


class RendezvousError(Exception):
    """The ranks did not find each other, or do not belong together.

    Attributes:
        present: the ranks that know of this error, as far as known, each with its host.
    """

    exit_status = 1

    def __init__(self, message: str, present: list[tuple[int, str]] | None = None) -> None:
        super().__init__(message)
        self.present = present or []


class Stopped(Exception):
    """A stop signal came before there was anything to save."""

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} while waiting for the other ranks")
        self.exit_status = 128 + number


def _cores() -> str:
    """Return the mask of the cores that this process may run on, or nothing (not Linux)."""
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
        local_rank: where the launcher gave one.
        devices: how many GPUs it sees, or 0 where ranks need none of their own.
        patience: seconds that it is still going to wait.
        address: the address from which it reaches rank 0.
        host: tells hosts apart; ``name`` is for people.
        cores: hexadecimal mask of those that it may run on.
    """

    rank: int
    world_size: int
    facts: dict[str, Any] = field(default_factory=dict)
    local_rank: int | None = None
    devices: int = 0
    patience: float = 0.0
    address: str = ""
    host: str = field(default_factory=host_identity)
    name: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    cores: str = field(default_factory=_cores)

    def __str__(self) -> str:
        return f"{self.rank} ({self.name} pid {self.pid})"


class Address:
    """Rank 0 is looked for at an address that everybody was given."""

    is_published = False

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def find(self) -> list[Spot]:
        """Return where rank 0 may be."""
        return [(self.host, self.port, "")]

    def publish(self, spots: list[Spot]) -> None:
        """Make known where rank 0 is."""

    def withdraw(self) -> None:
        """Leave nothing behind: all ranks are there."""

    def hint(self) -> str:
        """Return a likely cause of missing ranks, or nothing."""
        if not _is_foreign(self.host):
            return ""
        return f"{self.host} is not an address of this host: the others look for rank 0 elsewhere. "


class Board(Address):
    """Rank 0 publishes where it is in a store that others keep, perhaps since an earlier attempt.

    Args:
        host: of the store, and
        port: of it, for messages.
        store: a ``torch.distributed.Store``.
    """

    is_published = True
    KEY = "roll_call"

    def __init__(self, host: str, port: int, store: Any) -> None:
        super().__init__(host, port)
        self.store = store

    def find(self) -> list[Spot]:
        return json.loads(self.store.get(self.KEY)) if self.store.check([self.KEY]) else []

    def publish(self, spots: list[Spot]) -> None:
        self.store.set(self.KEY, json.dumps(spots))

    def hint(self) -> str:
        return ""


class File(Address):
    """Rank 0 publishes where it is in a file that all hosts see.

    What an earlier job left there does no harm: nobody answers with its word.
    """

    is_published = True

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return f"file://{self.path}"

    def find(self) -> list[Spot]:
        with suppress(OSError, ValueError, TypeError):
            return [(host, port, word) for host, port, word in json.loads(self.path.read_text())]
        return []

    def publish(self, spots: list[Spot]) -> None:
        try:
            temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
            temporary.write_text(json.dumps(spots))
            os.replace(temporary, self.path)
        except OSError as error:
            raise UsageError(
                f"--init-method {self} cannot be written ({error.strerror})"
            ) from error

    def withdraw(self) -> None:
        self.path.unlink(missing_ok=True)

    def hint(self) -> str:
        return "Do all hosts see the same file? "


def open_roll(place: Address, own: Member, word: str) -> socket.socket:
    """Listen as rank 0 where the others look for it, on every address of this host.

    Raises:
        RendezvousError: the port is taken, or rank 0 is there already.
    """
    try:
        listener = _listen(0 if place.is_published else place.port)
    except OSError as error:
        _challenge(place, own)
        reason = os.strerror(error.errno or 0)
        raise RendezvousError(
            f"rank {own} cannot listen on port {place.port} ({reason}): another program or job has"
            " it; choose another MASTER_PORT, or use torchrun --standalone, which finds a"
            " free one"
        ) from error
    if place.is_published:
        _challenge(place, own)
        hosts = [*sorted(own_addresses().values(), key=_is_loopback), own.name, "127.0.0.1"]
        port = listener.getsockname()[1]
        place.publish([(host, port, word) for host in dict.fromkeys(hosts)])
    return listener


def _listen(port: int) -> socket.socket:
    with suppress(OSError):  # no IPv6 here, or the port is taken, as the next attempt says
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
    return socket.create_server(("", port), backlog=1024)


def _challenge(place: Address, own: Member) -> None:
    """Introduce a second rank 0 to the first, if there is one: it tells all ranks, and us."""
    try:
        answer_roll(place, replace(own, patience=0.5))
    except RendezvousError as error:
        if error.present:
            raise


def call_roll(listener: socket.socket, word: str, own: Member, hint: str = "") -> list[Member]:
    """Wait as rank 0 for all ranks; return them in order. Every other rank calls ``answer_roll``.

    Args:
        listener: stays open.
        word: proves to the others that this is who they look for.
        own: rank 0; its ``patience`` is how long to wait.
        hint: a likely cause, for the message about ranks that are missing.

    Raises:
        RendezvousError: ranks are missing, twice there, or do not belong together.
        Stopped: a stop signal came.
    """
    begin = time.monotonic()
    deadline = begin + own.patience
    members = {0: own}
    lines: dict[socket.socket, bytes] = {}  # with what each has said so far
    callers: dict[socket.socket, int] = {}
    problem = ""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    try:
        while len(members) < own.world_size and not problem:
            _check_signal()
            if time.monotonic() > deadline:
                problem = _describe_missing(members, own, time.monotonic() - begin, hint)
            for key, _ in selector.select(POLL_SECONDS):
                if key.fileobj is listener:
                    line, _ = listener.accept()
                    line.settimeout(ANSWER_SECONDS)
                    selector.register(line, selectors.EVENT_READ)
                    lines[line] = b""
                    _say(line, f"{GREETING} {word}")
                    continue
                line = key.fileobj  # type: ignore[assignment]
                said = b""
                with suppress(OSError):
                    said = line.recv(65_536)
                lines[line] += said
                if not said:  # it left, or was no rank of ours; a restarted one may come again
                    selector.unregister(line)
                    members.pop(callers.pop(line, -1), None)
                    del lines[line]
                    line.close()
                elif said.endswith(b"\n"):
                    with suppress(ValueError, TypeError):  # not a rank of ours
                        member = Member(**json.loads(lines[line]))
                        problem = problem or _find_problem(members, member)
                        if member.host != own.host:  # the address at which another host found us
                            own.address = line.getsockname()[0].removeprefix("::ffff:")
                        callers[line] = member.rank
                        members.setdefault(member.rank, member)
                        deadline = min(deadline, time.monotonic() + member.patience)
        ranks = [members[rank] for rank in sorted(members)]
        # The facts agree, and N ranks would be sent those of N.
        answer = {"problem": problem, "members": [asdict(m) | {"facts": {}} for m in ranks]}
        for line in lines:
            _say(line, json.dumps(answer))
    finally:
        selector.close()
        for line in lines:
            line.close()
    if problem:
        raise RendezvousError(problem, [(member.rank, member.host) for member in ranks])
    return ranks


def answer_roll(place: Address, own: Member) -> tuple[str, int, list[Member]]:
    """Introduce this rank to rank 0; return rank 0's host, its port, and all ranks in order.

    Args:
        place: where rank 0 is looked for, again and again.
        own: this rank; its ``patience`` is how long to wait.

    Raises:
        RendezvousError: what rank 0 says is wrong, or rank 0 is missing.
        Stopped: a stop signal came.
    """
    patience, deadline = own.patience, time.monotonic() + own.patience
    reason = "it has not published its address"
    while time.monotonic() < deadline:
        for host, port, word in place.find():
            try:
                with _connect(host, port, deadline) as line:
                    said = bytearray()
                    silence = min(time.monotonic() + ANSWER_SECONDS, deadline + 1.0)
                    greeting = _read_line(line, said, silence)
                    if greeting != f"{GREETING} {word}":
                        reason = "another program, or a job that has begun, has this port"
                        continue
                    own.address = line.getsockname()[0]
                    own.patience = max(0.0, deadline - time.monotonic())
                    _say(line, json.dumps(asdict(own)))
                    # Rank 0 knows our deadline and tells then who is missing.
                    answer = _read_line(line, said, deadline + 2.0)
                    if answer:
                        return line.getpeername()[0], port, _read_answer(answer)
                    reason = "it left before all ranks were there"
            except OSError as error:
                reason = error.strerror or str(error)
        time.sleep(POLL_SECONDS)
        _check_signal()
    raise RendezvousError(
        f"rank {own} waited {patience:.0f} s for rank 0 at {place}: {reason}. Rank 0 is missing"
        " (of the others nothing is known): was it started, are MASTER_ADDR and MASTER_PORT its"
        " own, and is the port open to this host?"
    )


def _read_answer(text: str) -> list[Member]:
    answer = json.loads(text)
    members = [Member(**member) for member in answer["members"]]
    if answer["problem"]:
        raise RendezvousError(answer["problem"], [(m.rank, m.host) for m in members])
    return members


def _find_problem(members: dict[int, Member], new: Member) -> str:
    """Return why ``new`` cannot join rank 0 and the others, or nothing."""
    main = members[0]
    if new.world_size != main.world_size:
        return (
            f"rank {new} has WORLD_SIZE {new.world_size}, rank {main} has {main.world_size}: use"
            " the same number of nodes, and of processes on each, everywhere"
        )
    if new.rank in members:
        return (
            f"two processes claim rank {new.rank}: {members[new.rank].name} pid"
            f" {members[new.rank].pid} and {new.name} pid {new.pid}: the same node_rank or RANK"
            " was given twice"
        )
    for name, value in json.loads(json.dumps(main.facts)).items():
        if new.facts.get(name) != value:
            return (
                f"rank {new} has {name} {new.facts.get(name)}, rank {main} has {value}: start"
                " every rank with the same command and packages"
            )
    return ""


def _describe_missing(members: dict[int, Member], own: Member, waited: float, hint: str) -> str:
    missing = [rank for rank in range(own.world_size) if rank not in members]
    here = ", ".join(str(members[rank]) for rank in sorted(members))
    return (
        f"after {waited:.0f} s {len(members)} of {own.world_size} ranks are here: {here}; missing:"
        f" {', '.join(map(str, missing))}. {hint}Is WORLD_SIZE (nodes * processes on each) right,"
        " every node started, each with its own node_rank, and this port open to all?"
    )


def _check_signal() -> None:
    if signals.received():
        raise Stopped(signals.received())


def _say(line: socket.socket, text: str) -> None:
    with suppress(OSError):  # it has left: its own matter
        line.sendall(text.encode() + b"\n")


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect from a thread, which can be left behind: a resolver may take a minute to fail."""
    outcome: list[socket.socket | OSError] = []

    def work() -> None:
        try:
            outcome.append(socket.create_connection((host, port), timeout=1.0))
        except OSError as error:
            outcome.append(error)

    threading.Thread(target=work, daemon=True).start()
    while not outcome:
        _check_signal()
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "no answer, or its name cannot be resolved")
        time.sleep(0.01)
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


def _read_line(line: socket.socket, said: bytearray, deadline: float) -> str:
    """Return the next line, or nothing where the other side leaves or is silent until then.

    Args:
        said: what was read beyond the line before; kept up to date.
    """
    line.settimeout(POLL_SECONDS)
    while b"\n" not in said and time.monotonic() < deadline:
        _check_signal()
        with suppress(TimeoutError):
            part = line.recv(65_536)
            if not part:
                break
            said += part
    text, newline, rest = said.partition(b"\n")
    said[:] = rest
    return text.decode(errors="replace") if newline else ""


def own_addresses() -> dict[str, str]:
    """Return this host's IPv4 addresses by interface; none where the system does not tell."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _is_foreign(address: str) -> bool:
    """Tell whether a numeric address is not one of this machine; a name may be anything."""
    with suppress(socket.gaierror):
        info = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        with socket.socket(*info[0][:2]) as probe:
            try:
                probe.bind(info[0][4])
            except OSError as error:
                return error.errno == errno.EADDRNOTAVAIL
    return False
