"""Find the shortest training that reaches an accuracy, and how long it takes: time to accuracy.

    python scripts/tools/time_to_accuracy.py
    python scripts/tools/time_to_accuracy.py --recipe
    python scripts/tools/time_to_accuracy.py --goal 99.5 --epochs 3,4,5 -- --amp bf16

For one device, DP with two replicas and DDP with two processes, at the same global batch: lengths
from --epochs, upwards, with each seed, until the mean of their accuracies reaches the goal. A
training is timed as its user waits for it, from the command to its end; `start` of that is until
the end of the first optimizer step, `train` is in the epochs; evaluation and saving are the rest.
With --recipe, PyTorch's own example is timed in between, as official_recipe.py does. What follows
`--` goes to the scripts.

As in MLPerf and DAWNBench the accuracy is that of the test set, and it ends the search. The result
says how soon these settings get there. It is no estimate of how well the model does on images that
had no part in choosing its length, nor a way to choose other settings.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import official_recipe
import trial

import data
from utils import config
from utils.device import select_devices
from utils.errors import guard
from utils.files import write_json

TECHNIQUES = {"single": 1, "dp": 2, "ddp": 2}  # devices
EPOCHS = [0.25, 0.3, 0.35, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5]
PERCENT = config.number(float, above=0, most=100)
HEADER = "            epochs  accuracy, %           start     train     total, s"


def list_of(kind: Any) -> Any:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    return parse


def technique_name(text: str) -> str:
    if text not in TECHNIQUES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(TECHNIQUES)}")
    return text


def parse_args(argv: list[str]) -> argparse.Namespace:
    end = argv.index("--") if "--" in argv else len(argv)
    parser = config.OneLineParser(
        prog="time_to_accuracy.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    lengths = ",".join(f"{epochs:g}" for epochs in EPOCHS)
    add = parser.add_argument
    add("--goal", type=PERCENT, default=99.0, help="per cent, in the mean of the seeds (99.0)")
    add("--epochs", type=list_of(config.POSITIVE), default=EPOCHS, help=lengths)
    add("--seeds", type=list_of(config.COUNT), default=[0, 1, 2], help="0,1,2")
    add("--techniques", type=list_of(technique_name), default=list(TECHNIQUES))
    add("--global-batch-size", type=config.SIZE, default=config.DEFAULT_BATCH_SIZE)
    add("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto")
    add("--recipe", action="store_true", help="also time the official recipe, extrapolated")
    add("--recipe-steps", type=config.SIZE, default=200, help="of it that are timed")
    add("--dataset", choices=list(data.SOURCES), help="mnist, or what is there")
    add("--data-dir", default="data")
    add("--time-limit", type=config.POSITIVE, default=3600.0, help="of a training")
    add("--json", type=Path, metavar="FILE", help="write all values there")
    args = parser.parse_args(argv[:end])
    args.epochs, args.flags = sorted(set(args.epochs)), argv[end + 1 :]
    if args.global_batch_size % 2:
        parser.error(f"--global-batch-size {args.global_batch_size} is odd: two have to share it")
    if args.recipe and args.goal != 100 * official_recipe.GOAL:
        parser.error(f"--recipe is timed to {official_recipe.GOAL:.0%}: leave out --goal")
    return args


def command(args: argparse.Namespace, technique: str, epochs: float, seed: int) -> list[Any]:
    """Return the command of a training."""
    devices = TECHNIQUES[technique]
    flags: dict[str, Any] = {
        "--epochs": f"{epochs:g}",
        "--seed": seed,
        "--batch-size": args.global_batch_size // devices,
        "--device": args.device,
        "--dataset": args.dataset,
        "--data-dir": args.data_dir,
    }
    if args.device != "cpu":
        flags["--devices"] = ",".join(map(str, range(devices)))
    elif technique == "dp":
        flags["--replicas"] = devices
    if technique == "ddp":
        flags["--nprocs"] = devices
    words = [word for pair in flags.items() for word in pair]
    return [sys.executable, trial.ROOT / f"train_{technique}.py", *words, *args.flags]


def take(args: argparse.Namespace, technique: str, epochs: float) -> dict[str, Any]:
    """Train for so many epochs with each seed; return what each did, and whether that is enough.

    Raises:
        trial.TrialError: a training failed.
    """
    found: dict[str, Any] = {"technique": technique, "epochs": epochs}
    each: dict[str, list[float]] = {"accuracy": [], "start": [], "train": [], "total": []}
    for seed in args.seeds:
        outcome = trial.train(command(args, technique, epochs, seed), args.time_limit, flags=())
        each["accuracy"].append(100 * outcome.summary["test_accuracy"])
        each["start"].append(outcome.first_step)
        each["train"].append(outcome.summary["train_seconds"])
        each["total"].append(outcome.seconds)
    # Of 10,000 images: the sum of three shares is not exact, and 99.00 is to be 99.
    mean = round(sum(each["accuracy"]) / len(args.seeds), 6)
    return {**found, **each, "mean_accuracy": mean, "reached": mean >= args.goal}


def line_of(row: dict[str, Any]) -> str:
    """Return a line of the table: means of accuracy, medians of seconds, and ranges."""
    accuracies = f"({min(row['accuracy']):.2f}-{max(row['accuracy']):.2f})"
    start, train, total = (trial.spread(row[name]) for name in ("start", "train", "total"))
    extent = f"({total['min']:.1f}-{total['max']:.1f})"
    return (
        f"{row['technique']:10}{row['epochs']:8g}  {row['mean_accuracy']:6.3f} {accuracies:13}"
        f"{start['median']:7.1f}  {train['median']:8.1f}  {total['median']:8.1f} {extent}"
        f"{'  reached' if row['reached'] else ''}"
    )


def time_recipe(args: argparse.Namespace) -> float:
    """Return the seconds that the official recipe would take to 99 %."""
    where = ["--dataset", args.dataset, "--data-dir", args.data_dir]
    flags = ["--recipe", "--steps", args.recipe_steps, *where]
    told = trial.run([sys.executable, official_recipe.__file__, *flags], args.time_limit)
    return json.loads(told)["seconds"]


class Search:
    """The trainings so far.

    Attributes:
        rows: each length that was tried, as ``take`` returns it.
        recipe: the seconds of the official recipe, one for each technique.
        failed: whether something could not be measured.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[dict[str, Any]] = []
        self.recipe: list[float] = []
        self.failed = False

    def run(self) -> None:
        """Find the shortest length of each technique, telling each that is tried."""
        for technique in self.args.techniques:
            try:
                if self.args.recipe:
                    self.recipe.append(time_recipe(self.args))
                for epochs in self.args.epochs:
                    row = take(self.args, technique, epochs)
                    self.rows.append(row)
                    print(line_of(row), flush=True)
                    if row["reached"]:
                        break
                else:
                    print(f"{technique:10}  not reached", flush=True)
            except trial.TrialError as error:
                self.failed = True
                print(f"time_to_accuracy.py: {technique}: {error}", file=sys.stderr)

    def compare(self) -> dict[str, float]:
        """Tell how many times sooner than the official recipe each technique got there."""
        if not self.recipe:
            return {}
        recipe = trial.spread(self.recipe)
        extent = f"({recipe['min']:.1f}-{recipe['max']:.1f})"
        print(
            f"official recipe{official_recipe.EPOCHS:3} {'extrapolated':39}"
            f"{recipe['median']:8.1f} {extent}"
        )
        times = {
            row["technique"]: recipe["median"] / trial.spread(row["total"])["median"]
            for row in self.rows
            if row["reached"]
        }
        for technique, ratio in times.items():
            print(f"{technique:10}  {ratio:.1f} times sooner")
        return times


