"""Measure one device, DP and DDP on this machine: which is faster, and by how much?

    python scripts/tools/benchmark.py
    python scripts/tools/benchmark.py --devices 2,4,8 --plot speed.png -- --model resnet18
    python scripts/tools/benchmark.py --runs runs/first runs/second    compare finished runs instead

It starts the training scripts in turns, and reads the images/s that they report. All of them train
on the same images with the same global batch, and have as many CPU threads for each device. A
device is a GPU, or a core if there is no GPU. Flags after -- go to the scripts. Ctrl-C ends the
measurement, and prints what there is.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
FIRST_STEPS = 50  # of the run that finds out how many steps take --seconds
MANY_EPOCHS = 1000  # so that --max-steps ends the runs, and the rate is still that of the warm-up


class Setting(NamedTuple):
    """What is run: a technique, its number of devices, and CPU threads over all processes."""

    technique: str
    devices: int
    threads: int

    def __str__(self) -> str:
        return f"{self.technique} on {self.devices} with {self.threads} CPU threads"


Speeds = dict[Setting, dict[int, float]]  # images/s of each round


def counts(text: str) -> list[int]:
    """Parse ``2,4,8`` into numbers of devices."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--devices", type=counts, default=[], help="such as 2,4,8 (all GPUs, or 2 cores)")
    add("--global-batch-size", type=int, default=512, help="images of a step (512)")
    add("--threads", type=int, help="CPU threads for each device (1, with GPUs a fair share)")
    add("--rounds", type=int, default=3, help="how often each setting is measured (3)")
    add("--seconds", type=float, default=5, help="time that one device trains in a round (5)")
    add("--device", choices=["auto", "cpu"], default="auto")
    add("--plot", metavar="FILE.png", help="draw images/s and speed-up over devices")
    add("--runs", nargs="+", metavar="FOLDER", help="compare these finished runs, measure nothing")
    add("flags", nargs="*", help="after --: flags of the training scripts")
    args = parser.parse_args()
    args.gpus = torch.cuda.device_count() if args.device == "auto" else 0
    args.devices = args.devices or [args.gpus or 2]
    args.threads = args.threads or max(1, args.gpus and os.cpu_count() // max(args.devices))
    if args.gpus and max(args.devices) > args.gpus:
        parser.error(f"--devices {max(args.devices)}: there are {args.gpus} GPUs")
    if odd := [n for n in args.devices if args.global_batch_size % n]:
        parser.error(f"--global-batch-size {args.global_batch_size} is no multiple of {odd[0]}")
    if missing := [f for f in args.runs or () if not Path(f, "summary.json").exists()]:
        parser.error(f"--runs {missing[0]}: there is no finished run")
    if args.plot and not find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return args


def settings(args: argparse.Namespace) -> list[Setting]:
    """Return what is compared. The first one is one device."""
    found = [Setting("single", 1, args.threads)]
    for n in args.devices:
        if args.gpus:
            found.append(Setting("dp", n, n * args.threads))
        else:  # what the same cores do without data parallelism
            found.append(Setting("single", 1, n * args.threads))
        found.append(Setting("ddp", n, n * args.threads))
    return found


def train(setting: Setting, steps: int, args: argparse.Namespace) -> float:
    """Start a training script, and return its images/s.

    Raises:
        RuntimeError: it failed.
        KeyboardInterrupt: Ctrl-C, after the training has ended too.
    """
    technique, devices, threads = setting
    launcher, processes = [sys.executable], 1
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
            "--lr-scaling": "none",  # or a large batch might diverge
        }
        if not args.gpus:
            flags["--device"] = "cpu"
        elif technique != "ddp":
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
            raise RuntimeError(next((line for line in lines if "error: " in line), lines[-1]))
        return json.loads(Path(folder, "summary.json").read_text())["train_images_per_second"]


def measure(args: argparse.Namespace, speeds: Speeds) -> None:
    """Run each setting once in each round, and fill ``speeds``.

    Raises:
        RuntimeError: one device failed already. Later failures are printed.
        KeyboardInterrupt: Ctrl-C. ``speeds`` has what was complete.
    """
    images = args.seconds * train(next(iter(speeds)), FIRST_STEPS, args)  # reads the data once, too
    steps = max(FIRST_STEPS, round(images / args.global_batch_size))
    for number in range(args.rounds):
        # Every other round goes backwards: a machine that becomes slower favours nobody.
        for setting in list(speeds)[:: -1 if number % 2 else 1]:
            try:
                speed = speeds[setting][number] = train(setting, steps, args)
            except RuntimeError as error:
                print(f"{setting}: {error}", file=sys.stderr)
            else:
                print(f"round {number + 1}: {setting}: {speed:,.0f} images/s", file=sys.stderr)


def ratios(speeds: Speeds, setting: Setting, other: Setting) -> list[float]:
    """Return how many times as fast as another a setting is, in each round that has both."""
    rounds = speeds[setting].keys() & speeds[other].keys()
    return [speeds[setting][i] / speeds[other][i] for i in rounds]


