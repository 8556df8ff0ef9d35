"""The state of a run, for people and tools that look later: ``status.json``."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from utils.files import write_json
from utils.progress import Progress


def read_status(folder: Path) -> dict[str, Any]:
    """Return the content of ``status.json``, or nothing if there is no run."""
    path = folder / "status.json"
    if path.exists():
        return json.loads(path.read_bytes())
    return {"state": "unknown"} if (folder / "checkpoints").exists() else {}


class Status:
    """The file ``status.json`` of a run.

    Args:
        folder: the run directory.
        technique: ``single``, ``dp`` or ``ddp``.
        launch_id: the launcher's own name of this job, or None.
        progress: where the run is.
    """

    def __init__(
        self, folder: Path, technique: str, launch_id: str | None, progress: Progress
    ) -> None:
        self.folder, self.technique, self.launch_id = folder, technique, launch_id
        self.progress = progress

    def write(self, state: str, **details: Any) -> None:
        """Replace the file: ``running``, ``stopped``, ``failed`` or ``complete``."""
        status = {
            "state": state,
            **details,
            "technique": self.technique,
            "epoch": self.progress.epoch,
            "global_step": self.progress.global_step,
            "launch_id": self.launch_id,
        }
        if state != "complete":
            status["continue"] = self.continue_command()
        write_json(self.folder / "status.json", status)

    def continue_command(self) -> str:
        """Return the command that continues this run."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--resume", action="store_true")
        parser.add_argument("--run-dir")
        parser.add_argument("--init-weights")
        _, arguments = parser.parse_known_args()  # without flags that are set below
        launcher = "python"
        if self.technique == "ddp" and "TORCHELASTIC_RUN_ID" in os.environ:
            processes = f"--nproc_per_node {os.environ.get('LOCAL_WORLD_SIZE')}"
            nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
            where = "--standalone" if nodes == "1" else f"--nnodes {nodes} ..."
            launcher = f"torchrun {where} {processes}"
        arguments += ["--run-dir", str(self.folder), "--resume"]
        return f"{launcher} {shlex.join([os.path.relpath(sys.argv[0]), *arguments])}"
