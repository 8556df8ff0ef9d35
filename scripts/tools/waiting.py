"""Measure what it costs and gains that the threads of a training spin while they wait.

    python scripts/tools/waiting.py
    python scripts/tools/waiting.py --others 0,1 --spins 300000,1000 --rounds 9

Some train_single.py at the same time, all with the same setting of OpenMP's threads and with a
thread for each core: alone, beside another one and beside two. They start together and make the
same number of steps; the images/s of each are told, in the mean of those that ran together. The
settings take turns, once a round, and each is compared with the first of them within its round.
All on the CPU. Nothing else should run: the others are to be those that the tool starts.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.early import SPINS

import trial

import data
import models
from utils import config
from utils.datasets.sources import TRAIN_SIZE
from utils.device import usable_cores
from utils.errors import guard
from utils.files import write_json
from utils.throughput import WARMUP_STEPS

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
LIBGOMP_SPINS = 300_000  # where neither variable is set; 100 with more threads than cores
REMARKS = {
    f"GOMP_SPINCOUNT={LIBGOMP_SPINS}": "libgomp's default",
    f"GOMP_SPINCOUNT={SPINS}": "the scripts' default",
}
Run = tuple[int, str]  # how many others there are, and the setting


def numbers(text: str) -> list[int]:
    return [config.COUNT(part) for part in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = config.OneLineParser(
        prog="waiting.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    spins = [LIBGOMP_SPINS, 10_000, 3_000, 1_000, 300]
    parser.add_argument("--spins", type=numbers, default=spins, help=",".join(map(str, spins)))
    parser.add_argument("--others", type=numbers, default=[0, 1, 2], help="beside it: 0,1,2")
    parser.add_argument("--rounds", type=config.SIZE, default=5)
    parser.add_argument("--images", type=config.SIZE, default=10_000, help="timed in a training")
    parser.add_argument("--batch-size", type=config.SIZE, default=config.DEFAULT_BATCH_SIZE)
    parser.add_argument("--model", choices=list(models.MODELS), default="convnet")
    parser.add_argument("--threads", type=config.SIZE, default=usable_cores(), help="of each")
    parser.add_argument("--dataset", choices=list(data.SOURCES), help="mnist, or what is there")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--time-limit", type=config.POSITIVE, default=600.0, help="of a training")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values there")
    args = parser.parse_args()
    if args.images > TRAIN_SIZE - args.batch_size * WARMUP_STEPS:
        parser.error(f"--images {args.images} and the warm-up are more than an epoch")
    return args


def measure(args: argparse.Namespace, others: int, setting: str) -> list[float]:
    """Return the images/s of each of the trainings that run at the same time.

    Raises:
        trial.TrialError: one failed.
    """
    # Of both variables only what is measured: the script keeps to a setting that it finds.
    unset = [word for name in VARIABLES for word in ("-u", name)]
    flags = {
        "--device": "cpu",
        "--threads": args.threads,
        "--model": args.model,
        "--batch-size": args.batch_size,
        "--max-steps": WARMUP_STEPS + max(1, args.images // args.batch_size),
        "--lr-scaling": "none",
        "--dataset": args.dataset,
        "--data-dir": args.data_dir,
    }
    script = [sys.executable, trial.ROOT / "train_single.py"]
    command = ["env", *unset, setting, *script, *(word for pair in flags.items() for word in pair)]
    outcomes = trial.train_at_once([command] * (1 + others), args.time_limit)
    return [outcome.summary["train_images_per_second"] for outcome in outcomes]


def lines(settings: list[str], found: dict[Run, dict[int, list[float]]], others: int) -> list[str]:
    """Return the table of one number of other trainings."""
    title = f"beside {others} other{'s' if others > 1 else ''}" if others else "alone"
    told = [f"{title + ', images/s of each':36} median  (range)          ratio"]
    means = [
        {number: sum(speeds) / len(speeds) for number, speeds in found[others, setting].items()}
        for setting in settings
    ]
    for setting, mean in zip(settings, means, strict=True):
        both = sorted(mean.keys() & means[0].keys())
        if not both:
            told.append(f"  {setting:33} -")
            continue
        speed = trial.spread(list(mean.values()))
        ratio = trial.spread([mean[number] / means[0][number] for number in both])["median"]
        extent = f"({speed['min']:,.0f}-{speed['max']:,.0f})"
        remark = REMARKS.get(setting, "")
        told.append(f"  {setting:33}{speed['median']:7,.0f}  {extent:15} {ratio:6.2f}  {remark}")
    return [line.rstrip() for line in told]


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables and return the exit status."""
    args.dataset, remark = trial.choose_dataset(args.dataset, args.data_dir)
    if remark:
        print(remark, file=sys.stderr)
    machine, neighbours = trial.describe_machine(), trial.Neighbours()
    settings = [*(f"GOMP_SPINCOUNT={spins}" for spins in args.spins), "OMP_WAIT_POLICY=PASSIVE"]
    runs = [(others, setting) for others in args.others for setting in settings]
    found, status = trial.measure_in_turns(
        "waiting.py",
        runs,
        args.rounds,
        lambda run: measure(args, *run),
        label=lambda run: f"{run[1]}, {run[0]} others",
    )
    share = neighbours.tell()
    for others in args.others:
        print(*lines(settings, found, others), sep="\n")
    setup = f"{args.model}, {args.threads} threads each, batches of {args.batch_size}"
    print(f"{args.rounds} rounds, {setup}; {machine['cores']} cores of {machine['cpu']}")
    if args.json:
        speeds: list[dict[str, Any]] = [
            {"others": others, "setting": setting, "images_per_second": rounds}
            for (others, setting), rounds in found.items()
        ]
        write_json(args.json, {"machine": machine, "others_share": share, "found": speeds})
    return status


def main() -> int:
    args = parse_args()
    trial.raise_on_sigterm()
    return guard(run, args)


if __name__ == "__main__":
    sys.exit(main())
