"""Files that are written whole or not at all, and a lock between processes."""

import fcntl
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils import signals

POLL_SECONDS = 0.05
QUIET_SECONDS = 2.0  # of waiting, before a line names the holder of the lock


def replace_file(path: Path, content: bytes | memoryview, keep_as: Path | None = None) -> None:
    """Replace a file as a whole, and wait until the disk has it.

    A reader finds the old file or the new one, at every moment and after a crash. Where a file
    cannot have two names, there may be a moment with the file under ``keep_as`` only.

    Args:
        path: the file. Its folder exists.
        content: the new content.
        keep_as: another name in the same folder, under which the old file stays.

    Raises:
        OSError: disk full, no permission... The old file is whole, and nothing new is left.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep_as is not None and path.exists():
            keep_as.unlink(missing_ok=True)
            try:
                os.link(path, keep_as)  # a second name, so that ``path`` exists at every moment
            except OSError:  # exFAT, FUSE and others know no second name
                os.replace(path, keep_as)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # of a full disk the system gives no name
        raise
    # The folder's names, or a crash could undo the replacement. The content is on the disk already,
    # and some file systems cannot do this for a folder (vboxsf, old CIFS, 9p).
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file as a whole."""
    replace_file(path, f"{json.dumps(content, indent=2)}\n".encode())


class Locked(Exception):
    """Another process holds the lock. The message names it."""


def lock_file(path: Path, timeout: float = 0.0) -> int:
    """Take an exclusive lock between processes, and return the descriptor whose closing frees it.

    The kernel (or the NFS server) closes it when this process ends. It is a record lock of POSIX.
    Loader workers, which are forks, do not inherit it, so they cannot hold it longer than the
    process that they work for.

    Args:
        path: a file that is created for the lock, and stays.
        timeout: seconds to wait for the lock at most.

    Raises:
        Locked: another process still has it after ``timeout``.
        Stopped: a stop signal came while waiting.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    begin, is_reported = time.monotonic(), False
    while True:
        with suppress(BlockingIOError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return descriptor
        waited = time.monotonic() - begin
        holder = os.pread(descriptor, 200, 0).decode() or "another process"
        if waited >= timeout:
            raise Locked(holder)
        if waited >= QUIET_SECONDS and not is_reported:
            is_reported = True
            print(f"waiting for {holder} ({path})", file=sys.stderr, flush=True)
        signals.sleep(POLL_SECONDS)
