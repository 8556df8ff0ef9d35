"""Functions that several tools use: a parser, an exit status, a run with a time limit."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.errors import UserError, guard
from utils.output import protect
from utils.training import config

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 10.0  # for a process to end after SIGTERM
# With these variables, left in a shell, every run would think that it is a rank of another job.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class TrialError(UserError):
    """A command failed or took too long. The message is one line."""


def build_parser(name: str, description: str | None) -> config.OneLineParser:
    """Return the parser of a tool, without flags."""
    return config.OneLineParser(
        prog=name,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)  # also a process that ends now still has its number
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)


def train(command: Sequence[Any], limit: float) -> dict[str, Any]:
    """Train, and return the summary, or raise a ``TrialError``.

    The training is ended after ``limit`` seconds, and on Ctrl-C.
    """
    environ = {name: v for name, v in os.environ.items() if name not in LAUNCHER_VARIABLES}
    deadline = time.monotonic() + limit
    with (
        tempfile.TemporaryDirectory(prefix="mnist-trial-") as folder,
        tempfile.TemporaryFile("w+") as errors,
    ):
        process = subprocess.Popen(
            [*map(str, command), "--run-dir", f"{folder}/run"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,  # only this process gets Ctrl-C, and it ends the others
        )
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise TrialError(f"still running after {limit:.0f} s")
                time.sleep(0.05)
        finally:
            _end(process)
        if process.returncode:
            errors.seek(0)
            lines = ["no word", *errors.read().split("\n")]
            # Our own messages say "error:". A launcher's report comes after them.
            lines = [line for line in lines if ": error: " in line] or lines[-2:]
            raise TrialError(f"exit status {process.returncode}: {lines[0].strip()}")
        return json.loads(Path(folder, "run", "summary.json").read_text())


def start(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a tool, and return its exit status. SIGTERM ends it as Ctrl-C does, with its results."""
    protect()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return guard(run, args)
