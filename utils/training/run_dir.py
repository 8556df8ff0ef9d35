"""The run directory: which folder a run gets, who may write to it, and its ``status.json``."""

import argparse
import json
import os
import shlex
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils import distributed
from utils.errors import NOT_SAVED, UsageError
from utils.files import Locked, lock_file, write_json
from utils.training.config import OF_ONE_HOST
from utils.training.progress import Progress

ROOT = Path("runs")
# With --resume a run may begin in a folder with these files: those of a run, and launchers' logs.
KNOWN = (".*", "args.json", "status.json", "*.jsonl", "events.out.*", "*.log", "*.out", "*.err")


def identify_launch(technique: str) -> dict[str, Any]:
    """Return what tells a restart by the launcher from a new job. Collective.

    Returns:
        The technique; the launcher's name of the job, which a person may type again for another
        job; a number of the torchrun of each host, which chooses a new folder for its logs whenever
        it is started, and keeps it when it starts the ranks again. Without torchrun it is 0.
    """
    logs = os.environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/attempt_")[0]
    agents = {*distributed.gather(zlib.crc32(logs.encode()))}
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return {"technique": technique, "launch_id": name, "agents": [*agents]}


def _goes_on(folder: Path, launch: dict[str, Any], flags: dict[str, Any]) -> bool:
    """Return whether a job may continue a run unasked, because it is the same job.

    torchrun stops an elastic job to let another host join, so the same torchrun continues a stopped
    run too. A new one with the same name continues only what was killed or failed.
    """
    status = read_status(folder)
    is_named = status.get("launch_id") == launch["launch_id"] != "none"
    is_restart = is_named and status["state"] in ("running", "failed")
    is_same = {*launch["agents"]} & {*status.get("agents", ())} - {0}
    is_ours = status.get("technique") == launch["technique"] and (is_restart or is_same)
    return bool(is_ours) and _read(folder / "args.json") == flags


