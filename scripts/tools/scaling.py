"""Predict the step time of DP and DDP on up to 4,096 devices, from a model of links and compute.

    python scripts/tools/scaling.py               # measures compute and link here
    python scripts/tools/scaling.py --check       # and how far off the model is, here
    python scripts/tools/scaling.py --link infiniband400 --compute 120 --parameters 25.6e6
    python scripts/tools/scaling.py --chart scaling.svg

The model is in alpha_beta.py, with what it leaves out.
"""

import faulthandler
import json
import math
import statistics
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from alpha_beta import (
    LINKS,
    Link,
    Work,
    break_even,
    ddp_seconds,
    dp_seconds,
    ring_seconds,
    shared_cores_seconds,
    tree_seconds,
)
from collectives import largest, time_all_reduce
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import models
from utils import config, optim
from utils.device import setup_device, usable_cores

DEVICES = [2**i for i in range(13)]
MOST_IN_ONE_PROCESS = 16  # GPUs of one machine, the most that DP can use (HGX-2)
CHECKED = (1, 2, 4, 8)  # processes
ROUNDS = 3  # of each measurement, the best of which counts
Row = dict[str, float | None]  # of the curve; None where there is no such run
MESSAGES = (4, 2**22)  # bytes: the time of the first is latency, of the second mostly bandwidth
CPU = torch.device("cpu")
NEVER = "never: a gradient travels for longer than it takes to compute"
# Of the table, with their formats.
COLUMNS = {
    "devices": "{:>7,.0f}",
    "ddp": "{:>8.2f}",
    "ddp_efficiency": "{:>6.0%}",
    "dp": "{:>8.2f}",
    "dp_efficiency": "{:>6.0%}",
    "strong": "{:>8.2f}",
    "speed_up": "{:>8.1f} x",
    "strong_efficiency": "{:>6.0%}",
}


