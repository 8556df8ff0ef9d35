"""Measure one device, DP and DDP on this machine: which is faster, and by how much?

    python scripts/tools/benchmark.py --quick
    python scripts/tools/benchmark.py --models convnet,resnet18 --counts 2,4 -- --amp bf16

It starts the training scripts themselves, in turns, and reads what they measured. A device is a GPU
or, without one, a CPU core. The techniques have the same global batch (strong scaling) or the same
batch on each device (weak scaling), the same threads and loader workers for each device, and the
same order of the data. What stands after -- goes to the scripts. Results go to a new folder below
runs/, also after Ctrl-C.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import compare
import trial

import models
from utils import config
from utils.device import usable_cores
from utils.errors import UsageError
from utils.files import write_json
from utils.throughput import WARMUP_STEPS

LEAST_STEPS = 20  # timed
QUICK = {"rounds": 1, "seconds": 2.0, "global_batch_sizes": [256], "batch_sizes": []}
OWN = "--model --batch-size --max-steps --epochs --lr-scaling --threads --num-workers"
Row = dict[str, Any]
HEADINGS = ("", "devices", "threads", "images/s", "min-max", "ratio", "MB")
READING = """\
How to read it:
  strong, weak  the global batch stays the same, or the batch of each device does
  devices       GPUs, or else cores. Then a last row gives one process all of them
  dp            on GPUs all copies except the first lose channels_last
  limit         independent single runs: what DP and DDP could reach at most
  threads       processes x CPU threads
  images/s      of training, over all devices: median and range of the rounds
  ratio         to one device, the first row: median of the rounds
  MB            the most that one process held, on a GPU what torch allocated
