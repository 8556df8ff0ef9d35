"""The folder of a run, its files, and locks."""

import argparse
import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from utils.errors import UsageError


def write_json(path: Path, *rows: dict[str, Any], indent: int | None = None) -> None:
    """Replace a file by the rows, as a whole: a reader sees the old content or the new one."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text("".join(f"{json.dumps(row, indent=indent)}\n" for row in rows))
    temporary.replace(path)


def lock_file(path: Path, wait: bool) -> int:
    """Create a file, and lock it until its descriptor is closed or this process ends.

    The lock is a record lock of POSIX. Loader workers, which are forked, do not inherit it. So the
    lock ends with this process, even if a worker lives longer. On a file system without locks this
    prints a warning.

    Returns:
        The descriptor of the file.

    Raises:
        BlockingIOError: another process has the lock, and ``wait`` is false.
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        print(f"warning: {path} cannot be locked ({error.strerror}), going on", file=sys.stderr)
    return descriptor


def open_run_dir(args: argparse.Namespace) -> Path:
    """Create, or find, the folder of a run, and lock it. Only one process of a job calls this.

    If torchrun may start the ranks again after a failure (``--max_restarts``), a run that the
    folder holds is resumed, as with ``--resume``.

    Raises:
        UsageError: the folder holds another run, or is in use.
        OSError: the folder cannot be written.
    """
    new = Path("runs", f"{args.technique}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    folder = Path(args.run_dir or new)
    has_run = (folder / "checkpoints").exists()
    may_restart = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if has_run and not (args.resume or may_restart):
        raise UsageError(
            f"{folder} holds a run: continue it with --resume, or pass another --run-dir"
        )
    if args.resume and not has_run:
        text = f"warning: --resume: {folder} holds no checkpoint yet, so the run begins at step 0"
        print(text, file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock_file(folder / ".lock", wait=False)
    except BlockingIOError:
        raise UsageError(f"{folder} is in use by another run: pass another --run-dir") from None
    return folder
