"""Start the scripts as a user does: real processes, with a time limit."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# How a process of ours is known, whatever started it; inherited by all that it starts.
MARK = f"MNIST_TEST_SESSION={os.getpid()}"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Finished:
    """A process that ended: its exit status, what it printed, and how long it took."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


def environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without a launcher's variables, marked as a test's."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    name, value = MARK.split("=")
    # One thread: tests compare bits, and two libraries spinning on two cores crawl.
    return kept | {name: value, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | extra


def start(*command: Any, cwd: Path | None = None, **extra: str) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd or ROOT,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float, since: float | None = None) -> Finished:
    """Wait for a process; one that is still there after ``timeout`` seconds is a failure."""
    begin = time.monotonic() if since is None else since
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        for pid, _ in stray_processes():
            os.kill(pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{stdout}\n{stderr}") from None
    return Finished(process.returncode, stdout, stderr, time.monotonic() - begin)


def run(*command: Any, timeout: float = 90, cwd: Path | None = None, **extra: str) -> Finished:
    """Run a command to its end."""
    return finish(start(*command, cwd=cwd, **extra), timeout)


def script(name: str, *args: Any) -> list[Any]:
    """Return the command of a training script, quiet and with one thread."""
    return [sys.executable, ROOT / name, "--threads", 1, "--no-progress", *args]


def torchrun(processes: int, name: str, *args: Any) -> list[Any]:
    """Return the command of a training script under a standalone torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    return [sys.executable, *launcher, *script(name, *args)[1:]]


def summary(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "summary.json").read_text())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def stray_processes(wait: float = 5.0) -> list[tuple[int, str]]:
    """Return (pid, command) of marked processes that are still there after ``wait`` seconds."""
    deadline = time.monotonic() + wait
    while True:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if MARK.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if command:  # a zombie has none
                        found.append((int(folder.name), command))
            except OSError:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
