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
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import compare
import torch
import trial
from utils.training import config
from utils.training.timing import WARMUP_STEPS

import data
from utils.device import select_devices, usable_cores
from utils.errors import UsageError
from utils.files import write_json

LEAST_STEPS = 20  # timed
QUICK = {"rounds": 1, "seconds": 2.0, "global_batch_sizes": [256], "batch_sizes": []}
# Flags of the scripts that the benchmark sets itself.
OWN = (
    *("--dataset", "--data-dir", "--device", "--devices", "--replicas", "--nprocs", "--run-dir"),
    *("--model", "--batch-size", "--max-steps", "--epochs", "--lr-scaling", "--threads"),
    "--num-workers",
)
Row = dict[str, Any]
HEADINGS = ("", "devices", "threads", "images/s", "min-max", "ratio", "MB")
READING = """\
How to read it:
  strong, weak  the global batch stays the same, or the batch of each device does
  devices       GPUs, or else cores. Then a last row gives one process all of them
  dp            on GPUs all copies except the first lose channels_last
  threads       processes x CPU threads
  images/s      of training, over all devices: median and range of the rounds
  ratio         to one device, the first row: median of the rounds
  MB            the most that one process held. On a GPU what torch allocated for tensors: the
                driver's context and NCCL's buffers come on top, and nvidia-smi shows them
If two ranges overlap, this run has seen no difference. GPUs from Ampere on compute convolutions in
TF32 by default. On older ones --amp bf16 is slow, since it is emulated there: take fp16."""


class Setting(NamedTuple):
    """What is run: ``threads`` of all processes together, ``batch_size`` of one device."""

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


def list_of(kind: Any, among: Sequence[Any] | None = None) -> Any:
    """Return an argparse type: values of a kind (one of ``among``), separated by commas."""

    def parse(text: str) -> list[Any]:
        values = [kind(part) for part in text.split(",") if part]
        if unknown := [value for value in values if among is not None and value not in among]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(among or ())}")
        return values

    return parse


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = trial.build_parser("benchmark.py", __doc__)
    add, sizes = parser.add_argument, list_of(config.SIZE)
    add("--quick", action="store_true", help="one round of one batch size")
    add("--models", type=list_of(config.MODEL), default=["convnet"], help="convnet")
    add("--global-batch-sizes", type=sizes, default=[128, 512], help="strong scaling: 128,512")
    add("--batch-sizes", type=sizes, default=[256], help="weak scaling, per device: 256")
    add("--counts", type=sizes, help="numbers of devices for DP and DDP, such as 2,4,8")
    add("--threads", type=config.SIZE, help="per device (default: 1, with GPUs an equal share)")
    add("--num-workers", type=config.COUNT, default=0, help="loader workers per device")
    add("--rounds", type=config.SIZE, default=3)
    add("--seconds", type=config.POSITIVE, default=3.0, help="seconds to time in a run")
    add("--time-limit", type=config.POSITIVE, default=300.0, help="seconds for a run")
    add("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto")
    add("--dataset", type=config.DATASET, default="mnist")
    add("--data-dir", type=config.PATH, default="data")
    add("--output", type=config.PATH, help="folder (default: a new one below runs/)")
    end = argv.index("--") if "--" in argv else len(argv)
    if "--quick" in argv[:end]:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv[:end])
    args.flags = argv[end + 1 :]
    for word in args.flags:
        if word.partition("=")[0] in OWN:
            parser.error(f"{word} after -- is set by the benchmark itself")
    try:
        choose_devices(args)
    except UsageError as error:
        parser.error(str(error))
    return args


