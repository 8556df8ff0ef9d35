"""Will DDP be faster? Time a step alone and the link, predict a step of DDP, and time it too.

    torchrun --standalone --nproc_per_node 2 scripts/tools/scaling.py --model basic
    python scripts/tools/scaling.py --step-ms 273 --gradient-mb 102 --bandwidth 300

The first command measures between the ranks that it starts, on one machine or several. The second
one computes with your figures: a step on one device, the bytes of the gradients, and the bandwidth
of the link in one direction. docs/numbers.md explains the arithmetic.

Gradients are sent during the backward. With the NCCL class that torch 2.15 takes by default, a GPU
computes nothing meanwhile, and a step takes as long as if all were sent after the backward. Both
are predicted. TORCH_DIST_USE_NCCL2=1 measures with that class.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # before torch is imported, as in train_ddp.py
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import compare
import torch
import torch.distributed as dist
import torch.nn.functional as F
import trial
from collectives import time_all_reduce
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import models
from utils.device import select_devices, setup_device
from utils.errors import UsageError
from utils.optim import REFERENCE_BATCH
from utils.training import config

DEVICES = [2**i for i in range(11)]
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes at which DDP closes a bucket
# A backward multiplies twice where the forward does once (https://arxiv.org/abs/2001.08361, 2.1).
BACKWARD_SHARE = 2 / 3
# DDP waits for the GPU in its first ten steps, to time itself.
WARM_UP, STEPS, ROUNDS = 11, 10, 5
# Shares: of the backward, below which a stall is lost in the noise, and of the stall that comes if
# nothing is computed while gradients travel.
LITTLE, STALLED = 0.1, 0.5


class Step(NamedTuple):
    """Seconds of a step on one device, and when its buckets are full.

    Args:
        other: forward, loss and optimizer, beside which DDP sends nothing.
        buckets: seconds after the backward's beginning, and bytes, of each bucket.
    """

    other: float
    backward: float
    buckets: list[tuple[float, float]]

    def ddp(self, devices: int, link: "Link") -> float:
        """Return the seconds of a step of DDP, whose full buckets queue for the link."""
        free = 0.0
        for full, size in self.buckets:
            free = max(free, full) + link.ring(devices, size)
        return self.other + max(self.backward, free)

    def ddp_after(self, devices: int, link: "Link") -> float:
        """Return the same if nothing is computed while a bucket is sent."""
        sent = sum(link.ring(devices, size) for _, size in self.buckets)
        return self.other + self.backward + sent


class Link(NamedTuple):
    """Seconds of the smallest message, and bytes per second in one direction."""

    latency: float
    bandwidth: float

    def ring(self, devices: int, size: float) -> float:
        """Return the seconds of a ring all-reduce: 2(n-1) messages, each of 1/n of the bytes.

        Thakur et al. 2005, https://doi.org/10.1177/1094342005051521
        """
        return 2 * (devices - 1) * (self.latency + size / devices / self.bandwidth)


def even_step(seconds: float, size: float) -> Step:
    """Return a step whose gradients come evenly during its backward."""
    backward, count = BACKWARD_SHARE * seconds, max(1, round(size / BUCKET))
    full = [(backward * i / count, size / count) for i in range(1, count + 1)]
    return Step(seconds - backward, backward, full)


def fill_buckets(gradients: list[tuple[float, int]]) -> list[tuple[float, float]]:
    """Put gradients (when each came, its bytes) into buckets as DDP does after its first step."""
    buckets: list[tuple[float, float]] = []
    waiting = 0
    for when, size in gradients:
        waiting += size
        if waiting >= (BUCKET if buckets else FIRST_BUCKET):
            buckets.append((when, waiting))
            waiting = 0
    return [*buckets, (gradients[-1][0], waiting)] if waiting else buckets


def describe_overlap(alone: Step, together: Step, devices: int, link: Link) -> str:
    """Return when DDP sends, by how much later its last gradient came than in a step alone."""
    stall = sum(link.ring(devices, size) for _, size in alone.buckets[:-1])
    if stall < LITTLE * alone.backward:
        return "sending is too short to tell: take a larger --model"
    late = together.buckets[-1][0] - alone.buckets[-1][0]
    told = f"its last gradient comes {1e3 * late:.1f} ms later, where {1e3 * stall:.1f} ms are sent"
    if late > STALLED * stall:
        return f"{told}: the GPU computes nothing meanwhile, as if it sent after the backward"
    return f"{told}: it sends during the backward"


def mark(device: torch.device) -> Any:
    """Return the time on the device's own clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, last: Any) -> float:
    """Return the seconds between two marks. On a GPU wait until it has come to the last one."""
    if isinstance(first, float):
        return last - first
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def build_step(
    model: nn.Module, batch_size: int, device: torch.device
) -> Callable[[], tuple[float, Step]]:
    """Return a function that makes a step on a batch which lies ready: its seconds, its parts."""
    images = torch.randn(batch_size, 1, 28, 28, device=device)
    labels = torch.randint(10, (batch_size,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    arrived: list[tuple[Any, int]] = []

    def note(parameter: Tensor) -> None:
        arrived.append((mark(device), parameter.numel() * parameter.element_size()))

    def step() -> tuple[float, Step]:
        arrived.clear()
        begin = mark(device)
        loss = F.cross_entropy(model(images), labels)
        computed = mark(device)
        loss.backward()
        done = mark(device)
        optimizer.step()
        optimizer.zero_grad()
        seconds, backward = between(begin, mark(device)), between(computed, done)
        came = [(between(computed, when), size) for when, size in arrived]
        return seconds, Step(seconds - backward, backward, fill_buckets(came))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    for _ in range(WARM_UP):
        step()
    return step


def typical(steps: list[tuple[float, Step]]) -> Step:
    """Return the step a quarter of the way up: other programs disturbed it little."""
    return sorted(steps, key=lambda pair: pair[0])[len(steps) // 4][1]


def measure(args: argparse.Namespace) -> tuple[Step, Link, list[float], str]:
    """Return a step alone, the link, seconds of DDP's steps, and when DDP sends. Collective.

    Raises:
        UsageError: processes would have to share a GPU.
    """
    devices = select_devices(args.device)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if devices[0].type == "cuda" and len(devices) < processes:
        raise UsageError(
            f"{processes} processes need as many GPUs, and there is {len(devices)}: on the CPU,"
            " CUDA_VISIBLE_DEVICES= torchrun ... (two cores are then two devices)"
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    device = setup_device(args.device, threads=args.threads, local_rank=local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    raw_model, other = (models.build_model(args.model).to(device) for _ in range(2))
    alone = build_step(raw_model, args.batch_size, device)
    model = DistributedDataParallel(other, gradient_as_bucket_view=True)
    together = build_step(model, args.batch_size, device)
    steps, shared = [], []
    for _ in range(ROUNDS):  # in turns, so that other programs disturb both alike
        steps += [alone() for _ in range(STEPS)]
        dist.barrier()
        shared += [together() for _ in range(STEPS)]
    world_size = dist.get_world_size()
    size = sum(p.numel() * p.element_size() for p in raw_model.parameters())
    smallest, *_, large = time_all_reduce(device, min(size, BUCKET))
    latency = smallest.seconds / (2 * (world_size - 1))
    sent = 2 * (world_size - 1) / world_size * large.size
    link = Link(latency, sent / max(1e-9, large.seconds - smallest.seconds))
    dist.destroy_process_group()
    step, told = typical(steps), "during the backward, on the cores that also compute"
    if device.type == "cuda":
        told = describe_overlap(step, typical(shared), world_size, link)
    return step, link, sorted(seconds for seconds, _ in shared), told


def curve(step: Step, link: Link) -> str:
    """Return what DDP gains on more devices, with the same batch on each."""
    rows: list[tuple[str, ...]] = [("devices", "step, ms", "times as fast", "efficiency")]
    for n in DEVICES:
        seconds = step.ddp(n, link)
        share = (step.other + step.backward) / seconds
        rows.append((f"{n:,}", f"{1e3 * seconds:.2f}", f"{n * share:.2f}", f"{share:.0%}"))
    return compare.table(rows)


def run(args: argparse.Namespace) -> int:
    if args.step_ms:
        step = even_step(args.step_ms / 1e3, 1e6 * args.gradient_mb)
        print(curve(step, Link(args.latency_us / 1e6, 1e9 * args.bandwidth)))
        return 0
    ranks = int(os.environ["WORLD_SIZE"])
    step, link, times, told = measure(args)
    if os.environ["RANK"] == "0" and args.json:
        print(json.dumps({"step": step, "link": link, "measured": times[len(times) // 4]}))
    elif os.environ["RANK"] == "0":
        full = ", ".join(
            f"{size / 1e6:.2f} MB at {1e3 * when:.1f} ms" for when, size in step.buckets
        )
        other, backward = 1e3 * step.other, 1e3 * step.backward
        during, after = 1e3 * step.ddp(ranks, link), 1e3 * step.ddp_after(ranks, link)
        print(f"{args.model}, {args.batch_size} images on each of {ranks} devices")
        print(f"alone: {other + backward:.1f} ms, of which backward {backward:.1f} ms")
        print(f"buckets full in the backward: {full}")
        print(f"link: {link.bandwidth / 1e9:.3f} GB/s, {1e6 * link.latency:.0f} us a message")
        found, middle = 1e3 * times[len(times) // 4], 1e3 * median(times)
        print(f"DDP, predicted: {during:.1f} ms if it sends during the backward, {after:.1f} after")
        print(f"DDP, measured: {found:.1f} ms (median {middle:.1f})")
        print(f"DDP, torch {torch.__version__}: {told}\n")
        print(curve(step, link))
    return 0


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = trial.build_parser("scaling.py", __doc__)
    add = parser.add_argument
    add("--model", type=config.MODEL, default="convnet")
    add("--batch-size", type=config.SIZE, default=REFERENCE_BATCH, help="per device")
    add("--threads", type=config.SIZE, default=1, help="CPU threads of a device")
    add("--device", choices=["auto", "cpu"], default="auto")
    add("--step-ms", type=config.POSITIVE, help="a step on one device, milliseconds")
    add("--gradient-mb", type=config.POSITIVE, help="size of the gradients")
    add("--bandwidth", type=config.POSITIVE, help="of the link, in one direction, GB/s")
    add("--latency-us", type=config.NON_NEGATIVE, default=10.0, help="microseconds of a message")
    add("--json", action="store_true", help="print what was measured as JSON")
    args = parser.parse_args(argv)
    figures = [args.step_ms, args.gradient_mb, args.bandwidth]
    if any(figures) and not all(figures):
        parser.error("--step-ms, --gradient-mb and --bandwidth belong together: give all, or none")
    if not any(figures) and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("it measures between two ranks or more: start it with torchrun")
    return args


if __name__ == "__main__":
    sys.exit(trial.start(run, parse_args(sys.argv[1:])))
