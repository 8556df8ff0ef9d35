"""What the tools share: runs of the training scripts within a time limit, and the machine."""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from compare import describe_others, read_usage

import data
from utils import config
from utils.device import select_devices, usable_cores
from utils.errors import UsageError, UserError, guard
from utils.output import protect

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 10.0  # for a process to end after SIGTERM
# With these variables, left in a shell, every run would think that it is a rank of another job.
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SCRIPTS = {
    **{name: f"train_{name}.py" for name in ("single", "dp", "ddp")},
    "limit": "train_single.py",  # one run on each device
}
# Flags that every measuring tool sets itself.
OWN = ("--dataset", "--data-dir", "--device", "--devices", "--replicas", "--nprocs", "--run-dir")


class TrialError(UserError):
    """A command failed or took too long. The message is one line."""


def list_of(kind: Any, among: Sequence[Any] | None = None) -> Any:
    """Return an argparse type: values of a kind (one of ``among``), separated by commas."""

    def parse(text: str) -> list[Any]:
        values = [kind(part) for part in text.split(",") if part]
        if unknown := [value for value in values if among is not None and value not in among]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(among or ())}")
        return values

    return parse


def build_parser(name: str, description: str | None) -> config.OneLineParser:
    """Return the parser of a tool, without flags."""
    return config.OneLineParser(
        prog=name,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def build_measuring_parser(name: str, description: str | None) -> config.OneLineParser:
    """Return a parser with the flags that all measuring tools have."""
    parser = build_parser(name, description)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto")
    parser.add_argument("--dataset", choices=list(data.SOURCES), help="default: mnist if present")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--time-limit", type=config.POSITIVE, default=3600.0, help="seconds a run")
    return parser


def parse_args(
    parser: argparse.ArgumentParser, argv: Sequence[str], own: str
) -> argparse.Namespace:
    """Parse the tool's flags. Fill in ``flags`` (after ``--``), ``device`` and ``available``.

    Of the scripts' flags the tool itself sets those in ``own``, so they are refused after ``--``.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.flags = list(argv[end + 1 :])
    for word in args.flags:
        if word.partition("=")[0] in {*OWN, *own.split()}:
            parser.error(f"{word} after -- is set by the tool itself")
    try:
        devices = select_devices(args.device)
    except UsageError as error:
        parser.error(str(error))
    args.device = devices[0].type
    args.available = usable_cores() if args.device == "cpu" else len(devices)
    return args


def choose_dataset(args: argparse.Namespace) -> int:
    """Load the data set, and return the number of its training images.

    Speed does not depend on what the images show. So without ``--dataset`` nothing is downloaded:
    if MNIST is not there, drawn digits are measured.
    """
    if args.dataset is None:
        folder = Path(args.data_dir) / data.SOURCES["mnist"].folder
        is_there = any(folder.glob("raw/*")) or any(folder.glob("*.pt"))
        args.dataset = "mnist" if is_there else "synthetic"
        if not is_there:
            print(f"No MNIST in {args.data_dir}: measuring with drawn digits.", file=sys.stderr)
    return len(data.load_dataset(args.dataset, args.data_dir)[0])


def build_commands(
    technique: str, devices: int, args: argparse.Namespace, flags: dict[str, Any]
) -> list[list[Any]]:
    """Return the commands of a setting, several for ``limit``."""
    flags = {"--dataset": args.dataset, "--data-dir": args.data_dir} | flags
    flags["--device"] = args.device
    if args.device != "cpu":
        flags["--devices"] = ",".join(map(str, range(devices)))
    elif technique == "dp":
        flags["--replicas"] = devices
    if technique == "ddp":
        flags["--nprocs"] = devices
    several = [flags] * (devices if technique == "limit" else 1)
    if technique == "limit" and args.device != "cpu":
        several = [flags | {"--devices": number} for number in range(devices)]
    script = [sys.executable, ROOT / SCRIPTS[technique], *args.flags]
    return [[*script, *(word for item in flags.items() for word in item)] for flags in several]


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)  # also a process that ends now still has its number
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)


def train(commands: Sequence[Sequence[Any]], limit: float) -> list[dict[str, Any]]:
    """Train at the same time, and return the summaries, or raise a ``TrialError``.

    All commands are ended if one fails, after ``limit`` seconds, and on Ctrl-C.
    """
    environ = {name: v for name, v in os.environ.items() if name not in LAUNCHER_VARIABLES}
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="mnist-trial-") as folder, ExitStack() as stack:
        started = []
        for number, command in enumerate(commands):
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                [*map(str, command), "--run-dir", f"{folder}/{number}"],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # only this process gets Ctrl-C, and it ends the others
            )
            stack.callback(_end, process)
            started.append((process, errors))
        while any(process.poll() is None for process, _ in started):
            if any(process.returncode for process, _ in started):
                break
            if time.monotonic() > deadline:
                raise TrialError(f"still running after {limit:.0f} s")
            time.sleep(0.05)
        for process, errors in started:
            if process.returncode:
                errors.seek(0)
                lines = ["no word", *errors.read().split("\n")]
                # Our own messages say "error:". A launcher's report comes after them.
                lines = [line for line in lines if ": error: " in line] or lines[-2:]
                raise TrialError(f"exit status {process.returncode}: {lines[0].strip()}")
        return [json.loads(path.read_text()) for path in Path(folder).glob("*/summary.json")]


def is_interrupted(measure: Callable[..., None], *args: Any) -> bool:
    """Call ``measure``, and return whether Ctrl-C or SIGTERM ended it."""
    try:
        measure(*args)
    except KeyboardInterrupt:
        print("interrupted: these are the runs that were complete", file=sys.stderr)
        return True
    return False


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def describe_machine() -> dict[str, Any]:
    """Return what a figure depends on: hardware, versions and settings."""
    cpu = platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line[13:] for line in lines if line.startswith("model name\t: "))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    prefixes = ("OMP_", "MKL_", "GOMP_", "NCCL_", "GLOO_", "CUDA_VISIBLE", "TORCH_")
    return {
        "cpu": cpu,
        "cores": usable_cores(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, {platform.platform()}",
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(prefixes)},
    }


def describe_table(args: argparse.Namespace) -> str:
    """Return what the figures of a table depend on, in one line."""
    machine = describe_machine()
    where = ", ".join(machine["gpus"]) or f"{machine['cores']} cores of {machine['cpu']}"
    flags = f"; flags: {' '.join(args.flags)}" if args.flags else ""
    return f"{args.dataset}, {where}, {time.strftime('%Y-%m-%d %H:%M')}{flags}"


def watch_others() -> Callable[[], str]:
    """Return a function that says whether other programs used much of the machine since now."""
    begin = read_usage(os.getpid())
    return lambda: " ".join(describe_others(begin, read_usage(os.getpid())).split())


def start(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a tool, and return its exit status. SIGTERM ends it as Ctrl-C does, with its results."""
    protect()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return guard(run, args)
