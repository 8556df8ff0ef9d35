"""Start the scripts as a user does: in processes of their own, with a time limit."""

import contextlib
import functools
import itertools
import json
import multiprocessing
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

from tests import fork_server

ROOT = Path(__file__).parent.parent
ALTERED = ROOT / "tests" / "altered.py"
# How a process of ours is known, whatever started it; inherited by all that it starts.
MARK = {fork_server.MARK: str(os.getpid())}
SETTINGS = {
    "OMP_NUM_THREADS": "1",  # tests compare bits
    "GOMP_SPINCOUNT": "1000",  # tests share cores: a thread that waits soon goes to sleep
    "RES_OPTIONS": "timeout:1 attempts:2",  # a name server that drops a question holds up nobody
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # as the scripts set it, and before torch is in the fork server
    "PYTHONUNBUFFERED": "1",  # a test reads what a program says while it runs
}
# The GPUs that a user lets us see; a test that is not marked ``gpu`` is about CPUs, and sees none.
# Kept for the workers of pytest-xdist, which are started with what is set here.
GPUS = os.environ.setdefault("MNIST_TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
show_gpus = False
# A library that stands for CUDA on a machine without a GPU. It counts, but it runs no kernels.
PRETENDED = "libpretend" in os.environ.get("LD_PRELOAD", "")
STANDALONE = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
# Variables that a process of a test does not inherit: a launcher's, and what a user set for this
# run of scripts/test.sh.
LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LEFT_OUT += ("VENV", "TORCH_BACKEND")


@dataclass
class Finished:
    """A process that ended: its exit status, and what it printed."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def text(self):
        return self.stdout + self.stderr


@functools.cache
def count_gpus():
    """Ask torch in another process, since this one is to see none."""
    # Without a driver of NVIDIA, AMD or WSL the seconds of importing torch are saved.
    drivers = [Path("/dev") / name for name in ("nvidiactl", "kfd", "dxg")]
    if not shutil.which("nvidia-smi") and not any(path.exists() for path in drivers):
        return 0
    # device_count() asks NVML, which also counts GPUs that a driver too old cannot use.
    code = "from torch import cuda; print(cuda.device_count() if cuda.is_available() else 0)"
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, env=visible(), capture_output=True, text=True).stdout or 0)


def visible():
    """Return this process's environment with the user's GPUs."""
    kept = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return kept if GPUS == "all" else kept | {"CUDA_VISIBLE_DEVICES": GPUS}


def environment(**extra):
    """Return the environment for a process: this one's, marked, without a launcher's variables."""
    whole = visible() if show_gpus else os.environ
    kept = {k: v for k, v in whole.items() if k not in LEFT_OUT}
    # `torchrun` and `python3` are those of this environment, activated or not.
    path = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
    return kept | SETTINGS | {"PATH": path} | MARK | extra


@functools.cache
def server():
    """Return a fork server, and what is early in its environment."""
    kept = {k: v for k, v in environment().items() if k not in MARK}
    return fork_server.start_server(kept), fork_server.early(kept)


def start(*command, cwd=None, real=False, **extra):
    """Start a command in a session of its own. Our Python programs are forks, see fork_server.py.

    Args:
        real: start a process of its own in any case.
    """
    command, folder, variables = [str(part) for part in command], cwd or ROOT, environment(**extra)
    # A driver may not be used in a process and in its fork; nothing stands against a pretended one.
    if not (real or (show_gpus and not PRETENDED)) and fork_server.script_of(command):
        forks, early = server()
        assert fork_server.early(variables) == early, "read before a script begins: real=True"
        return fork_server.PipedFork(forks, command, folder, variables)
    return subprocess.Popen(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=90):
    """Wait for a process; one that is still there after ``timeout`` seconds is a failure."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        for pid, _ in stray_processes():
            os.kill(pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{stdout}\n{stderr}") from None
    return Finished(process.returncode, stdout, stderr)


def run(*command, timeout=90, cwd=None, real=False, **extra):
    """Run a command to its end."""
    return finish(start(*command, cwd=cwd, real=real, **extra), timeout)


def succeed(ended):
    assert ended.returncode == 0, ended.text
    assert "Traceback" not in ended.text
    return ended


def error_line(ended, status=2):
    """Return the one line of stderr with which a process has to have ended."""
    assert ended.returncode == status, ended.text
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    return ended.stderr


def error_lines(ended):
    return [line for line in ended.text.splitlines() if ".py: error: " in line]


def script(name, *args):
    """Return the command of a training script, quiet and with one thread."""
    return [sys.executable, ROOT / name, "--threads", 1, "--no-progress", *args]


def torchrun(processes, name, *args):
    """Return the command of a training script under a standalone torchrun."""
    return [*STANDALONE, processes, *script(name, *args)[1:]]


def copy_project(folder, data_dir=None):
    """Copy the project without its tests, and return the folder."""
    leave = shutil.ignore_patterns(".*", "runs", "data", "__pycache__", "tests")
    shutil.copytree(ROOT, folder, ignore=leave, dirs_exist_ok=True)
    if data_dir:
        (folder / "data").symlink_to(data_dir)
    return folder


def shell_line(line, **variables):
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


# Below the ports that the kernel gives to who asks for any (net.ipv4.ip_local_port_range), so that
# nobody takes one between its choice and its use. Another run of tests begins elsewhere.
_ports = itertools.count(os.getpid() * 199)


def free_port():
    """Return a port of this host that nothing listens on, another one with every call."""
    while True:
        port = 12_000 + next(_ports) % 20_000
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def status(run_dir):
    return json.loads((run_dir / "status.json").read_text())


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def wait_for_port(port, process):
    def is_there():
        assert process.poll() is None, process.communicate()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_there)


def fork(function):
    """Start a process that does one thing as a script would: with stop signals, and one line."""
    from utils import signals
    from utils.errors import guard

    def script_like():
        signals.install_handlers()
        sys.exit(guard(lambda: [function(), 0][1]))

    process = multiprocessing.get_context("fork").Process(target=script_like)
    process.start()
    return process


def marked():
    """Return command and environment of every process that a test started, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command, variables = fork_server.what_runs(folder)
            if command and variables.items() >= MARK.items():  # a zombie has no command
                found[int(folder.name)] = " ".join(command), variables
    return found


def ranks():
    """Return the pid of each rank; loader workers share their rank's environment."""
    found = {}
    for pid, (line, variables) in sorted(marked().items()):
        if "train_" in line and "distributed.run" not in line:
            found.setdefault(int(variables.get("RANK", 0)), pid)
    return found


def stray_processes(wait=30.0):
    """Return (pid, command) of marked processes that are still there after ``wait`` seconds."""
    deadline = time.monotonic() + wait
    while (found := marked()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [(pid, line) for pid, (line, _) in found.items()]


class Training:
    """Trainings with drawn digits in one folder.

    Where ``ALTER`` is among a process's variables, tests/altered.py runs the script.
    """

    def __init__(self, data_dir, folder):
        self.data_dir, self.folder = data_dir, folder

    def command(self, technique, *extra, processes=2):
        """Return the command; ``gpus`` is DataParallel on GPUs, ``spawn`` DDP without torchrun."""
        name = {"gpus": "dp", "spawn": "ddp"}.get(technique, technique)
        own = {"dp": ["--replicas", processes], "spawn": ["--nprocs", processes]}
        words = ["--dataset", "synthetic", "--data-dir", self.data_dir, "--run-dir", self.folder]
        words = [f"train_{name}.py", *own.get(technique, []), *words, *extra]
        return torchrun(processes, *words) if technique == "ddp" else script(*words)

    def start(self, technique, *extra, processes=2, real=False, **variables):
        words = self.command(technique, *extra, processes=processes)
        if "ALTER" in variables:
            at = next(i for i, word in enumerate(words) if isinstance(word, Path))
            words[at : at + 1] = ALTERED, words[at].name
        return start(*words, real=real, **variables)

    def run(self, technique, *extra, timeout=90, **more):
        return finish(self.start(technique, *extra, **more), timeout)

    def is_saved(self):
        return (self.folder / "checkpoints" / "last.pt").exists()

    @property
    def status(self):
        return status(self.folder)

    @property
    def summary(self):
        return summary(self.folder)

    @property
    def metrics(self):
        return metrics(self.folder)

    @property
    def final_state(self):
        """The weights' checksum and the metrics, but for times: what an equal run repeats."""
        rows = self.metrics
        for row in rows:
            del row["seconds"], row["images_per_second"]
        return self.summary["weights_sha256"], rows
