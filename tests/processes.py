"""Start the scripts as a user does: in processes of their own, with a time limit."""

import contextlib
import functools
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server

ROOT = Path(__file__).parent.parent
# How a process of ours is known, whatever started it; inherited by all that it starts.
MARK = f"MNIST_TEST_SESSION={os.getpid()}"
# One thread: tests compare bits. Threads that wait for others soon go to sleep: tests share cores.
# A name server that drops one of many questions holds nobody up for five seconds.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "1000",
    "RES_OPTIONS": "timeout:1 attempts:2",
}
# What conftest.py sets as the options of pytest say.
use_fork_server, may_start = True, True
# The GPUs that a user lets us see; a test that is not marked ``gpu`` is about CPUs, and sees none.
# Kept for the workers of pytest-xdist, which are started with what is set here.
GPUS = os.environ.setdefault("MNIST_TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
show_gpus = False
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


@functools.cache
def count_gpus() -> int:
    """Ask another process, since this one is to see none."""
    if not shutil.which("nvidia-smi"):
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, env=visible(), capture_output=True, text=True).stdout or 0)


def visible() -> dict[str, str]:
    """Return this process's environment with the user's GPUs."""
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return kept if GPUS == "all" else kept | {"CUDA_VISIBLE_DEVICES": GPUS}


def environment(**extra: str) -> dict[str, str]:
    """Return the environment for a process that a test starts.

    It is this process's without a launcher's variables, and marked. A Python of ours that is
    started with it, by whatever means, is forked where that makes no difference, see
    tests/fork_server.py; in a test marked ``real`` it is a new process in any case.
    """
    if not may_start:
        pytest.skip("starts processes: --fast leaves it out")
    whole = visible() if show_gpus else os.environ
    kept = {k: v for k, v in whole.items() if k not in LAUNCHER_VARIABLES}
    # `torchrun` and `python3` are those of this environment, activated or not.
    path = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
    unmarked = kept | SETTINGS | {"PATH": path, "PYTHONUNBUFFERED": "1"}
    if use_fork_server:
        fork_server.install(unmarked)
    name, value = MARK.split("=")
    return unmarked | {name: value} | extra


def start(
    *command: Any, cwd: Path | None = None, real: bool = False, **extra: str
) -> subprocess.Popen[str]:
    """Start a command in a session of its own; with ``real`` it is not forked."""
    variables = environment(**extra)
    with fork_server.real_processes() if real else contextlib.nullcontext():
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd or ROOT,
            env=variables,
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


def run(
    *command: Any, timeout: float = 90, cwd: Path | None = None, real: bool = False, **extra: str
) -> Finished:
    """Run a command to its end."""
    return finish(start(*command, cwd=cwd, real=real, **extra), timeout)


def script(name: str, *args: Any) -> list[Any]:
    """Return the command of a training script, quiet and with one thread."""
    return [sys.executable, ROOT / name, "--threads", 1, "--no-progress", *args]


def shell_line(line: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """Return the words and the variables that a shell would make of a line.

    Without the shell, and with this Python in the place of ``python`` and ``torchrun``: these can
    be forked.
    """
    words = shlex.split(string.Template(line).substitute(variables))
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    programs = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    if words[0] in programs:
        words[:1] = [sys.executable, *programs[words[0]]]
    return words, variables


def torchrun(processes: int, name: str, *args: Any) -> list[Any]:
    """Return the command of a training script under a standalone torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    return [sys.executable, *launcher, *script(name, *args)[1:]]


# Below the ports that the kernel gives to who asks for any (net.ipv4.ip_local_port_range), so that
# nobody takes one between its choice and its use. Another run of tests begins elsewhere.
_ports = itertools.count(os.getpid() * 199)


def free_port() -> int:
    """Return a port of this host that nothing listens on, another one with every call."""
    while True:
        port = 12_000 + next(_ports) % 20_000
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


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
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    if command:  # a zombie has none
                        found.append((int(folder.name), command.decode(errors="replace")))
            except OSError:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
