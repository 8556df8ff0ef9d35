"""Measure one device, DP and DDP on this machine: which is faster, and by how much?

    python scripts/tools/benchmark.py
    python scripts/tools/benchmark.py --quick
    python scripts/tools/benchmark.py --models convnet,resnet18 --counts 2,4 -- --amp bf16
    python scripts/tools/benchmark.py --compare before/benchmark.json after/benchmark.json

Starts the training scripts themselves, in turns, and reads what they measured. Equal between the
techniques: the global batch (strong scaling) or the batch of a device (weak scaling), all CPU
threads and all loader workers together, and the order of the data. What stands after -- goes to
the scripts. Results go to a new folder below runs/, also after Ctrl-C.
"""

import argparse
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import report
import trial
from settings import Setting, Table, command, plan

import data
import models
from utils import config
from utils.datasets.sources import TRAIN_SIZE
from utils.device import select_devices, usable_cores
from utils.errors import UsageError, guard
from utils.files import write_json
from utils.throughput import WARMUP_STEPS

CPU_COUNTS = (2, 4, 8)  # by default, as far as they divide the threads
LEAST_STEPS = 20  # timed
CALIBRATION_STEPS = 15
PROFILED_STEPS = 20  # the profiler takes the 8th to the 17th
QUICK: dict[str, Any] = {
    "rounds": 1,
    "seconds": 2.0,
    "global_batch_sizes": [256],
    "batch_sizes": [],
}


@dataclass
class Measured:
    """What was found of a setting; speeds in images/s, by round."""

    speeds: dict[int, float] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)
    shares: dict[str, float] = field(default_factory=dict)
    failure: str = ""


def list_of(kind: Any) -> Any:
    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",") if part]

    return parse


def model_name(text: str) -> str:
    if text not in models.MODELS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(models.MODELS)}")
    return text


def parse_args(argv: list[str]) -> argparse.Namespace:
    end = argv.index("--") if "--" in argv else len(argv)
    parser = config.OneLineParser(
        prog="benchmark.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sizes = list_of(config.SIZE)
    parser.add_argument("--quick", action="store_true", help="one round of one batch size")
    parser.add_argument("--models", type=list_of(model_name), default=["convnet"])
    parser.add_argument(
        "--global-batch-sizes", type=sizes, default=[128, 512], help="strong scaling (128,512)"
    )
    parser.add_argument(
        "--batch-sizes", type=sizes, default=[256], help="of a device: weak scaling (256)"
    )
    parser.add_argument("--counts", type=sizes, help="of devices for DP and DDP: 2,4,...")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto")
    parser.add_argument("--threads", type=config.SIZE, help="of all processes (default: cores)")
    parser.add_argument(
        "--num-workers", type=config.COUNT, default=0, help="of all processes: loader workers"
    )
    parser.add_argument("--dataset", choices=list(data.SOURCES), help="mnist, or what is there")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--rounds", type=config.SIZE, default=3)
    parser.add_argument("--seconds", type=config.POSITIVE, default=3.0, help="timed in a run")
    parser.add_argument("--steps", type=config.SIZE, help="timed in a run, rather than --seconds")
    parser.add_argument("--time-limit", type=config.POSITIVE, default=300.0, help="of a run")
    parser.add_argument("--output", type=Path, help="folder (default: a new one below runs/)")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), type=Path, help="two JSON files")
    if "--quick" in argv[:end]:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv[:end])
    args.flags = argv[end + 1 :]
    problem = None if args.compare else choose_devices(args)
    if problem:
        parser.error(problem)
    return args


