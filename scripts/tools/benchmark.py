"""Measure one device, DP and DDP on this machine: which is faster, and by how much?

    python scripts/tools/benchmark.py
    python scripts/tools/benchmark.py --devices 2,4,8 -- --model resnet18
    python scripts/tools/benchmark.py --runs runs/first runs/second    compare finished runs instead

It starts the training scripts in turns, and reads the images/s that they report. All of them train
on the same images with the same global batch, and have as many CPU threads for each device. A
device is a GPU with a fair share of the cores, or a core if there is no GPU. DP takes part if it
has two GPUs. Flags after -- go to the scripts. After Ctrl-C, or an error of a script, the table has
what was complete.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
FIRST_STEPS = 50  # of the run that finds out how many steps take --seconds
MANY_EPOCHS = 1000  # so that --max-steps ends the runs
SPEED = "train_images_per_second"
COLUMNS = ("", "devices", "threads", "images/s", "speed-up", "peak MiB", "waits for data")


class Setting(NamedTuple):
    """What is run: a technique, its number of devices, and CPU threads over all processes."""

    technique: str
    devices: int
    threads: int

    def __str__(self) -> str:
        return f"{self.technique} on {self.devices} with {self.threads} CPU threads"


Summary = dict[str, Any]  # the content of a summary.json
Results = dict[Setting, list[Summary]]  # one of each round


def counts(text: str) -> list[int]:
    """Parse ``2,4,8`` into numbers of devices."""
    return [int(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", type=counts, default=[], help="such as 2,4,8 (all GPUs, or 2 cores)")
    add("--global-batch-size", type=int, default=512, help="images of a step (512)")
    add("--rounds", type=int, default=3, help="how often each setting is measured (3)")
    add("--seconds", type=float, default=5, help="time that one device trains in a round (5)")
    add("--runs", nargs="+", metavar="FOLDER", help="compare these finished runs, measure nothing")
    add("flags", nargs="*", help="after --: flags of the training scripts")
    args = parser.parse_args()
    args.gpus = torch.cuda.device_count()
    args.devices = args.devices or [args.gpus or 2]
    args.threads = max(1, os.cpu_count() // max(args.devices)) if args.gpus else 1
    if args.gpus and max(args.devices) > args.gpus:
        parser.error(f"--devices {max(args.devices)}: there are {args.gpus} GPUs")
    if odd := [n for n in args.devices if args.global_batch_size % n]:
        parser.error(f"--global-batch-size {args.global_batch_size} is no multiple of {odd[0]}")
    if missing := [f for f in args.runs or () if not Path(f, "summary.json").exists()]:
        parser.error(f"--runs {missing[0]}: there is no finished run")
    return args


def settings(args: argparse.Namespace) -> list[Setting]:
    """Return what is compared. The first one is one device."""
    found = [Setting("single", 1, args.threads)]
    for n in args.devices:
        if not args.gpus:  # what the same cores do without data parallelism
            found.append(Setting("single", 1, n * args.threads))
        elif n > 1:
            found.append(Setting("dp", n, n * args.threads))
        found.append(Setting("ddp", n, n * args.threads))
    return found


def train(setting: Setting, steps: int, args: argparse.Namespace) -> Summary:
    """Run one of the scripts, and return its summary.

    Raises:
        RuntimeError: it failed.
        KeyboardInterrupt: Ctrl-C, after the training has ended too.
    """
    technique, devices, threads = setting
    launcher = [sys.executable]
    processes = 1
    if technique == "ddp":
        processes = devices
        launcher += f"-m torch.distributed.run --standalone --nproc_per_node {devices}".split()
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "--run-dir": folder,
            "--batch-size": args.global_batch_size // devices,
            "--max-steps": steps,
            "--epochs": MANY_EPOCHS,
            "--threads": threads // processes,
            "--lr": 0.01,  # the speed does not depend on it, and a small one does not diverge
        }
        if not args.gpus:
            flags["--device"] = "cpu"
        if technique == "dp":
            flags["--devices"] = ",".join(map(str, range(devices)))
        words = [str(word) for flag in flags.items() for word in flag]
        words += ["--no-tensorboard", "--no-progress", *args.flags]
        process = subprocess.Popen(
            [*launcher, str(ROOT / f"train_{technique}.py"), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # or torchrun prints that it sets it
        )
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            process.terminate()  # torchrun passes it on to its ranks
            process.communicate()
            raise
        if process.returncode:
            lines = output.splitlines() or ["no output"]
            cause = next((line for line in lines if "error: " in line), lines[-1])
            raise RuntimeError(f"{setting}: {cause}")
        return json.loads(Path(folder, "summary.json").read_text())


def measure(args: argparse.Namespace, results: Results) -> None:
    """Run each setting once in each round, and fill ``results``.

    Raises:
        RuntimeError: a script failed. ``results`` has what was complete.
        KeyboardInterrupt: Ctrl-C, likewise.
    """
    first = train(next(iter(results)), FIRST_STEPS, args)  # reads the data once, too
    images = args.seconds * first[SPEED]
    steps = max(FIRST_STEPS, round(images / args.global_batch_size))
    for number in range(args.rounds):
        # Every other round goes backwards: a machine that becomes slower favours nobody.
        for setting in list(results)[:: -1 if number % 2 else 1]:
            run = train(setting, steps, args)
            results[setting].append(run)
            speed = f"{run[SPEED]:,.0f} images/s"
            print(f"round {number + 1}: {setting}: {speed}", file=sys.stderr)


def ratios(runs: list[Summary], others: list[Summary]) -> list[float]:
    """Return how many times as fast as others these runs are, in each round that has both."""
    return [run[SPEED] / other[SPEED] for run, other in zip(runs, others, strict=False)]


def spread(values: list[float], form: str) -> str:
    """Return median and range, such as ``1.5 (1.4 to 1.6)``."""
    if not values:
        return "-"
    of_all = (statistics.median(values), min(values), max(values))
    median, low, high = (format(value, form) for value in of_all)
    return f"{median} ({low} to {high})" if len(values) > 1 else median


def row(setting: Setting, runs: list[Summary], first: list[Summary]) -> list[object]:
    """Return what the ``COLUMNS`` say about runs of a setting. Speed-ups are over ``first``."""
    memory = [max(run["peak_memory_mb"]) for run in runs]  # of the GPU that has most
    waits = [run["data_seconds"] / run["train_seconds"] for run in runs]
    return [
        *setting,
        spread([run[SPEED] for run in runs], ",.0f"),
        spread(ratios(runs, first), ".2f"),
        f"{statistics.median(memory):,.0f}",
        f"{statistics.median(waits):.0%}",
    ]


def print_table(*rows: Sequence[object]) -> None:
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def report(args: argparse.Namespace, results: Results) -> None:
    """Print the figures, and what they depend on."""
    first = next(iter(results.values()))
    rows = [row(setting, runs, first) for setting, runs in results.items() if runs]
    print_table(COLUMNS, *rows)
    for dp, runs in results.items():
        if dp.technique == "dp":
            found = ratios(results[dp._replace(technique="ddp")], runs)
            verdict = "no difference seen: " if found and min(found) <= 1 <= max(found) else ""
            times = spread(found, ".2f")
            print(f"{verdict}on {dp.devices} GPUs DDP is {times} times as fast as DP")
    device = torch.cuda.get_device_name() if args.gpus else f"cores of {os.cpu_count()}"
    print(
        f"{args.global_batch_size} images a step; devices: {device}; torch {torch.__version__};"
        f" rounds: {args.rounds}; flags: {' '.join(args.flags) or 'none'}. Median (and range) of"
        " the rounds. Ranges that overlap show no difference."
    )


def compare(folders: list[str]) -> None:
    """Print the results of finished runs. Speed-ups are those over the first one."""
    runs = [json.loads(Path(folder, "summary.json").read_text()) for folder in folders]
    first = runs[0]
    rows = []
    for run in runs:
        setting = Setting(run["technique"], run["num_devices"], run["threads"] * run["world_size"])
        alike = all(run[k] == first[k] for k in ("dataset", "model", "device", "global_batch_size"))
        is_comparable = alike and setting[:2] != ("dp", 1)
        results = [f"{run['test_accuracy']:.2%}", f"{run['train_seconds']:.1f}"]
        rows.append([*row(setting, [run], [first] if is_comparable else []), *results])
    print_table([*COLUMNS, "test accuracy", "train seconds"], *rows)
    device = "a GPU" if first["device"] == "cuda" else "a core of the CPU"
    print(f"A device is {device}. A step has {first['global_batch_size']} images.")
    if any(run["technique"] == "dp" and run["num_devices"] == 1 for run in runs):
        print("dp has no speed-up here: without two GPUs nn.DataParallel only calls the model.")


def main() -> int:
    args = parse_args()
    if args.runs:
        compare(args.runs)
        return 0
    # Whoever stops the benchmark with SIGTERM gets the table as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results: Results = {setting: [] for setting in settings(args)}
    status = 0
    try:
        measure(args, results)
    except (KeyboardInterrupt, RuntimeError) as error:
        print(f"benchmark.py: error: {str(error) or 'interrupted'}", file=sys.stderr)
        status = 1
    if any(results.values()):
        report(args, results)
    return status


if __name__ == "__main__":
    sys.exit(main())
