"""The hardware of a process: its device, threads, random generators and precision."""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.profiler import record_function

from utils.errors import UsageError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3), from malloc.h


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


def setup_device(device: torch.device, threads: int | None) -> None:
    """Make ``device`` the current one and bound this process's CPU threads.

    Without ``--threads`` the variable ``OMP_NUM_THREADS`` counts, in which ``launch`` has noted the
    share of a rank, and without both every core that this process may use.

    Args:
        device: as ``select_devices`` returns it.
        threads: CPU threads, or None for ``OMP_NUM_THREADS`` or all cores.
    """
    torch.set_num_threads(threads or openmp_threads() or usable_cores())
    _keep_freed_memory()
    if device.type in ("cuda", "xpu"):
        # This comes before any allocation. Otherwise each rank would also open a context on device
        # 0.
        torch.get_device_module(device).set_device(device.index)


def openmp_threads() -> int:
    """Return the number in ``OMP_NUM_THREADS``, or 0 if there is none that OpenMP survives."""
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdecimal() and len(given) < 5 else 0


def _keep_freed_memory() -> None:
    """Let glibc keep what tensors free for the next ones.

    By default glibc returns blocks of some megabytes to the kernel. The kernel has to clear every
    page again for the next operation. That takes a third of a step on a CPU. See
    mallopt(3). Without glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the largest value that it accepts
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@functools.cache
def import_dynamo() -> None:
    """Import what the first optimizer and DDP's constructor import in any case, a third sooner.

    During this import Python would search all objects of PyTorch for garbage, several times. It
    would do so again during training, and for another second at the end. Nothing there is garbage.
    """
    gc.disable()
    importlib.import_module("torch._dynamo")
    gc.freeze()
    if "triton" in sys.modules:  # or its nanobind would report leaks at the end
        atexit.register(gc.unfreeze)
    gc.enable()


def usable_cores() -> int:
    """Count the cores that this process may use: its affinity, bounded by its cgroup's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max"
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores or 1, max(1, int(quota) // int(period)))
    return cores or 1


def setup_seed(seed: int, deterministic: bool = False) -> None:
    """Seed all generators. With ``deterministic`` refuse operations that are not reproducible."""
    torch.manual_seed(seed)
    if deterministic:
        # cuBLAS starts later, and reads this then.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


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


class Precision:
    """The mixed precision of a forward."""

    def __init__(self, device: torch.device, amp: str) -> None:
        self.dtype = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
        self.device_type = device.type

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Return the context of a forward: autocast if it is on, and a name for the profile."""
        enabled = self.dtype is not None
        with record_function("forward"), torch.autocast(self.device_type, self.dtype, enabled):
            yield


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
