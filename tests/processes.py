"""Start the scripts as a user does: in processes of their own, with a time limit."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).parent.parent
# A test inherits no launcher's variables, and none that a user set for this run of test.sh.
LEFT_OUT = re.compile(r"RANK|LOCAL_RANK|WORLD_SIZE|MASTER_.*|TORCHELASTIC_.*|VENV|TORCH_BACKEND")
LIMIT = 180  # seconds for one start: a busy machine needs a minute to import torch
SETTINGS = {
    "OMP_NUM_THREADS": "1",  # tests compare bits
    "PYTHONUNBUFFERED": "1",  # tests read what a program says while it runs
    "MNIST_TEST": str(os.getpid()),  # inherited by everything that a test starts
}


@dataclass
class Finished:
    """A process that ended: its exit status, and what it printed."""

    status: int
    stdout: str
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


def torchrun(processes, *words):
    """Return the command of a standalone torchrun with its other flags, a script and its flags."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc_per_node", processes, *words]


def start(*command, cwd=ROOT, **environment):
    """Start a command in a session of its own."""
    kept = {name: value for name, value in os.environ.items() if not LEFT_OUT.fullmatch(name)}
    # `torchrun` and `python` are those of this environment, whether it is activated or not.
    path = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
    return subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {"PATH": path} | SETTINGS | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_rank(rank, world_size, port, *command, **more):
    """Start one rank on this machine, with the variables of a launcher."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    variables = {name: str(value) for name, value in variables.items()}
    return start(*command, MASTER_ADDR="127.0.0.1", **variables | more)


def finish(process, timeout=LIMIT):
    """Wait for a process. If it is still running after ``timeout`` seconds, the test fails."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill_strays()
        stdout, stderr = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{stdout}\n{stderr}") from None
    return Finished(process.returncode, without_gloo(stdout), stderr)


def without_gloo(output):
    """Leave out what gloo prints in torch 2.9. The line ends of two ranks may follow each other."""
    return re.sub(r"^\[Gloo\] Rank .*\n+", "", output, flags=re.M)


def run(*command, timeout=LIMIT, cwd=ROOT, **environment):
    """Run a command to its end, whatever its exit status."""
    return finish(start(*command, cwd=cwd, **environment), timeout)


def has_succeeded(ended):
    """Return a process that has to have ended with status 0 and without a traceback."""
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text, ended.text
    return ended


def succeed(*command, **more):
    """Run a command that has to succeed."""
    return has_succeeded(run(*command, **more))


def kill_strays():
    """Kill every process that a test has started, and return the command lines of those killed."""
    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended meanwhile, or belongs to somebody else
            if process.environ().get("MNIST_TEST") == SETTINGS["MNIST_TEST"]:
                command = " ".join(process.cmdline())
                process.kill()
                killed.append(command)
    return killed


class Training:
    """Runs of the scripts in one folder, and what they have written there."""

    def __init__(self, data_dir, folder):
        self.data_dir = data_dir
        self.folder = folder

    def arguments(self, technique, *flags):
        """Return the name of a script and its flags."""
        own = ["--data-dir", self.data_dir, "--run-dir", self.folder, "--threads", 1]
        return [f"train_{technique}.py", *map(str, [*own, *flags])]

    def command(self, technique, *flags):
        """Return the command of a script, for ddp with two ranks under a standalone torchrun."""
        arguments = self.arguments(technique, *flags)
        return torchrun(2, *arguments) if technique == "ddp" else [sys.executable, *arguments]

    def start(self, technique, *flags, **environment):
        return start(*self.command(technique, *flags), **environment)

    def run(self, technique, *flags, timeout=LIMIT, **more):
        return finish(self.start(technique, *flags, **more), timeout)

    def succeed(self, technique, *flags, **more):
        return has_succeeded(self.run(technique, *flags, **more))

    def start_rank(self, rank, world_size, port, *flags, **environment):
        """Start one rank, as a launcher would that is not PyTorch's."""
        command = [sys.executable, *self.arguments("ddp", *flags)]
        return start_rank(rank, world_size, port, *command, **environment)

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def rows(self):
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]

    @property
    def checkpoint(self):
        return torch.load(self.folder / "checkpoints" / "last.pt", map_location="cpu")


def wait_until(condition, process=None, seconds=LIMIT):
    """Wait until something has happened. It has to happen before the process ends."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, finish(process).text
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def said_by_ranks(ended):
    """Return the lines of stderr from the script, without those of torchrun and PyTorch's C++."""
    before, _, _ = ended.stderr.partition(
        'Traceback (most recent call last):\n  File "<frozen runpy>'
    )
    logged = re.compile(r"\[?[WEI]\d{4} |Exception raised from|frame #|<omitting|$")
    return [line for line in before.splitlines() if not logged.match(line)]


def error_line(ended):
    """Return the one line in which train_ddp.py says what went wrong, on all ranks together."""
    assert ended.status not in (0, None), ended.text
    [line] = [x for x in ended.stderr.splitlines() if x.startswith("train_ddp.py: error: ")]
    return line


def distance(one, other):
    """Return the largest difference between two state dicts."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def recorded(folder, rank=0, attempt=0):
    """Return what a rank saw in each forward, as tests.user_code writes it into ``folder``."""
    return [json.loads(line) for line in (folder / f"{rank}-{attempt}").open()]