def spread(values: list[float], form: str) -> str:
    """Return median and range, such as ``1.5 (1.4 to 1.6)``."""
    if not values:
        return "-"
    of_all = (statistics.median(values), min(values), max(values))
    return "{} ({} to {})".format(*(format(value, form) for value in of_all))


def print_table(*rows: tuple[str, ...]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def report(args: argparse.Namespace, speeds: Speeds) -> None:
    """Print the figures, and what they depend on."""
    first = next(iter(speeds))
    rows = [("", "devices", "threads", "images/s", "speed-up")]
    for setting, rounds in speeds.items():
        speed, ratio = list(rounds.values()), ratios(speeds, setting, first)
        cells = spread(speed, ",.0f"), spread(ratio, ".2f")
        rows.append((setting.technique, str(setting.devices), str(setting.threads), *cells))
    print_table(*rows)
    for n in args.devices if args.gpus else []:
        dp, ddp = (Setting(technique, n, n * args.threads) for technique in ("dp", "ddp"))
        found = ratios(speeds, ddp, dp)
        verdict = "no difference seen: " if found and min(found) <= 1 <= max(found) else ""
        print(f"{verdict}on {n} GPUs DDP is {spread(found, '.2f')} times as fast as DP")
    device = torch.cuda.get_device_name() if args.gpus else f"cores of {os.cpu_count()}"
    print(
        f"{args.global_batch_size} images a step; devices: {device}; torch {torch.__version__};"
        f" rounds: {args.rounds}; flags: {' '.join(args.flags) or 'none'}. Median (and range) of"
        " the rounds. Ranges that overlap show no difference."
    )


def compare(folders: list[str]) -> None:
    """Print the results of finished runs. Speed-ups are those over the first one."""
    runs = [json.loads(Path(folder, "summary.json").read_text()) for folder in folders]
    rows = [("", "devices", "images/s", "speed-up", "test accuracy", "train seconds")]
    for run in runs:
        speed, first = run["train_images_per_second"], runs[0]["train_images_per_second"]
        alike = ("dataset", "model", "device", "global_batch_size")
        ratio = f"{speed / first:.2f}" if all(run[k] == runs[0][k] for k in alike) else "-"
        cells = f"{speed:,.0f}", ratio, f"{run['test_accuracy']:.2%}", f"{run['train_seconds']:.1f}"
        rows.append((run["technique"], str(run["num_devices"]), *cells))
    print_table(*rows)
    device = "a GPU" if runs[0]["device"] == "cuda" else "a core of the CPU"
    print(f"A device is {device}. A step has {runs[0]['global_batch_size']} images.")
    if any(run["technique"] == "dp" and run["num_devices"] == 1 for run in runs):
        print("dp: nn.DataParallel only calls the model, since it needs two GPUs.")


def plot(path: str, args: argparse.Namespace, speeds: Speeds) -> None:
    """Draw images/s, and the speed-up over one device, for 1, 2... devices."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    first = next(iter(speeds))
    for technique in ("dp", "ddp"):
        own = [first, *(setting for setting in speeds if setting.technique == technique)]
        for axes, values in (
            (left, [list(speeds[setting].values()) for setting in own]),
            (right, [ratios(speeds, setting, first) for setting in own]),
        ):
            done = [(s.devices, x) for s, x in zip(own, values, strict=True) if x]
            middle = [statistics.median(x) for _, x in done]
            low = [m - min(x) for m, (_, x) in zip(middle, done, strict=True)]
            high = [max(x) - m for m, (_, x) in zip(middle, done, strict=True)]
            if len(done) > 1:
                devices = [n for n, _ in done]
                axes.errorbar(devices, middle, (low, high), marker="o", capsize=3, label=technique)
    right.plot(*[[1, *args.devices]] * 2, color="grey", linestyle=":", label="ideal")
    for axes, name in ((left, "images/s"), (right, "speed-up over one device")):
        axes.set(xlabel="GPUs" if args.gpus else "cores", ylabel=name, ylim=(0, None))
        axes.set_xticks([1, *args.devices])
    right.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    args = parse_args()
    if args.runs:
        compare(args.runs)
        return 0
    # Whoever stops the benchmark with SIGTERM gets the table as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    speeds: Speeds = {setting: {} for setting in settings(args)}
    status = 0
    try:
        measure(args, speeds)
    except RuntimeError as error:
        sys.exit(f"benchmark.py: error: {error}")
    except KeyboardInterrupt:
        status = 130
        print("interrupted: this is what was complete", file=sys.stderr)
    report(args, speeds)
    if args.plot:
        plot(args.plot, args, speeds)
    return status or int(any(len(rounds) < args.rounds for rounds in speeds.values()))


if __name__ == "__main__":
    sys.exit(main())