def choose_devices(args: argparse.Namespace) -> None:
    """Fill in the device, the numbers of devices, and the threads of each.

    Raises:
        UsageError: this machine cannot do what was asked for.
    """
    devices = select_devices(args.device)
    args.device = devices[0].type
    available = usable_cores() if args.device == "cpu" else len(devices)
    most = 2 ** (available.bit_length() - 1)  # a power of two, by which batches can be divided
    if args.device == "cpu":
        most = min(8, max(2, most))
    args.counts = sorted(set(args.counts or [most]))
    if not args.models or not args.global_batch_sizes + args.batch_sizes:
        raise UsageError("nothing to measure: name models and batch sizes")
    if args.device != "cpu" and args.counts[-1] > available:
        raise UsageError(f"--counts {args.counts[-1]}: there are {available} {args.device} devices")
    each = 1 if args.device == "cpu" else max(1, usable_cores() // args.counts[-1])
    args.threads = args.threads or each
    for count in args.counts:
        for size in args.global_batch_sizes:
            if size % count:
                problem = f"{size} cannot be shared out among {count} devices"
                raise UsageError(f"--global-batch-sizes {problem}")


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
                settings += [Setting(t, *several) for t in ("dp", "ddp")]
                if args.device == "cpu":  # what the same cores do without data parallelism
                    settings.append(Setting("single", model, 1, several[2], n * several[3]))
            tables.append((scaling, size, settings))
    return tables


def build_command(setting: Setting, args: argparse.Namespace, steps: int) -> list[Any]:
    """Return the command of a setting."""
    technique, devices = setting.technique, setting.devices
    per_epoch = args.train_size // (devices * setting.batch_size)
    flags = {
        "--dataset": args.dataset,
        "--data-dir": args.data_dir,
        "--device": args.device,
        "--model": setting.model,
        "--batch-size": setting.batch_size,
        "--max-steps": steps,
        "--epochs": -(-steps // per_epoch),
        "--lr-scaling": "none",  # so that large batches do not diverge
        "--threads": setting.threads // setting.processes,
        "--num-workers": args.num_workers * devices // setting.processes,
    }
    if args.device != "cpu":
        flags["--devices"] = ",".join(map(str, range(devices)))
    elif technique == "dp":
        flags["--replicas"] = devices
    if technique == "ddp":
        flags["--nprocs"] = devices
    start = [sys.executable, trial.ROOT / f"train_{technique}.py", *args.flags]
    return [*start, "--no-tensorboard", "--no-progress", *chain(*flags.items())]


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
            summary = trial.train(build_command(setting, args, steps), args.time_limit)
        except trial.TrialError as error:
            record["failure"] = str(error)
            tqdm.write(f"benchmark.py: {setting}: {error}", file=sys.stderr)
            continue
        speed = summary["train_images_per_second"] or 0.0
        if number < 0:
            images[setting.model] = speed * args.seconds
        else:
            record["speeds"][number] = speed
            record["peak_memory_bytes"] = summary["peak_memory_bytes"]


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
    values = list(rounds.values())
    if not values:
        return None
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {**found, "rounds": rounds}


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


def describe(args: argparse.Namespace) -> str:
    """Return what the figures depend on, in one line."""
    cpu = platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line[13:] for line in lines if line.startswith("model name\t: "))
    where = f"{usable_cores()} cores of {cpu}"
    if args.device == "cuda":
        where = ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
    flags = f"; flags: {' '.join(args.flags)}" if args.flags else ""
    date = time.strftime("%Y-%m-%d %H:%M")
    return f"{args.dataset}, {where}, torch {torch.__version__}, {date}{flags}"


def run(args: argparse.Namespace) -> int:
    """Measure, report, and return the exit status."""
    args.train_size = len(data.load_dataset(args.dataset, args.data_dir)[0])
    devices = args.counts[-1]
    largest = max([*args.global_batch_sizes, *(devices * size for size in args.batch_sizes)])
    if args.train_size // largest <= WARMUP_STEPS:
        raise UsageError(f"a global batch of {largest} leaves an epoch of too few steps to time")
    usage = compare.read_usage(os.getpid())
    settings = [setting for _, _, settings in plan(args) for setting in settings]
    found: dict[Setting, Row] = {
        setting: {"speeds": {}, "peak_memory_bytes": [], "failure": ""} for setting in settings
    }
    folder = Path(args.output or time.strftime("runs/benchmark-%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)  # not after minutes of measuring
    interrupted = False
    try:
        run_all(args, found)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: these are the runs that were complete", file=sys.stderr)
    results = {
        "about": describe(args),
        "complete": not interrupted,
        "command": shlex.join(["python", *sys.argv]),
        "rounds": args.rounds,
        "others": compare.describe_others(usage, compare.read_usage(os.getpid())),
        "tables": build_tables(args, found),
    }
    write_json(folder / "benchmark.json", results)
    (folder / "benchmark.txt").write_text(text(results) + "\n")
    print(f"{text(results)}\n\nresults in {folder}/benchmark.json and benchmark.txt")
    return 130 if interrupted else int(any(record["failure"] for record in found.values()))


if __name__ == "__main__":
    sys.exit(trial.start(run, parse_args(sys.argv[1:])))
