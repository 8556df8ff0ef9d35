"""Where to find rank 0: at a given address, or where rank 0 publishes one."""

import fcntl
import json
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch.distributed as dist

AGENT_TIMEOUT = timedelta(seconds=5)  # for torchrun's store, which is there before the ranks
SIOCGIFADDR = 0x8915  # netdevice(7)


class Address:
    """All ranks were given the address of rank 0.

    Args:
        port: on which rank 0 listens. With 0, if it is alone, it takes one that is free.
        source: the variable that gave the address, for messages.
    """

    is_published = False  # whether rank 0 tells the others where it is

    def __init__(self, host: str, port: int, source: str = "") -> None:
        self.host, self.port, self.source = host, port, source

    def __str__(self) -> str:
        where = f"{self.host}:{self.port}"
        return f"{where} (from {self.source})" if self.source else where

    def find(self) -> Any:
        """Return where rank 0 may be: a host, a port, and the nonce of the store there, if any.

        Raises:
            OSError, RuntimeError, ValueError: rank 0 has not published it yet.
        """
        return self.host, self.port, ""

    def publish(self, port: int, nonce: str) -> None:
        """Write for all ranks on which port rank 0, which is this process, listens."""


class AgentStore(Address):
    """Rank 0 publishes its port in the store that torchrun's agent keeps on the same machine.

    Ranks of the attempt before have left an address there, which must not count any more
    (pytorch/pytorch#135712). It has another nonce than the store of this attempt.
    """

    KEY = "where_rank_0_is"
    is_published = True

    @cached_property
    def store(self) -> dist.Store:
        return dist.TCPStore(self.host, self.port, timeout=AGENT_TIMEOUT, wait_for_workers=False)

    def find(self) -> Any:
        if not self.store.check([self.KEY]):
            raise OSError("it has not published its address")
        return json.loads(self.store.get(self.KEY))

    def publish(self, port: int, nonce: str) -> None:
        self.store.set(self.KEY, json.dumps([self.host, port, nonce]))


def probe(host: str, port: int) -> tuple[str, str]:
    """Connect and disconnect. Return the other end's address, and this one's on the way to it.

    Raises:
        OSError: nothing listens there, or there is no such machine.
    """
    with socket.create_connection((host, port), timeout=1.0) as connection:
        ends = connection.getpeername()[0], connection.getsockname()[0]
    return ends[0].removeprefix("::ffff:"), ends[1].removeprefix("::ffff:")


def own_addresses() -> dict[str, str]:
    """Return the name of the interface of each IPv4 address of this machine."""
    interfaces = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                interfaces[socket.inet_ntoa(answer[20:24])] = name
    return interfaces
