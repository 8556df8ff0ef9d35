"""Open more connections to rank 0's store than it has descriptors, and tell what becomes of it.

unshare --net python tests/flood.py python train_ddp.py --rank 0 --world-size 2 --init-method URL

In a network namespace of its own: beside it other jobs of the same host now and then failed to
connect their ranks. Prints exit status, seconds since the flood began and stderr, as JSON.
"""

import fcntl
import json
import resource
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from urllib.parse import urlsplit

DESCRIPTORS, CONNECTIONS = 256, 400
SIOCSIFFLAGS, IFF_UP = 0x8914, 1  # netdevice(7)


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def main() -> None:
    command = sys.argv[1:]
    url = urlsplit(command[command.index("--init-method") + 1])
    address = url.hostname or "", url.port or 0
    with socket.socket() as probe, suppress(OSError):  # without a namespace of our own it is up
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=limit
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(address).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    begin, flood = time.monotonic(), []
    for _ in range(CONNECTIONS):
        with suppress(OSError):
            flood.append(socket.create_connection(address, timeout=1))
    assert len(flood) > DESCRIPTORS
    _, errors = process.communicate(timeout=40)
    seconds = time.monotonic() - begin
    json.dump({"returncode": process.returncode, "seconds": seconds, "stderr": errors}, sys.stdout)


if __name__ == "__main__":
    main()
