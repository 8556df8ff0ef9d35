"""The run directory: which folder a run gets, and whether this process may write to it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from utils.errors import UsageError
from utils.files import Locked, lock_file
from utils.status import read_status

ROOT = Path("runs")
# With --resume a run may begin in a folder with these files: those of a run, and launchers' logs.
KNOWN = (".*", "args.json", "metrics.jsonl", "events.out.*", "*.log", "*.out", "*.err")


@dataclass(frozen=True)
class RunDir:
    """A run's folder, which the process that opened it keeps locked until it ends.

    Attributes:
        path: the folder.
        resume: whether it holds a run to continue.
        is_complete: whether that run is complete.
        launch_id: the launcher's own name of this job, or None.
    """

    path: Path
    resume: bool
    is_complete: bool
    launch_id: str | None


def open_run(path: str | None, technique: str, resume: bool) -> RunDir:
    """Choose, create and lock the folder of a run. Only one process of a job calls this.

    If the folder carries the launcher's own name of this job, the launcher restarted the job, and
    the run continues without ``--resume``.

    Args:
        path: the folder, or None: a new one below ``runs/``, or with ``resume`` the latest there.
        technique: ``single``, ``dp`` or ``ddp``.
        resume: whether to continue a run.

    Raises:
        UsageError: the folder holds another run, is in use, or cannot be written.
    """
    launch_id = _torchrun_id()
    folder = Path(path) if path else None
    try:
        folder = folder or _find(technique, resume, launch_id) or _make_new(technique)
        folder.mkdir(parents=True, exist_ok=True)
        if resume and not read_status(folder):
            _check_begin(folder)
        lock_file(folder / ".lock")  # never closed: the lock ends with this process
        status = read_status(folder)
    except Locked as holder:
        raise UsageError(f"{folder} is in use by {holder}: take another --run-dir") from None
    except OSError as error:
        where = folder or ROOT
        raise UsageError(f"--run-dir {where} cannot be written ({error.strerror})") from error
    if not status:
        return RunDir(folder, False, False, launch_id)
    state = status["state"]
    if not resume and (launch_id is None or status.get("launch_id") != launch_id):
        # Nobody holds its lock, so a run that says it is running was killed.
        state = "killed" if state == "running" else state
        raise UsageError(
            f"{folder} holds a run ({state}): continue it with --resume, or take another --run-dir"
        )
    return RunDir(folder, True, state == "complete", launch_id)


def _check_begin(folder: Path) -> None:
    """Say that ``--resume`` begins a new run here, and refuse a folder with files of others."""
    for path in folder.rglob("*"):
        if path.is_file() and not any(map(path.match, KNOWN)):
            raise UsageError(
                f"--resume: {folder} holds no run, but {path}: is --run-dir misspelt? Begin a run"
                " in a folder of its own"
            )
    print(f"--resume: {folder} holds no run yet, so this one begins at step 0")


def _torchrun_id() -> str | None:
    """Return torchrun's name of this job, the same after a restart, or None without torchrun.

    If the user gave no name, it is the word "none". Then the agent's process identifies the job,
    since a restart keeps the agent.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id == "none":
        return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}/{os.getppid()}"
    return run_id


def _find(technique: str, resume: bool, launch_id: str | None) -> Path | None:
    """Return the folder of this launcher's run, or with ``resume`` that of the latest run."""
    paths = sorted(ROOT.glob("*/status.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(paths):
        status = read_status(path.parent)
        is_launchers = launch_id is not None and status.get("launch_id") == launch_id
        if status.get("technique") == technique and (resume or is_launchers):
            return path.parent
    if resume:
        raise UsageError(f"--resume: no run of train_{technique}.py below {ROOT}/; pass --run-dir")
    return None


def _make_new(technique: str) -> Path:
    folder = ROOT / f"{technique}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:  # another run of the same second
        return folder.with_name(f"{folder.name}-{os.getpid()}")
    return folder
