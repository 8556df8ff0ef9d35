"""The run directory: who may write to it, and what became of the run."""

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.checkpoint import sync_folder, write_durably
from utils.config import UsageError

ROOT = Path("runs")


class Complete(Exception):
    """The run that was to be resumed has nothing left to do."""

    exit_status = 0


@dataclass
class RunDir:
    """A run's folder.

    Attributes:
        path: the folder.
        resume: whether it holds a run to continue.
        lock: file descriptor of the lock, which ends with the process; None in a process that
            does not write.
        launch_id: the launcher's own name of this job, or None.
    """

    path: Path
    resume: bool
    lock: int | None = None
    launch_id: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the lock behind when rank 0 tells the others where the run is."""
        return {**self.__dict__, "lock": None}


def open_run(
    path: str | None,
    technique: str,
    resume: bool,
    epochs: int,
    max_steps: int | None,
) -> RunDir:
    """Choose, make and lock the folder of a run. Called in one process of a job.

    Args:
        path: the folder, or None: a new one below ``runs/``, or with ``resume`` the latest there.
        technique: ``single``, ``dp`` or ``ddp``.
        resume: whether to continue a run.
        epochs: how many are asked for, and
        max_steps: optimizer steps at most, both to see whether anything is left to do.

    A folder that carries the launcher's own name of this job is continued without being asked to:
    the launcher restarted us.

    Raises:
        UsageError: the folder holds another run, or is in use, or cannot be written.
        Complete: nothing is left to do.
    """
    launch_id = _launch_id()
    folder = Path(path) if path else _find(technique, resume, launch_id)
    try:
        if folder is None:
            folder = _make_new(technique)
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except OSError as error:
        where = folder or ROOT
        raise UsageError(f"--run-dir {where} cannot be written ({error.strerror})") from error
    status = read_status(folder)
    if status is None:
        return RunDir(folder, False, lock, launch_id)
    if not resume and (launch_id is None or status.get("launch_id") != launch_id):
        # Nobody holds its lock: a run that says it is running was killed.
        state = "killed" if status["state"] == "running" else status["state"]
        raise UsageError(
            f"{folder} holds a run ({state}): continue it with --resume, or take another --run-dir"
        )
    done = status.get("epoch", 0) >= epochs or status.get("global_step", 0) >= (max_steps or 1e18)
    if status["state"] == "complete" and done:
        limit = "--epochs" if status.get("epoch", 0) >= epochs else "--max-steps"
        raise Complete(f"{folder} is complete: nothing to resume (raise {limit} to go on)")
    return RunDir(folder, True, lock, launch_id)


def _launch_id() -> str | None:
    """Return the launcher's own name of this job, the same after a restart, or None.

    torchrun's id is the word "none" unless one was given; the agent's process then tells jobs
    apart, since a restart keeps the agent.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id == "none":
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}/{os.getppid()}"
    return run_id


def _find(technique: str, resume: bool, launch_id: str | None) -> Path | None:
    """Return the latest run that this launcher started or, with ``resume``, of this script."""
    for path in sorted(ROOT.glob("*/status.json"), key=os.path.getmtime, reverse=True):
        status = read_status(path.parent) or {}
        if launch_id is not None and status.get("launch_id") == launch_id:
            return path.parent
        if resume and status.get("technique") == technique:
            return path.parent
    if resume:
        raise UsageError(f"--resume: no run of train_{technique}.py below {ROOT}/; pass --run-dir")
    return None


def _make_new(technique: str) -> Path:
    name = f"{technique}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        folder = ROOT / f"{name}{suffix}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:  # another run of the same second
            continue
    raise UsageError(f"{ROOT} has a hundred runs of this second; pass --run-dir")


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise UsageError(f"{folder} is in use by {holder}: take another --run-dir") from None
    os.truncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
    return descriptor


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return what ``status.json`` says, or None where there is no run."""
    try:
        status = json.loads((folder / "status.json").read_text())
        return status if isinstance(status, dict) and "state" in status else {"state": "damaged"}
    except FileNotFoundError:
        return None
    except ValueError:
        return {"state": "damaged"}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a JSON file as a whole, durably."""
    temporary = path.with_name(f"{path.name}.tmp")
    write_durably(temporary, (json.dumps(content, indent=2) + "\n").encode())
    os.replace(temporary, path)
    sync_folder(path.parent)