If two ranges overlap, this run has seen no difference."""


class Setting(NamedTuple):
    """What is run: ``threads`` of all processes together, ``batch_size`` of one device."""

    technique: str
    model: str
    devices: int
    threads: int
    batch_size: int

    @property
    def processes(self) -> int:
        return self.devices if self.technique in ("ddp", "limit") else 1

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.technique} {self.model} {self.devices} x {self.batch_size}, {threads}"


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = trial.build_measuring_parser("benchmark.py", __doc__)
    add, sizes = parser.add_argument, trial.list_of(config.SIZE)
    add("--quick", action="store_true", help="one round of one batch size")
    add("--models", type=trial.list_of(str, [*models.MODELS]), default=["convnet"], help="convnet")
    add("--global-batch-sizes", type=sizes, default=[128, 512], help="strong scaling: 128,512")
    add("--batch-sizes", type=sizes, default=[256], help="weak scaling, per device: 256")
    add("--counts", type=sizes, help="numbers of devices for DP and DDP, such as 2,4,8")
    add("--threads", type=config.SIZE, help="per device (default: 1, with GPUs an equal share)")
    add("--num-workers", type=config.COUNT, default=0, help="loader workers per device")
    add("--rounds", type=config.SIZE, default=3)
    add("--seconds", type=config.POSITIVE, default=3.0, help="seconds to time in a run")
    add("--output", type=Path, help="folder (default: a new one below runs/)")
    if "--quick" in argv[: argv.index("--") if "--" in argv else None]:
        parser.set_defaults(**QUICK)
    parser.set_defaults(time_limit=300.0)
    args = trial.parse_args(parser, argv, OWN)
    if problem := choose_devices(args):
        parser.error(problem)
    return args


def choose_devices(args: argparse.Namespace) -> str | None:
    """Fill in the numbers of devices and threads. Return what this machine cannot do, or None."""
    sizes, available = args.global_batch_sizes, args.available
    most = 2 ** (available.bit_length() - 1)  # a power of two, by which batches can be divided
    if args.device == "cpu":
        most = min(8, max(2, most))
    args.counts = sorted(set(args.counts or [most]))
    if not args.models or not sizes + args.batch_sizes:
        return "nothing to measure: name models and batch sizes"
    if args.device != "cpu" and args.counts[-1] > available:
        return f"--counts {args.counts[-1]}: there are {available} {args.device} devices"
    each = 1 if args.device == "cpu" else max(1, usable_cores() // args.counts[-1])
    args.threads = args.threads or each
    for count in args.counts:
        for size in sizes:
            if size % count:
                return f"--global-batch-sizes {size} cannot be shared out among {count} devices"
    return None


def plan(args: argparse.Namespace) -> list[tuple[str, int, list[Setting]]]:
    """Return the tables: scaling, batch, and settings. The first setting is one device."""
    tables = []
    for model in args.models:
        sizes = [("strong", size) for size in args.global_batch_sizes]
        for scaling, size in [*sizes, *(("weak", size) for size in args.batch_sizes)]:
            one = (model, 1, args.threads, size)
            settings = [Setting("single", *one)]
            for n in args.counts:
                several = (model, n, n * args.threads, size // n if scaling == "strong" else size)
                settings += [Setting(t, *several) for t in ("dp", "ddp", "limit")]
                if args.device == "cpu":  # what the same cores do without data parallelism
                    settings.append(Setting("single", model, 1, several[2], n * several[3]))
            tables.append((scaling, size, settings))
    return tables


def build_commands(setting: Setting, args: argparse.Namespace, steps: int) -> list[list[Any]]:
    """Return the commands of a setting."""
    per_epoch = args.train_size // (setting.devices * setting.batch_size)
    flags = {
        "--model": setting.model,
        "--batch-size": setting.batch_size,
        "--max-steps": steps,
        "--epochs": -(-steps // per_epoch),
        "--lr-scaling": "none",  # so that large batches do not diverge
        "--threads": setting.threads // setting.processes,
        "--num-workers": args.num_workers * setting.devices // setting.processes,
    }
    commands = trial.build_commands(setting.technique, setting.devices, args, flags)
    return [[*command, "--no-tensorboard", "--no-progress"] for command in commands]


def run_all(args: argparse.Namespace, found: dict[Setting, Row]) -> None:
    """Run each setting once a round, and add the results to ``found``. Safe to interrupt."""
    first = {setting.model: setting for setting in reversed(found)}  # one device
    # One run of each model finds out how many images take --seconds, and fills the page cache.
    runs = [(-1, setting) for setting in first.values()]
    for number in range(args.rounds):  # in turns backwards, so that a drift favours none
        runs += [(number, setting) for setting in list(found)[:: 1 if number % 2 == 0 else -1]]
    images: dict[str, float] = {}
    bar = tqdm(runs, disable=None, dynamic_ncols=True, leave=False)
    for number, setting in bar:
        bar.set_description_str(str(setting), refresh=True)
        record, size = found[setting], setting.devices * setting.batch_size
        if record["failure"]:  # in a round before
            continue
        steps = WARMUP_STEPS + max(LEAST_STEPS, round(images.get(setting.model, 0) / size))
        try:
            summaries = trial.train(build_commands(setting, args, steps), args.time_limit)
        except trial.TrialError as error:
            record["failure"] = str(error)
            tqdm.write(f"benchmark.py: {setting}: {error}", file=sys.stderr)
            continue
        speed = sum(summary["train_images_per_second"] or 0.0 for summary in summaries)
        if number < 0:
            images[setting.model] = speed * args.seconds
        else:
            sizes = [size for summary in summaries for size in summary["peak_memory_bytes"]]
            record["speeds"][number], record["peak_memory_bytes"] = speed, sizes


def build_tables(args: argparse.Namespace, found: dict[Setting, Row]) -> dict[str, list[Row]]:
    """Return the rows of each table, by its title."""
    tables = {}
    for scaling, size, settings in plan(args):
        share = "in all" if scaling == "strong" else "on each device"
        title = f"{scaling} scaling: {settings[0].model}, {size} images a step {share}"
        rows = tables[title] = list[Row]()
        for setting in settings:
            record = found[setting]

            def over(other: Setting, record: Row = record) -> Row | None:
                """Divide round by round, since both had the same load then."""
                ours, theirs = record["speeds"], found[other]["speeds"]
                return summarize({r: ours[r] / theirs[r] for r in ours if r in theirs})

            row = {"scaling": scaling, "size": size, **setting._asdict(), **record}
            row |= {"processes": setting.processes, "ratio": over(settings[0])}
            row["images_per_second"] = summarize(record["speeds"])
            if setting.technique == "ddp":
                row["to_dp"] = over(setting._replace(technique="dp"))
            rows.append(row)
    return tables


def summarize(rounds: dict[int, float]) -> Row | None:
    """Return median, min, max and the values of the rounds, or None if there are none."""
    return {**trial.spread([*rounds.values()]), "rounds": rounds} if rounds else None


def cells(row: Row) -> list[str]:
    """Return a row of a table as text, in the order of HEADINGS."""
    threads = f"{row['processes']} x {row['threads'] // row['processes']}"
    own = [row["technique"], str(row["devices"]), threads]
    speed = row["images_per_second"]
    if not speed:
        return [*own, "failed" if row["failure"] else "-", *["-"] * 3]
    return [
        *own,
        f"{speed['median']:,.0f}",
        f"{speed['min']:,.0f}-{speed['max']:,.0f}" if len(speed["rounds"]) > 1 else "-",
        f"{row['ratio']['median']:.2f}" if row["ratio"] else "-",
        f"{max(row['peak_memory_bytes'], default=0) / 2**20:,.0f}",
    ]


def verdicts(rows: list[Row]) -> Iterator[str]:
    """Yield a sentence for each number of devices: DDP against DP, and both against one process."""
    for row in rows:
        found = row.get("to_dp")
        if not found:
            continue
        once = len(found["rounds"]) == 1
        ends = "one round" if once else f"{found['min']:.2f}-{found['max']:.2f}"
        sentence = f"DDP is {found['median']:.2f} x as fast as DP ({ends})"
        if found["min"] <= 1 <= found["max"] and not once:
            sentence = f"no difference between DP and DDP seen in this run ({ends})"
        same = [r for r in rows if r["threads"] == row["threads"] and r["ratio"]]
        best = max(r["ratio"]["max"] for r in same if r["technique"] in ("dp", "ddp"))
        if any(r["technique"] == "single" and r["ratio"]["min"] > best for r in same):
            sentence += "; one process on the same cores is faster"
        elif best < 1:
            sentence += "; one device is faster"
        yield f"{row['devices']} devices: {sentence}"


def text(results: dict[str, Any]) -> str:
    """Return all tables for a terminal of 80 columns, with what they depend on."""
    blocks = [
        "\n".join([title, compare.table([HEADINGS, *map(cells, rows)]), *verdicts(rows)])
        for title, rows in results["tables"].items()
    ]
    blocks.append(f"{results['about']}; rounds: {results['rounds']}\n{results['others']}".rstrip())
    return "\n\n".join([*blocks, READING])


def run(args: argparse.Namespace) -> int:
    """Measure, report, and return the exit status."""
    args.train_size = trial.choose_dataset(args)
    devices = args.counts[-1]
    largest = max([*args.global_batch_sizes, *(devices * size for size in args.batch_sizes)])
    if args.train_size // largest <= WARMUP_STEPS:
        raise UsageError(f"a global batch of {largest} leaves an epoch of too few steps to time")
    describe_others = trial.watch_others()
    settings = [setting for _, _, settings in plan(args) for setting in settings]
    found: dict[Setting, Row] = {
        setting: {"speeds": {}, "peak_memory_bytes": [], "failure": ""} for setting in settings
    }
    folder = args.output or Path("runs", time.strftime("benchmark-%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)  # not after minutes of measuring
    interrupted = trial.is_interrupted(run_all, args, found)
    results = {
        "about": trial.describe_table(args),
        "complete": not interrupted,
        "command": shlex.join(["python", *sys.argv]),
        "rounds": args.rounds,
        "machine": trial.describe_machine(),
        "others": describe_others(),
        "tables": build_tables(args, found),
    }
    write_json(folder / "benchmark.json", results)
    (folder / "benchmark.txt").write_text(text(results) + "\n")
    print(f"{text(results)}\n\nresults in {folder}/benchmark.json and benchmark.txt")
    return 130 if interrupted else int(any(record["failure"] for record in found.values()))


if __name__ == "__main__":
    sys.exit(trial.start(run, parse_args(sys.argv[1:])))