def open_run(
    path: str | None, resume: bool, launch: dict[str, Any], flags: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Choose, create and lock the folder of a run. Only one process of a job calls this.

    Args:
        path: the folder, or None: a new one below ``runs/``, or with ``resume`` the latest there.
        resume: whether to continue a run.
        launch: of this job. If its launcher has started it again, it continues its run unasked.
        flags: all flags of this command.

    Returns:
        The folder, which this process keeps locked until it ends, and flags and status of the run
        to continue, or nothing if a run begins.

    Raises:
        UsageError: the folder holds another run, is in use, or cannot be written.
    """
    try:
        folder = Path(path) if path else _find(resume, launch, flags)
        folder.mkdir(parents=True, exist_ok=True)
        has_run = "technique" in read_status(folder) or (folder / "checkpoints").exists()
        if resume and not has_run:
            _check_begin(folder)
        lock_file(folder / ".lock")  # never closed: the lock ends with this process
        status = read_status(folder)
    except Locked as holder:
        raise UsageError(f"{folder} is in use by {holder}: take another --run-dir") from None
    except OSError as error:
        where = path or ROOT
        raise UsageError(f"--run-dir {where} cannot be written ({error.strerror})") from error
    if status and not resume:
        # Nobody holds its lock, so a run that says it is running was killed.
        state = "killed" if status["state"] == "running" else status["state"]
        if not _goes_on(folder, launch, flags):
            raise UsageError(
                f"{folder} holds a run ({state}): continue it with --resume, or take another"
                " --run-dir"
            )
        print(
            f"{folder} ({state}) goes on at step {status['global_step']}, since this job began it"
            " with the same flags: to start over, take another --run-dir",
            flush=True,
        )
    return folder, status and _read(folder / "args.json") | status


def _check_begin(folder: Path) -> None:
    """Say that ``--resume`` begins a new run here, and refuse a folder with files of others."""
    for path in folder.rglob("*"):
        if path.is_file() and not any(map(path.match, KNOWN)):
            raise UsageError(
                f"--resume: {folder} holds no run, but {path}: is --run-dir misspelt? Begin a run"
                " in a folder of its own"
            )
    print(f"--resume: {folder} holds no run yet, so this one begins at step 0")


def _find(resume: bool, launch: dict[str, Any], flags: dict[str, Any]) -> Path:
    """Return the folder of this job's run, with ``resume`` that of the latest run, or a new one."""
    technique = launch["technique"]
    found = ROOT.glob("*/status.json")
    paths = [path for path in found if path.stat().st_uid == os.getuid()]  # not another user's
    paths.sort(key=lambda path: path.stat().st_mtime)
    for folder in (path.parent for path in reversed(paths)):
        is_latest = resume and read_status(folder).get("technique") == technique
        if is_latest or _goes_on(folder, launch, flags):
            return folder
    if resume:
        raise UsageError(f"--resume: no {technique} run of yours below {ROOT}/; pass --run-dir")
    new = ROOT / f"{technique}-{time.strftime('%Y%m%d-%H%M%S')}"
    with suppress(FileExistsError):
        new.mkdir(parents=True)
        return new
    return new.with_name(f"{new.name}-{os.getpid()}")  # another run began in the same second


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or nothing if it is no object or cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return dict(json.loads(path.read_bytes()))
    return {}


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of ``status.json``, or nothing if there is no run.

    A file that is empty or foreign belongs to a run of which nothing else is known.
    """
    path = folder / "status.json"
    is_run = path.exists() or (folder / "checkpoints").exists()
    return {"state": "unknown"} | _read(path) if is_run else {}


def compare(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return what a person should know who resumes: what is other than before.

    Args:
        before: as ``open_run`` returns it.
        now: the flags of this command, and what ``Status`` records of it.
    """
    own = {"init_weights", "agents", "launch_id", *OF_ONE_HOST.split()}  # of a command or a host
    changed = {k: v for k, v in now.items() if k not in own and before.get(k, v) != v}
    notes = [f"{k.replace('_', '-')} {v}, was {before[k]}" for k, v in changed.items()]
    if NOT_SAVED in before.get("reason", ""):
        notes.append("it has diverged: if the loss stays high, put previous.pt in place of last.pt")
    return "; ".join(notes)


class Status:
    """The file ``status.json`` of a run, which rank 0 alone writes.

    Args:
        folder: the run directory.
        record: what stays the same: the launch, as ``identify_launch`` knows it, and the batch.
        progress: where the run is.
    """

    def __init__(self, folder: Path, record: dict[str, Any], progress: Progress) -> None:
        self.folder, self.record, self.progress = folder, record, progress

    def saved(self) -> None:
        """Write where the run is, and that this is saved. A run that is killed continues there."""
        self.position = {"epoch": self.progress.epoch, "global_step": self.progress.global_step}
        self.write("running")

    def write(self, state: str, **details: Any) -> None:
        """Replace the file: ``running``, ``stopped``, ``failed`` or ``complete``."""
        status = {"state": state, **details, **self.record, **self.position}
        if state != "complete":
            status["continue"] = self.how_to_continue()
        if distributed.rank() == 0:
            write_json(self.folder / "status.json", status)

    def how_to_continue(self) -> str:
        """Return the command that continues this run, or words where only its launcher knows it."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--resume", action="store_true")
        parser.add_argument("--run-dir")
        parser.add_argument("--init-weights")
        _, arguments = parser.parse_known_args()  # without flags that are set below
        command = [os.path.relpath(sys.argv[0]), *arguments]
        command += ["--run-dir", str(self.folder), "--resume"]
        ranks = os.environ.get("WORLD_SIZE", "1") if self.record["technique"] == "ddp" else "1"
        launcher = "python" if ranks == "1" or "--nprocs" in shlex.join(arguments) else ""
        if "TORCHELASTIC_RUN_ID" in os.environ:
            launcher = f"torchrun --standalone --nproc_per_node {ranks}"
        if not launcher or ranks not in ("1", os.environ.get("LOCAL_WORLD_SIZE")):
            return f"the same launch as before, with --run-dir {self.folder} --resume"
        return f"{launcher} {shlex.join(command)}"
