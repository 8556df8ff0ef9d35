"""Files that are written whole or not at all, and a lock between processes."""

import fcntl
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.05
Sleep = Callable[[float], None]  # waits some seconds, or raises
QUIET_SECONDS = 2.0  # of waiting, before a line says for whom


def replace_file(path: Path, content: bytes | memoryview, keep_as: Path | None = None) -> None:
    """Replace a file as a whole, and wait until the disk has it.

    A reader finds the old file or the new one, at every moment and after a crash.

    Args:
        path: the file; its folder is there.
        content: what it is to hold.
        keep_as: another name in the same folder, under which the old file stays.

    Raises:
        OSError: disk full, no permission...; the old file is whole, and nothing new is left.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    # Made anew: a link of this name must not be followed to where it points.
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep_as is not None and path.is_file():
            # A second name, not a move: ``path`` is there at every moment.
            keep_as.unlink(missing_ok=True)
            os.link(path, keep_as)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the folder's names, or a crash could undo the replacement
    finally:
        os.close(folder)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file; a link of its name is not followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o644), "a") as file:
        file.write(f"{line}\n")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file as a whole; a number that is not finite becomes null."""
    replace_file(path, f"{to_json(content, indent=2)}\n".encode())


def to_json(content: dict[str, Any], indent: int | None = None) -> str:
    """Return JSON, in which a number that is not finite is null: it has no other word for it."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in content.items()
    }
    return json.dumps(finite, indent=indent, allow_nan=False)


class Locked(Exception):
    """Another process holds the lock; the message names it."""


class FileLock:
    """An exclusive lock between processes, which the kernel (or the NFS server) frees at their end.

    A record lock of POSIX: loader workers, which are forks, do not inherit it, and so cannot hold
    it longer than the process that they work for. It is lost when this process closes the file.

    Args:
        path: a file that is made for the lock, and stays.
        timeout: seconds to wait for it at most.
        sleep: waits some seconds, or raises where the lock is not waited for any more.
    """

    def __init__(self, path: Path, timeout: float = 0.0, sleep: Sleep = time.sleep) -> None:
        self.path, self.timeout, self.sleep = path, timeout, sleep
        self.descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            Locked: another process has it still.
            OSError: the file cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o666)
        begin, is_told = time.monotonic(), False
        try:
            while True:
                try:
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    waited = time.monotonic() - begin
                    holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                    holder = ascii(holder)[1:-1] or "another process"
                    if waited >= self.timeout:
                        raise Locked(holder) from None
                    if waited >= QUIET_SECONDS and not is_told:
                        is_told = True
                        print(f"waiting for {holder} ({self.path})", file=sys.stderr, flush=True)
                    self.sleep(POLL_SECONDS)
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def __enter__(self) -> "FileLock":
        self.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
