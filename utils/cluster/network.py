"""Addresses and interfaces: where this host listens, and by which way it reaches the others."""

import errno
import fcntl
import socket
import struct
from contextlib import suppress

from utils.cluster.members import MAX_TEXT, Member

SIOCGIFADDR = 0x8915  # netdevice(7)


def listen(port: int) -> socket.socket:
    """Return a socket that listens on a port of all addresses of this host; 0 for a free one.

    Raises:
        OSError: the port is taken.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)


def probe(host: str, port: int) -> tuple[str, str]:
    """Connect and leave; return the other end's address, and that of this host on the way to it.

    Raises:
        OSError: nothing listens there, or there is no such host.
    """
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            ends = connection.getpeername()[0], connection.getsockname()[0]
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host[:MAX_TEXT]!r} is no host name") from error
    return ends[0].removeprefix("::ffff:"), ends[1].removeprefix("::ffff:")


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


def choose_interface(own: Member, members: list[Member]) -> str:
    """Return the interface by which the hosts met, for gloo, or nothing where there is one host.

    Gloo's own choice is where the hostname resolves to: 127.0.1.1 on many a Debian, where the
    other hosts wait in vain.
    """
    if all(member.host == own.host for member in members):
        return ""
    address = members[0].address if own.host == members[0].host else own.address
    names = [name for name, its_address in own_addresses().items() if its_address == address]
    return names[0] if names else ""
