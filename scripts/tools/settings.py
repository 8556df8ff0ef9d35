"""What benchmark.py compares, and the commands of it. Not a command of its own."""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import trial

from utils.datasets.sources import TRAIN_SIZE


class Setting(NamedTuple):
    """What is run.

    Attributes:
        threads: CPU threads of all processes together.
        batch_size: of one device.
    """

    technique: str
    model: str
    devices: int
    threads: int
    batch_size: int

    @property
    def processes(self) -> int:
        return self.devices if self.technique == "ddp" else 1

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.technique} {self.model} {self.devices} x {self.batch_size}, {threads}"


class Table(NamedTuple):
    """A comparison: its first setting is the one device that ratios are counted from."""

    scaling: str
    model: str
    batch_size: int
    settings: list[Setting]


def plan(args: argparse.Namespace) -> list[Table]:
    """Return the comparisons to make."""
    tables = []
    for model in args.models:
        sizes = [("strong", size) for size in args.global_batch_sizes]
        for scaling, size in [*sizes, *(("weak", size) for size in args.batch_sizes)]:
            settings = [Setting("single", model, 1, args.threads, size)]
            if args.device == "cpu" and args.threads > 1:
                # What a device of this kind does alone: efficiency is counted from it.
                settings.append(Setting("single", model, 1, 1, size))
            for count in args.counts:
                each = size // count if scaling == "strong" else size
                settings += [Setting(t, model, count, args.threads, each) for t in ("dp", "ddp")]
            tables.append(Table(scaling, model, size, settings))
    return tables


def command(setting: Setting, args: argparse.Namespace, steps: int, *more: str) -> list[Any]:
    """Return the training command of a setting."""
    global_batch_size = setting.devices * setting.batch_size
    flags: dict[str, Any] = {
        "--dataset": args.dataset,
        "--data-dir": args.data_dir,
        "--model": setting.model,
        "--batch-size": setting.batch_size,
        "--max-steps": steps,
        "--epochs": -(-steps // (TRAIN_SIZE // global_batch_size)),
        "--lr-scaling": "none",  # large batches must not diverge; the time of a step is the same
        "--threads": setting.threads // setting.processes,
        "--num-workers": args.num_workers // setting.processes,
        "--device": args.device,
    }
    if args.device != "cpu":
        flags["--devices"] = ",".join(map(str, range(setting.devices)))
    elif setting.technique == "dp":
        flags["--replicas"] = setting.devices
    if setting.technique == "ddp":
        flags["--nprocs"] = setting.devices
    own = [str(word) for item in flags.items() for word in item]
    script = trial.ROOT / f"train_{setting.technique}.py"
    return [sys.executable, script, *args.flags, *own, *more]
