"""Where rank 0 is looked for: at an address, or where it publishes one."""

import json
import signal
import socket
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from utils.cluster.calls import call_within
from utils.cluster.network import own_addresses
from utils.errors import UsageError
from utils.files import replace_file
from utils.signals import Stopped

AGENT_SECONDS = 5.0  # for torchrun's store to answer; it is there before the ranks are
MAX_BYTES = 65_536  # of what a rank publishes, or says about itself


class Spot(NamedTuple):
    """Where rank 0 may be, and what its store must hold there to be the one looked for."""

    host: str
    port: int
    nonce: str


class Address:
    """Rank 0 is looked for at an address that everybody was given."""

    is_published = False

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def find(self) -> list[Spot]:
        """Return where rank 0 may be; nothing as long as it has not said so."""
        return [Spot(self.host, self.port, "")]

    def publish(self, port: int, nonce: str) -> None:
        """Make known on which port rank 0, which is this process, listens."""

    def withdraw(self) -> None:
        """Leave nothing behind: all ranks are there."""

    def publish_stop(self) -> None:
        """Tell the others of a SIGUSR1 that this rank got, where they can be told.

        The other stop signals torchrun sends to all itself, before it starts them again.
        """

    def check_stop(self) -> None:
        """Raise ``Stopped`` if another rank has told of a SIGUSR1."""


class AgentStore(Address):
    """Rank 0 publishes its port in the store that torchrun's agent keeps on the same host.

    What the ranks of the attempt before left there must not be taken for this one's
    (pytorch/pytorch#135712): a store of each attempt's own, with a nonce, takes care of that.
    """

    is_published = True
    KEY, STOP_KEY = "where_rank_0_is", "stopped_by_SIGUSR1"

    @cached_property
    def store(self) -> dist.Store:
        timeout = timedelta(seconds=AGENT_SECONDS)
        return dist.TCPStore(self.host, self.port, None, False, timeout, wait_for_workers=False)

    def find(self) -> list[Spot]:
        self.check_stop()
        return _parse_spots(self.store.get(self.KEY)) if self.store.check([self.KEY]) else []

    def publish(self, port: int, nonce: str) -> None:
        self.store.set(self.KEY, json.dumps([Spot(self.host, port, nonce)]))

    def publish_stop(self) -> None:
        with suppress(OSError, RuntimeError):
            call_within(AGENT_SECONDS, lambda: self.store.set(self.STOP_KEY, ""))

    def check_stop(self) -> None:
        stopped = False
        with suppress(OSError, RuntimeError):  # it does not answer, as others will notice
            stopped = self.store.check([self.STOP_KEY])
        if stopped:
            raise Stopped(signal.SIGUSR1)


class File(Address):
    """Rank 0 publishes its addresses in a file that all hosts see.

    What an earlier job left there does no harm: no store has its nonce.
    """

    is_published = True

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return f"file://{self.path}"

    def find(self) -> list[Spot]:
        # Not from a pipe, which would never end.
        return _parse_spots(self.path.read_bytes()) if self.path.is_file() else []

    def publish(self, port: int, nonce: str) -> None:
        # Loopback last: others on this host alone can use it.
        addresses = sorted(own_addresses().values(), key=lambda ip: ip.startswith("127."))
        spots = [Spot(host, port, nonce) for host in (*addresses, socket.gethostname())]
        try:
            if self.path.exists() and not self.path.is_file():
                raise OSError(0, "it is no file")
            replace_file(self.path, json.dumps(spots).encode())
        except OSError as error:
            raise UsageError(
                f"--init-method {self} cannot be written ({error.strerror})"
            ) from error

    def withdraw(self) -> None:
        with suppress(OSError):
            self.path.unlink()


def _parse_spots(text: bytes) -> list[Spot]:
    """Return what was published, which another program may have written; nothing if so."""
    try:
        spots = [Spot(*parts) for parts in json.loads(text[:MAX_BYTES])]
    except (ValueError, TypeError, RecursionError):
        return []
    return [spot for spot in spots if [type(part) for part in spot] == [str, int, str]]
