"""What the measuring tools share: run a command within a time limit, read what a training says of
itself, take turns, and describe the machine. Not a command of its own.
"""

import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from phases import TraceError, analyse
from tqdm import tqdm

import data
from utils.datasets.sources import RAW_FILES
from utils.device import usable_cores
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 10.0  # to end by itself when asked to
QUIET = ("--no-tensorboard", "--no-progress")
# Left in a shell, they would make every training take itself for a rank of another job.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class TrialError(UserError):
    """A command failed or took too long; the message is one line."""


class Outcome(NamedTuple):
    """A training that ended well.

    Attributes:
        summary: its ``summary.json``.
        shares: of the profiled steps, from its trace; empty without ``--profile``.
        seconds: from the start of the command to its end.
        first_step: from the start of the command (the launcher, where there is one) to the end of
            the first optimizer step.
    """

    summary: dict[str, Any]
    shares: dict[str, float]
    seconds: float
    first_step: float


def run(command: Sequence[Any], limit: float, watch: Any = None) -> str:
    """Run a command of ours and return what it printed on stdout.

    Args:
        command: program and arguments.
        limit: seconds after which it is stopped.
        watch: called with the process id every tenth of a second.

    Raises:
        TrialError: another exit status than 0, or the time limit.
    """
    environ = {name: v for name, v in os.environ.items() if name not in LAUNCHER_VARIABLES}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,  # Ctrl-C comes to us, and we stop all that it started
        )
        deadline = time.monotonic() + limit
        try:
            if watch is None:
                process.wait(limit)
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(command, limit)
                watch(process.pid)
                time.sleep(0.1)
        except subprocess.TimeoutExpired:
            raise TrialError(f"still running after {limit:.0f} s") from None
        finally:
            if process.poll() is None:
                _stop(process)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            lines = [line for line in errors.read().splitlines() if line.strip()]
            # Our own messages say "error:"; a launcher's report comes after them.
            told = [line for line in lines if ": error: " in line] or lines[-1:] or ["no word"]
            raise TrialError(f"exit status {process.returncode}: {told[0].strip()}")
        return output.read()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return


def train(
    command: Sequence[Any], limit: float, watch: Any = None, flags: Sequence[str] = QUIET
) -> Outcome:
    """Run a training in a temporary run directory; ``command`` is without ``--run-dir``.

    Raises:
        TrialError: it failed, took too long or left no summary.
    """
    with tempfile.TemporaryDirectory(prefix="mnist-trial-") as folder:
        begin, begin_clock = time.monotonic(), time.time()
        run([*command, "--run-dir", Path(folder) / "run", *flags], limit, watch)
        seconds = time.monotonic() - begin
        path = Path(folder) / "run" / "summary.json"
        try:
            summary = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise TrialError(f"no usable summary.json ({error})") from None
        first_step = 0.0
        if summary["startup_seconds"] is not None:
            # The training counts from its own process's start, and so leaves out its launcher. Both
            # of its figures have that start, and the file was written at the second of them.
            since_first_step = summary["total_seconds"] - summary["startup_seconds"]
            first_step = path.stat().st_mtime - begin_clock - since_first_step
        return Outcome(summary, read_shares(path.parent), seconds, first_step)


def train_at_once(commands: Sequence[Sequence[Any]], limit: float) -> list[Outcome]:
    """Run several trainings at the same time; where one fails, or on Ctrl-C, all are stopped.

    Raises:
        TrialError: as ``train``.
    """
    over = threading.Event()

    def watch(pid: int) -> None:
        if over.is_set():
            raise TrialError("stopped, since another one failed")

    with ThreadPoolExecutor(len(commands)) as pool:
        futures = [pool.submit(train, command, limit, watch) for command in commands]
        try:
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()  # raises what failed first
        finally:
            over.set()
    return [future.result() for future in futures]


def read_shares(run_dir: Path) -> dict[str, float]:
    """Return the shares of a profiled step, 0 to 1 each; nothing where there was no profile."""
    with suppress(TraceError):
        return analyse(run_dir)["shares"]
    return {}


