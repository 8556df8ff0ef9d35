"""The hardware of a process: its device, its threads, and the seeds of its generators."""

import contextlib
import os
import random
import sys
import zlib
from pathlib import Path

import numpy as np
import torch

from utils import cpu
from utils.errors import UsageError


def select_devices(kind: str, ids: list[int] | None = None) -> list[torch.device]:
    """Return the devices to use, in the order of ``ids``. If it is None, return all of that kind.

    Args:
        kind: ``auto``, ``cpu``, ``cuda``, ``mps`` or ``xpu``.
        ids: logical device ids, counted after ``CUDA_VISIBLE_DEVICES``.

    Raises:
        UsageError: a device does not exist.
    """
    # A CUDA build names cuda as its accelerator even on a machine without a GPU.
    available = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    found = available.type if available else "cpu"
    if kind not in ("auto", "cpu", found):
        raise UsageError(f"--device {kind}: this machine (with this torch) offers {found} only")
    kind = found if kind == "auto" else kind
    count = 0 if kind == "cpu" else torch.accelerator.device_count()
    if missing := [index for index in ids or () if index >= count]:
        raise UsageError(f"--devices {missing[0]}: there are {count} GPUs to use, numbered from 0")
    if kind == "cpu":
        return [torch.device("cpu")]
    return [torch.device(kind, index) for index in ids or range(count)]


def setup_device(
    kind: str,
    ids: list[int] | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    local_rank: int = 0,
) -> torch.device:
    """Return the device of this process, after making it current and choosing the CPU threads.

    Args:
        kind, ids: as ``select_devices`` takes them.
        threads: CPU threads. Without a number ``OMP_NUM_THREADS`` counts, in which ``launch`` has
            noted the share of a rank, and without both every core that this process may use.
        deterministic: whether to refuse operations that are not reproducible.
        local_rank: number of this process on its machine. It takes the device of this number. If
            each process sees one GPU, that GPU is number 0 everywhere.

    Raises:
        UsageError: a device does not exist.
    """
    devices = select_devices(kind, ids)
    device = devices[local_rank % len(devices)]
    torch.set_num_threads(threads or openmp_threads() or usable_cores())
    cpu.speed_up()
    if deterministic:
        # cuBLAS starts later, and reads this then.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type in ("cuda", "xpu"):
        # Before any allocation, or each rank would also open a context on device 0.
        torch.get_device_module(device).set_device(device.index)
    return device


def openmp_threads() -> int:
    """Return the number in ``OMP_NUM_THREADS``, or 0 if there is none that OpenMP survives."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdecimal() and len(given) < 5 else 0


def usable_cores() -> int:
    """Count the cores that this process may use: its affinity, bounded by its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores or 1, max(1, int(quota) // int(period)))
    return cores or 1


def seed_step(device: torch.device, seed: int, rank: int, samples_seen: int) -> None:
    """Seed the generators for one optimizer step from where it stands in training.

    Those of random and of numpy too, from which a user's own augmentation may draw. So ranks draw
    different dropout and shifts. A resumed run draws what an uninterrupted run would draw, although
    no generator's state is stored.
    """
    # The CPU's generators use only 32 bits of a seed.
    value = zlib.crc32(f"{seed}/{rank}/{samples_seen}".encode())
    random.seed(value)
    np.random.seed(value)
    # ``torch.manual_seed`` would visit every backend, which takes 25 times as long.
    torch.default_generator.manual_seed(value)
    if device.type in ("cuda", "xpu"):
        for index, generator in enumerate(torch.get_device_module(device).default_generators):
            # DataParallel's replicas draw on each device. The first one draws what a single device
            # would.
            generator.manual_seed(value + index - device.index)
    elif device.type == "mps":
        torch.mps.manual_seed(value)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished all its work. A CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of this process on the GPU, or of the process itself."""
    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).max_memory_allocated(device)
    import resource

    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