def run(args: argparse.Namespace) -> int:
    """Search, print what is found and return the exit status."""
    args.dataset, remark = trial.choose_dataset(args.dataset, args.data_dir)
    if remark:
        print(remark, file=sys.stderr)
    args.device = select_devices(args.device)[0].type
    machine, neighbours, search = trial.describe_machine(), trial.Neighbours(), Search(args)
    seeds = ", ".join(map(str, args.seeds))
    print(
        f"{args.goal:g} % of {args.dataset}'s test set in the mean of seeds {seeds},"
        f" {args.global_batch_size} images a step;\nranges in brackets\n{HEADER}",
        flush=True,
    )
    status = 0
    try:
        search.run()
    except KeyboardInterrupt:
        status = 130
        print("time_to_accuracy.py: interrupted: this is what was found", file=sys.stderr)
    times, share = search.compare(), neighbours.tell()
    print(f"{args.device}, {machine['cores']} cores of {machine['cpu']}")
    if args.json:
        found = {"rows": search.rows, "recipe": search.recipe, "times_sooner": times}
        asked = {"goal": args.goal, "seeds": args.seeds, "flags": args.flags}
        write_json(args.json, {"machine": machine, "others_share": share, **asked, **found})
    return status or int(search.failed)


def main() -> int:
    args = parse_args(sys.argv[1:])
    trial.raise_on_sigterm()
    return guard(run, args)


if __name__ == "__main__":
    sys.exit(main())