def time_steps(
    rank: int, world_size: int, model: str, batches: list[int], seconds: float, sync: bool = True
) -> dict[int, float]:
    """Return the step time of real DDP for each batch, the best of its medians. Collective.

    Args:
        batches: a batch may come several times; each is timed for about ``seconds``.
        sync: whether the gradients are averaged; if not, the ranks only compute side by side.
    """
    setup_device(CPU, 1)
    network = DistributedDataParallel(models.build_model(model), gradient_as_bucket_view=True)
    optimizer = optim.build_optimizer(network, 1e-3, 0.9, 0.0)
    best: dict[int, float] = {}
    for batch in batches:
        images, labels = torch.rand(batch, 1, 28, 28), torch.zeros(batch, dtype=torch.long)
        times: list[float] = []
        steps = 5
        while len(times) < steps:
            begin = time.perf_counter()
            with nullcontext() if sync else network.no_sync():
                cross_entropy(network(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
            if len(times) == 3:  # the first two settle; all ranks have to make as many
                steps = largest(2 + min(50, max(3, int(seconds / times[-1]))))
        best[batch] = min(best.get(batch, math.inf), statistics.median(times[2:]))
    return best


def time_link(rank: int, world_size: int) -> list[float]:
    """Return the seconds of an all-reduce of each of ``MESSAGES``. Collective."""
    return [seconds for seconds, _ in time_all_reduce(MESSAGES, CPU, 20).values()]


def on_ranks(work: Any, world_size: int, *args: Any) -> Any:
    """Call ``work(rank, world_size, *args)`` in as many processes; return what rank 0 returned."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lessons"))
    from _lesson import run_ranks

    faulthandler.cancel_dump_traceback_later()  # a lesson's time limit: each rank has its own
    outcomes = run_ranks(work, world_size, *args)
    for outcome in outcomes:
        if outcome.error:
            sys.exit(f"scaling.py: error: rank {outcome.rank} of {world_size}: {outcome.error}")
    return outcomes[0].value


def measure_link() -> Link:
    """Solve the times of two messages between two processes for latency and bandwidth."""
    small, large = on_ranks(time_link, 2)
    latency = small / 2
    # Two ranks send 2(n-1)/n = 1 times the message.
    return Link(latency, MESSAGES[1] / max(1e-9, large - small), "measured: gloo, two processes")


def measure_work(model: str, batch: int, parameters: int) -> Work:
    """Fit a line through the step times of a whole batch and of a quarter of it."""
    quarter = max(1, batch // 4)
    times = on_ranks(time_steps, 1, model, [batch, quarter] * ROUNDS, 1.0)
    slope = (times[batch] - times[quarter]) / max(1, batch - quarter)
    per_image = min(max(slope, 0.0), times[batch] / batch) or times[batch] / batch
    return Work(per_image, max(0.0, times[batch] - per_image * batch), parameters)


def check(args: Namespace, work: Work, link: Link) -> list[dict[str, float]]:
    """Time real runs at 1, 2, 4 and 8 processes, and print what the model says of them."""
    cores = usable_cores()
    print(
        f"\nreal DDP on {cores} cores, {args.batch_size} images and one thread for each process."
        "\nAssumed: processes share the cores evenly, and nothing overlaps once all are taken."
    )
    rows: list[dict[str, float]] = [{"processes": n, "measured": math.inf} for n in CHECKED]
    beside, b = min(cores, CHECKED[-1]), args.batch_size
    crowded = math.inf
    for _ in range(ROUNDS):  # in turns: what else runs here then meets all alike
        crowded = min(crowded, on_ranks(time_steps, beside, args.model, [b], 1.0, False)[b])
        for row in rows:
            times = on_ranks(time_steps, int(row["processes"]), args.model, [b], 1.0)
            row["measured"] = min(row["measured"], times[b])
    crowding = max(1.0, crowded / rows[0]["measured"])
    print(f"a step takes {crowding:.2f} x as long with {beside} processes that only compute\n")
    print("processes  predicted ms  measured ms  error")
    for row in rows:
        n, measured = int(row["processes"]), row["measured"]
        row["predicted"] = predicted = shared_cores_seconds(work, link, n, b, cores, crowding)
        error = predicted / measured - 1
        print(f"{n:>9}  {predicted * 1e3:>12.2f}  {measured * 1e3:>11.2f}  {error:>+5.0%}")
    return rows


def curve(args: Namespace, work: Work, link: Link) -> list[Row]:
    """Return a row for each number of devices: step times in seconds, efficiencies from 0 to 1."""
    all_reduce = tree_seconds if args.tree else ring_seconds
    one, whole = work.seconds(args.batch_size), work.seconds(args.global_batch)
    rows: list[Row] = []
    for n in DEVICES:
        row: Row = dict.fromkeys(COLUMNS)
        ddp = ddp_seconds(work, link, n, args.batch_size, all_reduce)
        row |= {"devices": n, "ddp": ddp, "ddp_efficiency": one / ddp}
        if n <= MOST_IN_ONE_PROCESS:
            dp = dp_seconds(work, link, n, args.batch_size)
            row |= {"dp": dp, "dp_efficiency": one / dp}
        if n <= args.global_batch:  # a device cannot have less than an image
            strong = ddp_seconds(work, link, n, args.global_batch / n, all_reduce)
            speed_up = whole / strong
            row |= {"strong": strong, "speed_up": speed_up, "strong_efficiency": speed_up / n}
        rows.append(row)
    return rows


def print_curve(args: Namespace, rows: list[Row]) -> None:
    weak, strong = f"{args.batch_size} images each", f"{args.global_batch:,} in all, ddp"
    print(f"\n{'':7}  {f'weak: {weak}':^34}  {f'strong: {strong}':^30}")
    print("devices    ddp ms  effic.     dp ms  effic.        ms    speed-up  effic.")
    for row in rows:
        cells = []
        for key, form in COLUMNS.items():
            value, scale = row[key], 1e3 if key in ("ddp", "dp", "strong") else 1
            width = len(form.format(0))
            cells.append(f"{'-':>{width}}" if value is None else form.format(scale * value))
        print("  ".join(cells))


def draw(path: str, args: Namespace, rows: list[Row]) -> None:
    """Draw the efficiencies with matplotlib, or as text where it is not installed."""
    lines = {
        f"DDP, {args.batch_size} images each": "ddp_efficiency",
        f"DP, {args.batch_size} images each": "dp_efficiency",
        f"DDP, {args.global_batch:,} images in all": "strong_efficiency",
    }
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("\nno chart file: matplotlib is not installed (requirements-dev.txt has it)")
        for title, key in lines.items():
            print(f"\nefficiency: {title}")
            for row in rows:
                if row[key] is not None:
                    print(f"{row['devices']:>7,} |{'#' * round(50 * (row[key] or 0)):<50}|")
        return
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for title, key in lines.items():
        points = [(row["devices"], row[key]) for row in rows if row[key] is not None]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=title)
    axes.set(xscale="log", xlabel="devices", ylabel="efficiency", ylim=(0, 1.05))
    axes.set_xticks(DEVICES, [str(n) for n in DEVICES], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        sys.exit(f"scaling.py: error: --chart {path}: {error}")
    print(f"\nchart in {path}")


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = config.OneLineParser(prog="scaling.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(models.MODELS), default="convnet")
    parser.add_argument("--batch-size", type=config.SIZE, default=config.DEFAULT_BATCH_SIZE)
    parser.add_argument("--global-batch", type=config.SIZE, default=4096, help="strong scaling's")
    parser.add_argument("--link", choices=list(LINKS), help="instead of measuring one")
    parser.add_argument("--latency", type=config.NON_NEGATIVE, help="of a message, microseconds")
    parser.add_argument("--bandwidth", type=config.POSITIVE, help="in each direction, GB/s")
    parser.add_argument("--compute", type=config.POSITIVE, help="of one device's step, ms")
    parser.add_argument("--fixed", type=config.NON_NEGATIVE, help="part of it at any batch, ms")
    parser.add_argument("--parameters", type=config.number(float, least=1))
    parser.add_argument("--tree", action="store_true", help="all-reduce over a tree, not a ring")
    parser.add_argument("--check", action="store_true", help="compare with real runs here")
    parser.add_argument("--chart", metavar="FILE", help=".svg or .png")
    parser.add_argument("--json", metavar="FILE", help="write the figures, too")
    args = parser.parse_args(argv)
    given = [args.link, args.latency, args.bandwidth, args.compute, args.parameters]
    if args.check and (args.tree or any(value is not None for value in given)):
        parser.error("--check compares what it measures: drop the flags that say it beforehand")
    if args.fixed is not None and (args.compute is None or args.fixed >= args.compute):
        parser.error("--fixed is a part of --compute, and less than it")
    if args.chart and Path(args.chart).suffix not in (".svg", ".png"):
        parser.error(f"--chart {args.chart} ends in neither .svg nor .png")
    return args


def main() -> int:
    args = parse_args()
    try:
        network = models.build_model(args.model)
    except models.ModelError as error:
        sys.exit(f"scaling.py: error: {error}")
    parameters = int(args.parameters or sum(p.numel() for p in network.parameters()))
    if args.compute is None:
        work, told = measure_work(args.model, args.batch_size, parameters), "measured"
    else:
        fixed = (args.fixed or 0.0) / 1e3
        work = Work((args.compute / 1e3 - fixed) / args.batch_size, fixed, parameters)
        told = "as given"
    if args.link or None not in (args.latency, args.bandwidth):
        link = LINKS[args.link] if args.link else Link(0.0, 1.0, "as given")
    else:
        link = measure_link()
    if args.latency is not None:
        link = link._replace(latency=args.latency / 1e6)
    if args.bandwidth is not None:
        link = link._replace(bandwidth=args.bandwidth * 1e9)
    step = work.seconds(args.batch_size) * 1e3
    print(
        f"compute  {step:.2f} ms for {args.batch_size} images, {work.fixed * 1e3:.2f} ms of it at"
        f" any batch ({told})\n"
        f"network  {parameters:,} parameters, {work.gradient_bytes / 1e6:.2f} MB of gradients\n"
        f"link     {link.latency * 1e6:.1f} us, {link.bandwidth / 1e9:.2f} GB/s ({link.source})"
    )
    rows = curve(args, work, link)
    print_curve(args, rows)
    thresholds = {n: break_even(work, link, n, args.batch_size) for n in (2, 8, 64)}
    print(f"\nsplitting a batch of {args.batch_size} pays (network's compute per parameter, ring):")
    for n, least in thresholds.items():
        known = f"from {least:,.0f} parameters on"
        print(f"{n:>7} devices  {known if math.isfinite(least) else NEVER}")
    checked = check(args, work, link) if args.check else None
    if args.chart:
        draw(args.chart, args, rows)
    if args.json:
        facts: dict[str, Any] = {
            "work": work._asdict(),
            "link": link._asdict(),
            "curve": rows,
            "check": checked,
        }
        facts["break_even"] = {n: p if math.isfinite(p) else None for n, p in thresholds.items()}
        try:
            Path(args.json).write_text(json.dumps(facts, indent=2) + "\n")
        except OSError as error:
            sys.exit(f"scaling.py: error: --json {args.json}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
