"""The run directory: who may write to it, and what became of the run."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.errors import UsageError, UserError
from utils.files import FileLock, Locked

ROOT = Path("runs")
STATES = ("running", "stopped", "failed", "complete")
DAMAGED = {"state": "damaged"}
MAX_STATUS_BYTES = 2**20  # a thousand times what it takes


class Complete(UserError):
    """The run that was to be resumed has nothing left to do."""

    exit_status = 0


@dataclass(frozen=True)
class RunDir:
    """A run's folder, which the process that opened it keeps locked until it ends.

    Attributes:
        path: the folder.
        resume: whether it holds a run to continue.
        launch_id: the launcher's own name of this job, or None.
    """

    path: Path
    resume: bool
    launch_id: str | None = None


def open_run(
    path: str | None,
    technique: str,
    resume: bool,
    epochs: float,
    max_steps: int | None,
    launch_id: str | None = None,
) -> RunDir:
    """Choose, make and lock the folder of a run. Called in one process of a job.

    Args:
        path: the folder, or None: a new one below ``runs/``, or with ``resume`` the latest there.
        technique: ``single``, ``dp`` or ``ddp``.
        resume: whether to continue a run.
        epochs: how many are asked for, and
        max_steps: optimizer steps at most, both to see whether anything is left to do.
        launch_id: the launcher's own name of this job, the same after a restart; None for what
            torchrun's variables say.

    A folder that carries the launcher's own name of this job is continued without being asked to:
    the launcher restarted us.

    Raises:
        UsageError: the folder holds another run, or is in use, or cannot be written.
        Complete: nothing is left to do.
    """
    launch_id = launch_id or _torchrun_id()
    if path and not path.isprintable():  # a newline, a zero byte, or no UTF-8
        raise UsageError(f"--run-dir {path!r} cannot be printed: take another name")
    folder = Path(path) if path else None
    try:
        folder = folder or _find(technique, resume, launch_id) or _make_new(technique)
        folder.mkdir(parents=True, exist_ok=True)
        FileLock(folder / ".lock").acquire()  # never released: the kernel does at our end
        status = read_status(folder)
        may_resume = resume or (launch_id is not None and status.get("launch_id") == launch_id)
        if status and may_resume and (folder / "status.json").is_dir():
            # A file can be replaced, whatever it is; a folder has to make room.
            (folder / "status.json").rename(folder / f"status.json.{time.time_ns()}")
    except Locked as holder:
        raise UsageError(f"{folder} is in use by {holder}: take another --run-dir") from None
    except FileExistsError:
        raise UsageError(f"--run-dir {folder} is not a folder: take another") from None
    except OSError as error:
        where = folder or ROOT
        raise UsageError(f"--run-dir {where} cannot be written ({error.strerror})") from error
    if not status:
        return RunDir(folder, False, launch_id)
    state = status["state"]
    if not may_resume:
        # Nobody holds its lock: a run that says it is running was killed.
        state = "killed" if state == "running" else state
        raise UsageError(
            f"{folder} holds a run ({state}): continue it with --resume, or take another --run-dir"
        )
    if state == "damaged":
        print(f"warning: {folder}/status.json is damaged; its checkpoints count", file=sys.stderr)
    enough_epochs = status.get("epoch", 0) >= epochs
    enough_steps = max_steps is not None and status.get("global_step", 0) >= max_steps
    # A fraction of an epoch ends within one, and the steps say nothing of it.
    is_same = (status.get("epochs"), status.get("max_steps")) == (epochs, max_steps)
    if state == "complete" and (enough_epochs or enough_steps or is_same):
        limit = "--max-steps" if enough_steps else "--epochs"
        raise Complete(f"{folder} is complete: nothing to resume (raise {limit} to go on)")
    return RunDir(folder, True, launch_id)


def _torchrun_id() -> str | None:
    """Return torchrun's name of this job, the same after a restart, or None without torchrun.

    It is the word "none" unless one was given; the agent's process then tells jobs apart, since a
    restart keeps the agent.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id == "none":
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}/{os.getppid()}"
    return run_id


def _find(technique: str, resume: bool, launch_id: str | None) -> Path | None:
    """Return this script's latest run, with ``resume``, or that which this launcher started."""
    paths = sorted(ROOT.glob("*/status.json"), key=lambda path: path.lstat().st_mtime)
    for path in reversed(paths):
        status = read_status(path.parent)
        is_launchers = launch_id is not None and status.get("launch_id") == launch_id
        if status.get("technique") == technique and (resume or is_launchers):
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


def read_status(folder: Path) -> dict[str, Any]:
    """Return what ``status.json`` says; nothing where there is no run, and the state ``damaged``
    where there is one, but no file that can be trusted.
    """
    path = folder / "status.json"
    if not path.exists() and not (folder / "checkpoints").exists():
        return {}
    try:
        if not path.is_file():  # opening a FIFO would wait for a writer
            return DAMAGED
        with open(path, "rb") as file:
            status = json.loads(file.read(MAX_STATUS_BYTES))
        counts = [status[key] for key in ("epoch", "global_step")]
        is_sound = status["state"] in STATES and all(
            type(count) is int and count >= 0 for count in counts
        )
        return status if is_sound else DAMAGED
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return DAMAGED