def choose_devices(args: argparse.Namespace) -> str | None:
    """Fill in kind and numbers of devices, and threads; return what cannot be had, or None."""
    try:
        devices = select_devices(args.device)
    except UsageError as error:
        return str(error)
    args.device, available = devices[0].type, len(devices)
    cores = args.threads or usable_cores()
    sizes = args.global_batch_sizes
    if args.device == "cpu":
        args.threads = args.threads or max(2, cores - cores % 2)
        args.counts = args.counts or [n for n in CPU_COUNTS if args.threads % n == 0]
    else:
        powers = {2**i for i in range(1, 10) if 2**i < available}
        fitting = {n for n in powers | {available} if all(size % n == 0 for size in sizes)}
        args.counts = args.counts or sorted(fitting) or [available]
        args.threads = args.threads or max(args.counts) * max(1, cores // max(args.counts))
        if max(args.counts) > available:
            return f"--counts {max(args.counts)}: there are {available} {args.device} devices"
    args.counts = sorted(set(args.counts))
    for count in args.counts:
        for name in ("threads", "num_workers"):
            if getattr(args, name) % count:
                flag = f"--{name.replace('_', '-')}"
                return f"{flag} {getattr(args, name)} cannot be shared out among {count} processes"
        for size in sizes:
            if size % count:
                return f"--global-batch-sizes {size} cannot be shared out among {count} devices"
    if not args.counts or not args.models or not sizes + args.batch_sizes:
        return "nothing to measure: name models, counts and batch sizes"
    largest = max([*sizes, *(max(args.counts) * n for n in args.batch_sizes)])
    if TRAIN_SIZE // largest <= WARMUP_STEPS:
        return f"a global batch of {largest} leaves an epoch of too few steps to be timed"
    return None


class Benchmark:
    """Runs the settings of all tables, each only once a round, and keeps what was found."""

    def __init__(self, args: argparse.Namespace, tables: list[Table]) -> None:
        self.args = args
        self.tables = tables
        self.found = {setting: Measured() for table in tables for setting in table.settings}
        # Never of a run that is timed, and of one device there is no communication to see.
        self.profiled = [s for s in self.found if s.technique != "single" and can_profile()]
        runs = len(args.models) + len(self.found) * args.rounds + len(self.profiled)
        self.bar = tqdm(total=runs, disable=None, dynamic_ncols=True, leave=False)

    def run(self) -> None:
        """Measure everything; safe to interrupt."""
        images = {model: self.calibrate(model) for model in self.args.models}
        for number, setting in trial.in_turns(list(self.found), self.args.rounds):
            size = setting.devices * setting.batch_size
            steps = self.args.steps or max(LEAST_STEPS, round(images[setting.model] / size))
            outcome = self.train(setting, WARMUP_STEPS + steps)
            if outcome:
                speed = outcome.summary["train_images_per_second"]
                self.found[setting].speeds[number] = speed
                self.found[setting].memory = outcome.summary["peak_memory_bytes"]
        for setting in self.profiled:
            outcome = self.train(setting, PROFILED_STEPS, "--profile")
            self.found[setting].shares = outcome.shares if outcome else {}

    def calibrate(self, model: str) -> float:
        """Return the images of a run that takes ``--seconds`` on one device.

        This run also reads files and libraries into the page cache, and counts for nothing else.
        """
        single = next(setting for setting in self.found if setting.model == model)
        outcome = self.train(single, WARMUP_STEPS + (self.args.steps or CALIBRATION_STEPS))
        speed = outcome.summary["train_images_per_second"] if outcome else 0.0
        return speed * self.args.seconds

    def train(self, setting: Setting, steps: int, *more: str) -> trial.Outcome | None:
        """Run a setting; None if it fails now or has failed before."""
        measured = self.found[setting]
        self.bar.set_description_str(str(setting), refresh=True)
        try:
            if measured.failure:
                return None
            return trial.train(command(setting, self.args, steps, *more), self.args.time_limit)
        except trial.TrialError as error:
            measured.failure = str(error)
            tqdm.write(f"benchmark.py: {setting}: {error}", file=sys.stderr)
            return None
        finally:
            self.bar.update()

    def results(self) -> dict[str, Any]:
        """Return what was found: a row for each setting of each table, and DDP against DP."""
        rows, verdicts = [], []
        for table in self.tables:
            on_cpu = self.args.device == "cpu"
            found = [self.found[setting] for setting in table.settings]
            # A device of the CPU is a thread: as many of them as a setting has, working alone.
            unit = found[1 if on_cpu and self.args.threads > 1 else 0]
            for setting, measured in zip(table.settings, found, strict=True):
                units = setting.threads if on_cpu else setting.devices
                row = {
                    "scaling": table.scaling,
                    **setting._asdict(),
                    "processes": setting.processes,
                    "global_batch_size": setting.devices * setting.batch_size,
                    "images_per_second": summarize(measured.speeds),
                    "ratio": summarize(quotients(measured, found[0])),
                    "efficiency": summarize(quotients(measured, unit, units)),
                    "peak_memory_bytes": measured.memory,
                    "shares": measured.shares,
                    "failure": measured.failure,
                }
                rows.append(row)
            by_name = {
                (s.technique, s.devices): m for s, m in zip(table.settings, found, strict=True)
            }
            for count in self.args.counts:
                verdict = {
                    "scaling": table.scaling,
                    "model": table.model,
                    "size": table.batch_size,
                    "devices": count,
                    "ddp_to_dp": summarize(quotients(by_name["ddp", count], by_name["dp", count])),
                }
                verdicts.append(verdict)
        return {"rows": rows, "verdicts": verdicts}


def can_profile() -> bool:
    """Tell whether the scripts' --help lists --profile."""
    return "--profile" in config.build_parser("ddp", None).format_help()


def quotients(measured: Measured, baseline: Measured, units: int = 1) -> dict[int, float]:
    """Return speed over ``units`` times the baseline's, round by round: both had one load then."""
    both = measured.speeds.keys() & baseline.speeds.keys()
    return {r: measured.speeds[r] / (units * baseline.speeds[r]) for r in sorted(both)}


def summarize(values: dict[int, float]) -> dict[str, Any] | None:
    """Return median, min, max and the values themselves, by round; None where there are none."""
    return {**trial.spread(list(values.values())), "rounds": values} if values else None


def measure(args: argparse.Namespace) -> int:
    """Measure, report, and return the exit status."""
    args.dataset, remark = trial.choose_dataset(args.dataset, args.data_dir)
    if remark:
        print(remark, file=sys.stderr)
    begin, machine = time.strftime("%Y-%m-%d %H:%M:%S"), trial.describe_machine()
    neighbours = trial.Neighbours()
    folder = args.output or Path("runs", time.strftime("benchmark-%Y%m%d-%H%M%S"))
    folder.mkdir(parents=True, exist_ok=True)  # not after minutes of measuring
    benchmark = Benchmark(args, plan(args))
    interrupted = False
    try:
        benchmark.run()
    except KeyboardInterrupt:
        interrupted = True
    benchmark.bar.close()
    share = neighbours.tell()
    results = {
        "version": 1,
        "begin": begin,
        "complete": not interrupted,
        "command": shlex.join(["python", "scripts/tools/benchmark.py", *sys.argv[1:]]),
        "dataset": args.dataset,
        "device": args.device,
        "rounds": args.rounds,
        "num_workers": args.num_workers,
        "flags": args.flags,
        "machine": machine,
        "others_share": share,
        **benchmark.results(),
    }
    write_json(folder / "benchmark.json", results)
    (folder / "benchmark.md").write_text(report.markdown(results))
    chart = report.draw(results, folder / "benchmark.png")
    print(report.text(results))
    print(f"\n{chart}\nresults in {folder}/benchmark.json and benchmark.md")
    if interrupted:
        print("benchmark.py: interrupted: these are the runs that were complete", file=sys.stderr)
        return 130
    return int(any(row["failure"] for row in results["rows"]))


def main() -> int:
    args = parse_args(sys.argv[1:])
    trial.raise_on_sigterm()
    return guard(report.compare if args.compare else measure, args)


if __name__ == "__main__":
    sys.exit(main())