def in_turns(items: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """Yield every item once a round, backwards in every second: a drift then favours none."""
    for number in range(rounds):
        for item in items if number % 2 == 0 else reversed(items):
            yield number, item


def measure_in_turns(
    tool: str,
    items: Sequence[Key],
    rounds: int,
    measure: Callable[[Key], Value],
    label: Callable[[Key], str] = str,
) -> tuple[dict[Key, dict[int, Value]], int]:
    """Measure every item once a round, as ``in_turns``, showing on a terminal which one it is.

    What fails is told on stderr, in the name of ``tool``, and left out; so is, after Ctrl-C, all
    that has not been measured.

    Returns:
        Item to round to what ``measure`` returned, and the exit status.
    """
    found: dict[Key, dict[int, Value]] = {item: {} for item in items}
    turns, status = in_turns(items, rounds), 0
    with tqdm(turns, total=rounds * len(items), disable=None, leave=False) as bar:
        try:
            for number, item in bar:
                bar.set_description_str(label(item), refresh=True)
                try:
                    found[item][number] = measure(item)
                except (TrialError, ImportError) as error:
                    status = 1
                    tqdm.write(f"{tool}: {label(item)}: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            status = 130
            tqdm.write(f"{tool}: interrupted: what was measured follows", file=sys.stderr)
    return found, status


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def choose_dataset(asked: str | None, data_dir: str) -> tuple[str, str]:
    """Return the data set to measure with, prepared, and a remark (or "").

    Speed does not depend on what the images show, so a measurement downloads nothing unless it is
    asked for MNIST by name: where it is not there, the drawn digits take its place.

    Raises:
        data.DataError: the data cannot be had.
    """
    name, remark = asked or "mnist", ""
    folder = Path(data_dir) / data.SOURCES[name].folder
    if asked is None and not any(folder.glob(f"raw/{RAW_FILES[0]}*")):
        name, remark = "synthetic", f"No MNIST in {data_dir}: measuring with drawn digits."
    data.prepare(name, data_dir)
    return name, remark


def describe_machine() -> dict[str, Any]:
    """Return what a figure depends on: hardware, versions and settings."""
    facts: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "cores": usable_cores(),
        "gpus": [],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        facts["cpu"] = names[0] if names else facts["cpu"]
    with suppress(OSError, ValueError):
        facts["memory_gb"] = round(
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1
        )
    with suppress(metadata.PackageNotFoundError):
        facts["torchvision"] = metadata.version("torchvision")
    if torch.cuda.is_available():
        facts["gpus"] = [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ]
        facts["cuda"] = str(torch.version.cuda)
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            facts["driver"] = _ask(query).partition("\n")[0]
            facts["topology"] = _ask(["nvidia-smi", "topo", "-m"])
    if shutil.which("git"):
        facts["commit"] = _ask(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])
    prefixes = ("OMP_", "MKL_", "KMP_", "GOMP_", "NCCL_", "GLOO_", "CUDA_VISIBLE", "TORCH_")
    facts["variables"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)}
    return facts


def _ask(command: list[str]) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return answer.stdout.strip() if answer.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""


class Neighbours:
    """Watches how much of the machine's CPU time goes to others while we measure."""

    LIMIT = 0.05  # of the machine; more spoils a figure

    def __init__(self) -> None:
        self.begin = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Return seconds of all CPUs, those of them in use, and those used by us; see proc(5)."""
        with suppress(OSError, ValueError):
            words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
            ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
            return sum(ticks), sum(ticks) - ticks[3] - ticks[4], sum(os.times()[:4])
        return 0.0, 0.0, 0.0

    def share(self) -> float:
        """Return the share of the machine, 0 to 1, that others took so far."""
        total, busy, ours = (e - b for b, e in zip(self.begin, self._read(), strict=True))
        return max(0.0, busy - ours) / total if total else 0.0

    def tell(self) -> float:
        """Say on stderr where they took too much; return the share."""
        share = round(self.share(), 3)
        if share > self.LIMIT:
            print(
                f"Other programs took {share:.0%} of this machine's CPU time meanwhile: these"
                " figures are\nnot worth much. Threads of one process that wait for each other"
                " suffer most.",
                file=sys.stderr,
            )
        return share


def raise_on_sigterm() -> None:
    """Let SIGTERM end a measurement as Ctrl-C does: by KeyboardInterrupt, with what there is."""

    def interrupt(number: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
