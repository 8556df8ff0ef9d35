"""Train with several lengths, batches and seeds: how accurate, and after how many seconds?

    python scripts/tools/sweep.py --goal 99
    python scripts/tools/sweep.py --techniques single --epochs 1,5 --batch-sizes 96,384,1536,6144

For each technique (DP and DDP on two devices) and each global batch it trains the lengths of
--epochs, upwards, with each seed. With --goal it goes on to the next batch as soon as the mean
accuracy of the seeds reaches the goal. A run that diverges counts as 10 %, which is guessing. What
stands after -- goes to the scripts.

The accuracy is that of the test set, and it ends the search, as in MLPerf and DAWNBench. So it does
not estimate how well the model does on new images.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import compare
import trial

from utils import config

TECHNIQUES = {"single": 1, "dp": 2, "ddp": 2}  # devices
EPOCHS = [0.25, 0.3, 0.35, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
GUESSING = 0.1  # accuracy of a run that diverged: its weights are neither saved nor evaluated
HEADINGS = ("", "batch", "epochs", "accuracy, %", "range", "train, s", "total, s", "range", "")
Key = tuple[str, int, float, int]  # technique, global batch, epochs, seed
Found = dict[Key, list[float]]  # accuracy, seconds in epochs, seconds of the whole command


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = trial.build_measuring_parser("sweep.py", __doc__)
    add, sizes = parser.add_argument, trial.list_of(config.SIZE)
    techniques = trial.list_of(str, list(TECHNIQUES))
    add("--techniques", type=techniques, help="default: single,dp,ddp, on one GPU single")
    add("--batch-sizes", type=sizes, default=[config.DEFAULT_BATCH_SIZE], help="global: 96,384,...")
    add("--epochs", type=trial.list_of(config.POSITIVE), default=EPOCHS, help="0.25,0.3,...5")
    add("--seeds", type=trial.list_of(config.COUNT), default=[0, 1, 2], help="0,1,2")
    add("--goal", type=config.number(float, high=100), help="mean accuracy of the seeds, per cent")
    args = trial.parse_args(parser, argv, "--batch-size --epochs --seed")
    args.epochs = sorted(set(args.epochs))
    # Replicas and ranks can share a core, but not a GPU.
    most = 2 if args.device == "cpu" else args.available
    possible = [name for name, devices in TECHNIQUES.items() if devices <= most]
    args.techniques = args.techniques or possible
    if missing := [name for name in args.techniques if name not in possible]:
        parser.error(f"--techniques {missing[0]} needs two GPUs, and there is one: try single")
    odd = [size for size in args.batch_sizes if size % 2]
    if odd and args.techniques != ["single"]:
        parser.error(f"--batch-sizes {odd[0]} is odd: two devices have to share it")
    return args


def train(key: Key, args: argparse.Namespace) -> list[float]:
    """Return the result of one run. A run that diverged took no time."""
    technique, batch_size, epochs, seed = key
    devices = TECHNIQUES[technique]
    flags = {"--batch-size": batch_size // devices, "--epochs": f"{epochs:g}", "--seed": seed}
    commands, begin = trial.build_commands(technique, devices, args, flags), time.monotonic()
    try:
        [summary] = trial.train(commands, args.time_limit)
    except trial.TrialError as error:
        if "the loss is nan" in str(error) or "not finite" in str(error):
            return [GUESSING, 0.0, 0.0]
        raise
    return [summary["test_accuracy"], summary["train_seconds"], time.monotonic() - begin]


def sweep(args: argparse.Namespace, found: Found) -> None:
    """Make the runs, and add them to ``found``."""
    names = [(t, size) for t in args.techniques for size in args.batch_sizes]
    total = len(names) * len(args.epochs) * len(args.seeds)
    with tqdm(total=total, disable=None, dynamic_ncols=True, leave=False) as bar:
        for technique, batch_size in names:
            for epochs in args.epochs:
                keys = [(technique, batch_size, epochs, seed) for seed in args.seeds]
                for key in keys:
                    bar.set_description_str(" ".join(map(str, key)), refresh=True)
                    found[key] = train(key, args)
                    bar.update()
                if args.goal and mean(found[key][0] for key in keys) >= args.goal / 100:
                    break


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    # The sum of shares of 10,000 images is not exact, but 99.00 % has to be 99 %.
    return round(sum(numbers) / len(numbers), 8)


def table(found: Found, goal: float | None) -> str:
    """Return a row for each technique, batch and length: means and medians with their ranges."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for technique, size, epochs in dict.fromkeys(key[:3] for key in found):
        of_seeds = [v for key, v in found.items() if key[:3] == (technique, size, epochs)]
        accuracies, train, total = zip(*of_seeds, strict=True)
        middle, seconds = 100 * mean(accuracies), trial.spread(total)
        row = (
            *(technique, f"{size:,}", f"{epochs:g}", f"{middle:.3f}"),
            f"{100 * min(accuracies):.2f}-{100 * max(accuracies):.2f}",
            *(f"{trial.spread(train)['median']:.1f}", f"{seconds['median']:.1f}"),
            f"{seconds['min']:.1f}-{seconds['max']:.1f}",
            "reached" if goal and middle >= goal else "",
        )
        rows.append(row)
    return compare.table(rows)


def run(args: argparse.Namespace) -> int:
    trial.choose_dataset(args)
    found: Found = {}
    describe_others, status = trial.watch_others(), 0
    try:
        status = 130 if trial.is_interrupted(sweep, args, found) else 0
    except trial.TrialError as error:
        status = error.exit_status
        print(f"sweep.py: error: {error}; these are the runs before it", file=sys.stderr)
    if found:
        print(f"{trial.describe_table(args)}\n{table(found, args.goal)}")
        print(describe_others(), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(trial.start(run, parse_args(sys.argv[1:])))
