"""What makes a process on a CPU start and run faster, measured on two cores."""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3), from malloc.h


@functools.cache
def speed_up() -> None:
    """Let glibc keep freed memory, and import what PyTorch will need a third sooner.

    Both change this process only, and neither changes a result. (A third setting, for how long CPU
    threads wait, has to be there before torch is imported: utils/early.py.)
    """
    _keep_freed_memory()
    _import_dynamo()


def _keep_freed_memory() -> None:
    """Let glibc keep what tensors free for the next ones.

    By default glibc returns blocks of some megabytes to the kernel. The kernel has to clear every
    page again for the next operation. That takes a third of a step on a CPU. See mallopt(3).
    Without glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the largest value that it accepts
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def _import_dynamo() -> None:
    """Import what the first optimizer and DDP's constructor import in any case, in 1.7 s.

    During this import Python would search all objects of PyTorch for garbage, several times. It
    would do so again during training, and for another second at the end. Nothing there is garbage.
    """
    gc.disable()
    importlib.import_module("torch._dynamo")
    gc.freeze()
    if "triton" in sys.modules:  # or its nanobind would report leaks at the end
        atexit.register(gc.unfreeze)
    gc.enable()
