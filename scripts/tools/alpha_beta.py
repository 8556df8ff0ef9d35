"""The alpha-beta model of data parallelism: what a step of DP and DDP takes on n devices.

A message costs a latency (alpha) and its bytes over the bandwidth (beta). A ring all-reduce takes
2(n-1) messages, each of 1/n of the gradients (Thakur et al. 2005,
https://doi.org/10.1177/1094342005051521). All links are alike and nobody is late, so that what is
predicted is the best case. Used by scaling.py.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

BYTES_EACH = 4  # of a float32
IMAGE_BYTES, OUTPUT_BYTES = 28 * 28 * BYTES_EACH, 10 * BYTES_EACH
BUCKET_BYTES = 25 * 2**20  # DDP's default
# A backward multiplies twice where the forward does once (https://arxiv.org/abs/2001.08361, 2.1).
BACKWARD_SHARE = 2 / 3


class Link(NamedTuple):
    """A link between two devices: seconds of a message, bytes per second in each direction."""

    latency: float
    bandwidth: float
    source: str


# Latency of a step of NCCL's ring (protocol Simple): NCCL's own estimate, hwLat in its
# src/graph/tuning.cc. Bandwidth: the link's rate, of which about 80 to 90 % arrive.
LINKS = {
    "nvlink4": Link(3.4e-6, 450e9, "H100 data sheet: 900 GB/s, both directions together"),
    "nvlink3": Link(3.4e-6, 300e9, "A100 data sheet: 600 GB/s, both directions together"),
    "pcie5": Link(5.7e-6, 63.0e9, "PCI-SIG: 32 GT/s, 16 lanes, 128b/130b"),
    "pcie4": Link(5.7e-6, 31.5e9, "PCI-SIG: 16 GT/s, 16 lanes, 128b/130b"),
    "infiniband400": Link(9.6e-6, 50e9, "IBTA: NDR, four lanes, 400 Gb/s"),
    "infiniband100": Link(9.6e-6, 12.5e9, "IBTA: EDR, four lanes, 100 Gb/s"),
    "ethernet100": Link(9.6e-6, 12.5e9, "IEEE 802.3bj: 100 Gb/s; the latency is RDMA's (RoCE)"),
}


class Work(NamedTuple):
    """What a step of one device has to do: seconds per image, and seconds at any batch."""

    per_image: float
    fixed: float
    parameters: int

    def seconds(self, images: float) -> float:
        return self.fixed + self.per_image * images

    @property
    def gradient_bytes(self) -> int:
        return self.parameters * BYTES_EACH


def ring_seconds(devices: int, size: float, link: Link) -> float:
    """Return the time of a ring all-reduce of ``size`` bytes: 2(n-1) steps of size/n each."""
    steps = 2 * (devices - 1)
    return steps * (link.latency + size / devices / link.bandwidth)


def tree_seconds(devices: int, size: float, link: Link) -> float:
    """Return the time of a pipelined tree's reduce and broadcast, which NCCL takes when many."""
    if devices == 1:
        return 0.0
    return 2 * (math.ceil(math.log2(devices)) * link.latency + size / link.bandwidth)


def ddp_seconds(
    work: Work,
    link: Link,
    devices: int,
    images: float,
    all_reduce: Callable[[int, float, Link], float] = ring_seconds,
) -> float:
    """Return the step time of DDP with ``images`` on each device.

    Of k equal buckets the i-th is ready after i/k of the backward, and they travel one after the
    other: the last cannot hide, and with one bucket nothing does.
    """
    buckets = max(1, math.ceil(work.gradient_bytes / BUCKET_BYTES))
    each = all_reduce(devices, work.gradient_bytes / buckets, link)
    backward = BACKWARD_SHARE * work.per_image * images
    both = max(backward + each, backward / buckets + buckets * each)
    return work.seconds(images) - backward + both


def dp_seconds(work: Work, link: Link, devices: int, images: float) -> float:
    """Return the step time of DP with ``images`` on each device; nothing of it overlaps.

    The first device sends every other its images and gets its outputs, one after the other; in the
    backward it sends the gradients of the outputs. The weights go round in a broadcast and their
    gradients come back in a reduce, both pipelined as NCCL's. The forward's fixed part is Python,
    which issues the operations of one replica after the other.
    """
    others = devices - 1
    traffic = others * (
        3 * link.latency + images * (IMAGE_BYTES + 2 * OUTPUT_BYTES) / link.bandwidth
    )
    if others:
        traffic += 2 * (others * link.latency + work.gradient_bytes / link.bandwidth)
    python = others * (1 - BACKWARD_SHARE) * work.fixed
    return work.seconds(images) + python + traffic


def break_even(work: Work, link: Link, devices: int, batch: int) -> float:
    """Return the parameters from which on DDP shortens the step of a batch that it splits.

    For networks that compute as long for each parameter as this one, with one bucket. Below, what
    is saved, c*B*P*(1 - 1/n), is less than what the ring takes, 2(n-1)*(latency + 4P/n/bandwidth);
    solved for P. Infinite where a gradient travels for longer than it takes to compute.
    """
    computing = work.per_image * batch / work.parameters
    gain = computing - 2 * BYTES_EACH / link.bandwidth
    return 2 * devices * link.latency / gain if gain > 0 else math.inf


def shared_cores_seconds(
    work: Work, link: Link, processes: int, images: float, cores: int, crowding: float
) -> float:
    """Return the step time of DDP's processes that share the cores of one machine.

    Computing and gloo's copying both need a core: with as many processes as cores nothing can
    overlap, and with more they take turns.

    Args:
        crowding: how many times as long a step takes, without communication, with a process on
            every core (two threads of one core, memory that all share); linear in between.
    """
    if processes == 1:
        return work.seconds(images)
    share = min(1.0, (processes - 1) / max(1, cores - 1))
    slower = 1 + (crowding - 1) * share
    crowded = work._replace(per_image=slower * work.per_image, fixed=slower * work.fixed)
    if processes < cores:
        return ddp_seconds(crowded, link, processes, images)
    alone = crowded.seconds(images) + ring_seconds(processes, work.gradient_bytes, link)
    return alone * processes / cores
