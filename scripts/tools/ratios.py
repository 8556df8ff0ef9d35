"""Measure the ratios that this project holds itself to: what its convenience and DDP cost.

    python scripts/tools/ratios.py
    python scripts/tools/ratios.py --only engine,start-ddp --rounds 9

All on the CPU, with convnet and the threads that each line names. The commands take turns, once a
round; a ratio is the median of those of the rounds. The machine should have two cores and nothing
else to do.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import utils.early  # noqa: F401  the bare loop's threads wait as those of the scripts do

import torch
import torch.nn.functional as F
import trial

import data
import models
from utils import config, optim
from utils.datasets.sources import RAW_FILES, TRAIN_SIZE
from utils.device import setup_device, setup_seed
from utils.errors import guard
from utils.files import write_json
from utils.throughput import WARMUP_STEPS

LABEL_SMOOTHING = 0.05  # the default of the scripts
SAMPLE_SECONDS = 0.5  # between looks at the memory of a rank, each of which holds it up
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]


class Figure(NamedTuple):
    """A ratio of two measurements, with the least and the most that is aimed at."""

    text: str
    above: str
    below: str
    least: float | None = None
    most: float | None = None


FIGURES = {
    "engine": Figure(
        "train_single.py, 1 x 2 threads : a bare loop, 1 x 2 threads; batch 128",
        *("speed single 2 128", "speed bare 2 128", 0.95),
    ),
    "engine-1": Figure(
        "train_single.py, 1 x 1 thread : a bare loop, 1 x 1 thread; batch 128",
        *("speed single 1 128", "speed bare 1 128", 0.95),
    ),
    "ddp": Figure(
        "DDP, 2 x 1 thread : one process, 1 x 1 thread; global batch 512",
        *("speed ddp2 1 512", "speed single 1 512", 1.75),
    ),
    "ddp-threads": Figure(
        "DDP, 2 x 1 thread : one process, 1 x 2 threads; global batch 512",
        *("speed ddp2 1 512", "speed single 2 512", 0.9),
    ),
    "ddp-limit": Figure(
        "DDP, 2 x 1 thread : two processes that share nothing, 1 x 1 thread; 512 images in all",
        *("speed ddp2 1 512", "speed apart 1 512", 0.9),
    ),
    "ddp-alone": Figure(
        "DDP, world of one, 1 x 2 threads : one process, 1 x 2 threads; batch 512",
        *("speed ddp1 2 512", "speed single 2 512", 0.95, 1.05),
    ),
    "dp": Figure(
        "DP, 2 replicas, 1 x 2 threads : DDP, 2 x 1 thread; global batch 512",
        *("speed dp 2 512", "speed ddp2 1 512"),
    ),
    "start": Figure(
        "start to first step, train_single.py : import torch, torch._dynamo",
        *("start single", "start import", None, 1.15),
    ),
    "start-ddp": Figure(
        "start to first step, torchrun, 2 processes : import torch, torch._dynamo",
        *("start ddp", "start import", None, 2.0),
    ),
    "memory": Figure(
        "private memory of DDP's second rank in the data set : the data set's size",
        *("memory data", "memory set", None, 0.05),
    ),
}


def bare_loop(args: argparse.Namespace) -> float:
    """Return images/s of forward, backward and step over tensors that are ready, nothing else."""
    threads, batch_size, steps = args.bare
    # The threads and the allocator of the scripts: what is left is the work around the model.
    setup_device(torch.device("cpu"), threads)
    setup_seed(0)
    train_set, _ = data.load_dataset(args.dataset, args.data_dir)
    chosen = train_set[: batch_size * steps]
    images, labels = data.Transform(torch.device("cpu"), args.dataset)(*chosen)
    model = models.build_model("convnet").train()
    optimizer = optim.build_optimizer(model, 0.1, 0.9, 5e-4)
    begin = 0.0
    batches = zip(images.split(batch_size), labels.split(batch_size), strict=True)
    for step, (batch, targets) in enumerate(batches):
        if step == WARMUP_STEPS:
            begin = time.perf_counter()
        F.cross_entropy(model(batch), targets, label_smoothing=LABEL_SMOOTHING).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (steps - WARMUP_STEPS) * batch_size / (time.perf_counter() - begin)


class Rounds:
    """Takes the measurements that figures name, each under its name."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.where = ["--dataset", args.dataset, "--data-dir", args.data_dir]

    def measure(self, name: str) -> dict[str, float]:
        """Take one measurement (speed in images/s, start in seconds, memory in bytes)."""
        kind, *words = name.split()
        if kind == "speed":
            technique, threads, size = words[0], int(words[1]), int(words[2])
            return {name: self.speed(technique, threads, size)}
        return {name: self.start(words[0])} if kind == "start" else self.memory()

    def speed(self, technique: str, threads: int, global_batch_size: int) -> float:
        steps = WARMUP_STEPS + max(1, self.args.images // global_batch_size)
        limit = self.args.time_limit
        if technique == "bare":
            bare = ["--bare", threads, global_batch_size, steps]
            return float(trial.run([sys.executable, __file__, *bare, *self.where], limit))
        scripts: dict[str, list[Any]] = {
            "single": ["train_single.py"],
            "apart": ["train_single.py"],  # twice, at the same time
            "dp": ["train_dp.py", "--replicas", 2],
            "ddp1": ["train_ddp.py", "--nprocs", 1],
            "ddp2": ["train_ddp.py", "--nprocs", 2],
        }
        devices = 2 if technique in ("apart", "dp", "ddp2") else 1
        size = ["--batch-size", global_batch_size // devices, "--max-steps", steps]
        command = self.command([], scripts[technique], *size, "--threads", threads)
        commands = [command] * (2 if technique == "apart" else 1)
        outcomes = trial.train_at_once(commands, limit)
        return sum(outcome.summary["train_images_per_second"] for outcome in outcomes)

    def start(self, what: str) -> float:
        if what == "import":
            begin = time.monotonic()
            command = [sys.executable, "-c", "import torch, torch._dynamo"]
            trial.run(command, self.args.time_limit)
            return time.monotonic() - begin
        own = ([], ["train_single.py"]) if what == "single" else (TORCHRUN, ["train_ddp.py"])
        # The second step tells when the first was done.
        command = self.command(*own, "--max-steps", 2)
        return trial.train(command, self.args.time_limit).first_step

    def memory(self) -> dict[str, float]:
        """Look at rank 1 of two while it trains for an epoch."""
        sampler = MemorySampler()
        command = self.command(TORCHRUN, ["train_ddp.py"], "--batch-size", 256, "--threads", 1)
        trial.train(command, self.args.time_limit, sampler)
        if not sampler.samples:
            raise trial.TrialError("rank 1 was not to be seen")
        first, last = sampler.samples[0], sampler.samples[-1]
        path = data.prepare(self.args.dataset, self.args.data_dir) / RAW_FILES[0]
        return {
            "memory data": last["data_private"],
            "memory set": path.stat().st_size,
            "memory data resident": last["data_resident"],
            "memory growth": last["private"] - first["private"],
        }

    def command(self, launcher: list[Any], script: list[Any], *more: Any) -> list[Any]:
        common = ["--device", "cpu", "--lr-scaling", "none", *self.where]
        return [sys.executable, *launcher, trial.ROOT / script[0], *script[1:], *common, *more]


class MemorySampler:
    """Watches the process with RANK=1 below a launcher: its private memory, in bytes."""

    def __init__(self) -> None:
        self.samples: list[dict[str, int]] = []
        self.next = 0.0

    def __call__(self, pid: int) -> None:
        import psutil

        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + SAMPLE_SECONDS
        try:
            for process in psutil.Process(pid).children(recursive=True):
                if process.environ().get("RANK") == "1":
                    self.add(process.memory_maps(grouped=False))
        except psutil.Error:  # it ended meanwhile
            pass

    def add(self, maps: list[Any]) -> None:
        def private(parts: list[Any]) -> int:
            return sum(part.private_clean + part.private_dirty for part in parts)

        own = [part for part in maps if Path(part.path).name == RAW_FILES[0]]
        if own:
            sample = {"private": private(maps), "data_private": private(own)}
            self.samples.append(sample | {"data_resident": sum(part.rss for part in own)})


def names_of(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in FIGURES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(FIGURES)}")
    return names


def parse_args() -> argparse.Namespace:
    parser = config.OneLineParser(
        prog="ratios.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--only", type=names_of, default=list(FIGURES), help=",".join(FIGURES))
    parser.add_argument("--rounds", type=config.SIZE, default=5)
    parser.add_argument("--images", type=config.SIZE, default=30_000, help="timed in a run")
    parser.add_argument("--dataset", choices=list(data.SOURCES), help="mnist, or what is there")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--time-limit", type=config.POSITIVE, default=300.0, help="of a run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values there")
    parser.add_argument("--bare", nargs=3, type=config.SIZE, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.images > TRAIN_SIZE - 512 * WARMUP_STEPS:
        parser.error(f"--images {args.images} and the warm-up are more than an epoch")
    return args


def line_of(figure: Figure, found: list[dict[str, float]]) -> tuple[str, dict[str, Any] | None]:
    """Return the line of a figure, and its ratio's spread."""
    both = [r for r in found if figure.above in r and figure.below in r]
    if not both:
        return f"     -\n        {figure.text}", None
    ratios = [r[figure.above] / r[figure.below] for r in both]
    result: dict[str, Any] = {**trial.spread(ratios), "ratios": ratios}
    text = f"{result['median']:6.3f}  ({result['min']:.3f}-{result['max']:.3f})"
    bounds = [f"at least {figure.least}"] * bool(figure.least)
    bounds += [f"at most {figure.most}"] * bool(figure.most)
    if bounds:
        least, most = figure.least or 0, figure.most or float("inf")
        result["met"] = least <= round(result["median"], 3) <= most
        text += f"  {' and '.join(bounds)}: {'met' if result['met'] else 'MISSED'}"
    return f"{text}\n        {figure.text}", result


def run(args: argparse.Namespace) -> int:
    """Measure, print the ratios and return the exit status."""
    if args.bare:
        print(bare_loop(args))
        return 0
    args.dataset, remark = trial.choose_dataset(args.dataset, args.data_dir)
    if remark:
        print(remark, file=sys.stderr)
    machine = trial.describe_machine()
    neighbours = trial.Neighbours()
    figures = {name: FIGURES[name] for name in args.only}
    names = list(dict.fromkeys(n for f in figures.values() for n in (f.above, f.below)))
    names = [name for name in names if name != "memory set"]
    measured, status = trial.measure_in_turns("ratios.py", names, args.rounds, Rounds(args).measure)
    found: list[dict[str, float]] = [{} for _ in range(args.rounds)]
    for values in measured.values():
        for number, value in values.items():
            found[number] |= value
    share, results = neighbours.tell(), {}
    print(f"{args.rounds} rounds, {machine['cores']} cores of {machine['cpu']}; median (range)")
    for name, figure in figures.items():
        line, results[name] = line_of(figure, found)
        print(f"{name}\n{line}")
    if args.json:
        command = shlex.join(sys.argv)
        content = {"command": command, "machine": machine, "others_share": share}
        write_json(args.json, {**content, "figures": results, "rounds": found})
    return status


def main() -> int:
    args = parse_args()
    trial.raise_on_sigterm()
    return guard(run, args)


if __name__ == "__main__":
    sys.exit(main())
