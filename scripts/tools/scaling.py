"""Predict the images/s of DP and DDP on 1 to 1,024 devices from four figures.

    python scripts/tools/scaling.py
    python scripts/tools/scaling.py --step-ms 120 --gradient-mb 102 --latency-us 10 --bandwidth 12.5

The figures are the seconds of a step on one device, the bytes of the gradients, and latency and
bandwidth of the link between two devices. The tool measures the figures that are not given: the
step by train_single.py, the link by an all-reduce between two ranks. If it measures the step, real
runs on one and two devices check the prediction.

The model. A ring all-reduce sends 2(n-1) messages, each of 1/n of the gradients (Thakur et al.
2005, https://doi.org/10.1177/1094342005051521). DDP hides all but the last of its buckets behind
the backward, as far as they fit. DP copies the network to each device and sums the gradients on the
first device. All of this goes over the link of the first device, and DP hides nothing. All links
are alike and no device is late, so this is the best case.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import compare
import trial

import models
from utils import config
from utils.errors import UsageError
from utils.throughput import WARMUP_STEPS

DEVICES = [2**i for i in range(11)]
MOST_OF_DP = 16  # GPUs of one machine, the most that one process can use (HGX-2)
BUCKET_BYTES = 25 * 2**20  # DDP's default
# A backward multiplies twice where the forward does once (https://arxiv.org/abs/2001.08361, 2.1).
BACKWARD_SHARE = 2 / 3
STEPS = 60  # timed in a real run
ROUNDS = 3
OWN = "--model --batch-size --threads --lr-scaling --max-steps --epochs"


class Model(NamedTuple):
    """The four figures: seconds, bytes, seconds, bytes per second."""

    step: float
    gradients: float
    latency: float
    bandwidth: float

    def ring(self, devices: int, size: float) -> float:
        """Return the seconds of a ring all-reduce of ``size`` bytes."""
        return 2 * (devices - 1) * (self.latency + size / devices / self.bandwidth)

    def ddp(self, devices: int) -> float:
        """Return the seconds of a step of DDP.

        There are k equal buckets. Bucket i is ready after i/k of the backward, and they are sent
        one after the other. With one bucket nothing overlaps.
        """
        buckets = max(1, math.ceil(self.gradients / BUCKET_BYTES))
        each = self.ring(devices, self.gradients / buckets)
        backward = BACKWARD_SHARE * self.step
        both = max(backward + each, backward / buckets + buckets * each)
        return self.step - backward + both

    def dp(self, devices: int) -> float:
        """Return the seconds of a step of DP: a broadcast of the weights, a reduce of gradients.

        Scatter and gather send little in comparison, and count as one latency each.
        """
        copies = 2 * self.gradients / self.bandwidth if devices > 1 else 0.0
        return self.step + copies + 4 * (devices - 1) * self.latency


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = trial.build_measuring_parser("scaling.py", __doc__)
    add, least_zero = parser.add_argument, config.NON_NEGATIVE
    add("--model", choices=list(models.MODELS), default="convnet")
    add("--batch-size", type=config.SIZE, default=config.DEFAULT_BATCH_SIZE, help="per device")
    add("--threads", type=config.SIZE, default=1, help="CPU threads of a device")
    add("--step-ms", type=config.POSITIVE, help="a step on one device, milliseconds")
    add("--gradient-mb", type=config.POSITIVE, help="size of the gradients (default: the model's)")
    add("--latency-us", type=least_zero, help="latency of a message, microseconds")
    add("--bandwidth", type=config.POSITIVE, help="bandwidth of the link, each way, GB/s")
    args = trial.parse_args(parser, argv, OWN)
    if (args.latency_us is None) != (args.bandwidth is None):
        parser.error("--latency-us and --bandwidth describe one link: give both, or none")
    return args


def time_step(technique: str, devices: int, args: argparse.Namespace) -> float:
    """Return the seconds of a step in a real run of a script."""
    flags = {"--model": args.model, "--batch-size": args.batch_size, "--lr-scaling": "none"}
    flags["--threads"] = args.threads * (devices if technique == "dp" else 1)
    flags |= {"--max-steps": WARMUP_STEPS + STEPS, "--epochs": args.epochs}
    [command] = trial.build_commands(technique, devices, args, flags)
    outcome = trial.train([[*command, "--no-tensorboard", "--no-progress"]], args.time_limit)
    return devices * args.batch_size / outcome.speed


def measure_link(args: argparse.Namespace) -> tuple[float, float]:
    """Solve the times of two messages between two ranks for latency and bandwidth."""
    if args.device != "cpu" and args.available < 2:
        raise UsageError("one GPU has no link to measure: pass --latency-us and --bandwidth")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = trial.ROOT / "scripts" / "tools" / "collectives.py"
    [text] = trial.run([*launcher, "--nproc_per_node", 2, script], limit=args.time_limit)
    times = {int(size): seconds for size, seconds in json.loads(text.splitlines()[-1]).items()}
    small, large = min(times), max(times)
    # Two ranks exchange two messages, each of half of the bytes.
    return times[small] / 2, large / max(1e-9, times[large] - times[small])


def check(model: Model, args: argparse.Namespace) -> str:
    """Return the prediction beside real runs of DDP on one and two devices, and of DP on two."""
    settings = [("ddp", 1), ("ddp", 2), ("dp", 2)]
    measured: dict[tuple[str, int], list[float]] = {setting: [] for setting in settings}
    for _, (technique, devices) in trial.in_turns(settings, ROUNDS):
        if args.device == "cpu" or devices <= args.available:
            measured[technique, devices].append(time_step(technique, devices, args))
    rows: list[tuple[str, ...]] = [("check", "devices", "predicted ms", "measured ms", "range")]
    for (technique, devices), times in measured.items():
        if times:
            predicted = model.ddp(devices) if technique == "ddp" else model.dp(devices)
            found = trial.spread([1e3 * seconds for seconds in times])
            ends = f"{found['min']:.2f}-{found['max']:.2f}"
            numbers = (f"{1e3 * predicted:.2f}", f"{found['median']:.2f}", ends)
            rows.append((technique, str(devices), *numbers))
    return compare.table(rows)


def curve(model: Model, batch_size: int) -> str:
    """Return images/s and efficiency of DDP and DP by the number of devices."""
    rows = [["devices", "ddp images/s", "effic.", "dp images/s", "effic."]]
    for n in DEVICES:
        cells = [f"{n:,}"]
        for step in (model.ddp(n), model.dp(n) if n <= MOST_OF_DP else None):
            speed = f"{n * batch_size / step:,.0f}" if step else "-"
            cells += [speed, f"{model.step / step:.0%}" if step else "-"]
        rows.append(cells)
    return compare.table(rows)


def run(args: argparse.Namespace) -> int:
    told = []
    describe_others = trial.watch_others()
    if args.step_ms is None:
        images = trial.choose_dataset(args)
        args.epochs = -(-(WARMUP_STEPS + STEPS) // max(1, images // (2 * args.batch_size)))
        step = trial.spread([time_step("single", 1, args) for _ in range(ROUNDS)])["median"]
        told.append(f"{args.model}, {args.threads} x {args.device}")
    else:
        step = args.step_ms / 1e3
    gradients = 1e6 * (args.gradient_mb or 0.0)
    if not gradients:
        gradients = 4.0 * sum(p.numel() for p in models.build_model(args.model).parameters())
    if args.latency_us is None:
        link = measure_link(args)
        told.append("link measured between two ranks")
    else:
        link = args.latency_us / 1e6, args.bandwidth * 1e9
    model, size = Model(step, gradients, *link), args.batch_size
    print(f"step {1e3 * step:.2f} ms for {size} images, gradients {gradients / 1e6:.2f} MB,")
    print(f"link {1e6 * link[0]:.1f} us, {link[1] / 1e9:.2f} GB/s")
    print(f"{', '.join([*told, time.strftime('%Y-%m-%d')])}\n\n{curve(model, size)}")
    if args.step_ms is None:
        print(f"\n{check(model, args)}")
        print(describe_others(), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(trial.start(run, parse_args(sys.argv[1:])))
