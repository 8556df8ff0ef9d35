"""Errors that a person can correct: one line that says what is wrong and what to do."""

import errno
import json
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch


class UserError(Exception):
    """An error whose message is for the user. Any other exception is a bug, with its traceback.

    The message is a printable line, even if it quotes names from files or other processes.

    Attributes:
        exit_status: with which the process ends.
        reported_elsewhere: whether another process of this job prints the message.
    """

    exit_status = 1
    reported_elsewhere = False

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(UserError):
    """Arguments that cannot be used together or here. The message says what to change."""

    exit_status = 2


class Diverged(UserError):
    """A loss, or what training changes, is not finite. Nothing of this step is saved."""

    def __init__(self, what: str, is_main: bool) -> None:
        advice = "choose a lower --lr, a longer --warmup-epochs or --max-grad-norm"
        super().__init__(f"{what}, {NOT_SAVED}: {advice}")
        # If another rank alone diverged, rank 0 reports it, with this reason.
        self.reported_elsewhere = not is_main


def printable(text: str) -> str:
    """Return a text as one line, in which control characters are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def describe(error: BaseException) -> str:
    """Return an error's type and the first line of its message, printable."""
    return printable(": ".join([type(error).__name__, *str(error).splitlines()[:1]]))


NOT_SAVED = "which is not saved"  # in the reason of each run that diverged
REPORT_SECONDS = 10.0  # for the rank that reports for its node, which may still be importing
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# PyTorch's lines about parameters that a forward left unused. They give indices, and with
# TORCH_DISTRIBUTED_DEBUG=INFO names.
UNUSED = re.compile("Parameters? [^:\\n]*not receive grad[^:\\n]*: .*")
MEMORY = "out of memory: lower --batch-size, or raise --grad-accum-steps to keep the global batch"
# A part of an error's text, by PyTorch or the system, and what to say instead.
KNOWN = {
    "unable to allocate shared memory": "/dev/shm has no room for the batches of the loader"
    " workers: make it larger (docker run --shm-size 1g), lower --num-workers, or pass"
    " --num-workers 0",
    "Too many open files": "too many open files: raise `ulimit -n` (1024 will do), or lower"
    " --num-workers",
    "Attempted to use an uninitialized parameter": "--model has a lazy layer: give it its size, or"
    " call the model once where it is built",
    "Expected more than 1 value per channel when training": "--batch-size is too small for batch"
    " normalisation, which needs more than one sample on each device",
    "SyncBatchNorm layers only work with GPU modules": "--sync-bn: SyncBatchNorm works on GPUs"
    " only, drop it on a CPU",
}


def explain(error: Exception) -> Exception:
    """Return a ``UserError`` for an error of PyTorch or the system whose cause is known.

    Any other error is returned as it is.
    """
    if isinstance(error, UserError):  # it has been explained
        return error
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return UserError(MEMORY)
    if unused := UNUSED.findall(text):
        return UserError(
            f"{'; '.join(map(str.strip, unused))}. DDP waits for a gradient of each: use them in"
            " every forward, freeze them, or pass --find-unused-parameters"
            " (TORCH_DISTRIBUTED_DEBUG=INFO gives their names)"
        )
    for part, message in KNOWN.items():
        # In the whole text, since the error of a loader worker comes with its traceback before it.
        if part in text:
            return UsageError(message)
    if isinstance(error, OSError) and (error.filename or error.errno in DISK):
        advice = "; earlier checkpoints are whole: make room and continue with --resume"
        where = error.filename2 or error.filename or "a file cannot be written"
        return UserError(f"{where}: {error.strerror}{advice * (error.errno in DISK)}")
    # A worker that dies while it sends a batch shows as a broken connection.
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_broken = isinstance(error, EOFError | ConnectionError) and "_try_get_data" in functions
    if is_broken or text.startswith("DataLoader worker"):
        return UserError(
            f"a loader worker died ({text.partition('. ')[0] or type(error).__name__}): is memory"
            " or /dev/shm full? Try --num-workers 0, and continue with --resume"
        )
    return error


def guard(run: Callable[..., int], *args: object) -> int:
    """Call ``run(*args)`` and return the exit status. A ``UserError`` is a line on stderr."""
    try:
        return run(*args)
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        return 130
    except Exception as raised:
        error = explain(raised)
        if not isinstance(error, UserError):
            raise
        report(error)
        return error.exit_status
    finally:
        end_workers()


def report(error: UserError) -> None:
    """Print an error, unless another process does, and leave it for torchrun's summary."""
    if not error.reported_elsewhere:
        begin = f"{Path(sys.argv[0]).name}: error: " if error.exit_status else ""
        print(f"{begin}{error}", file=sys.stderr if begin else sys.stdout)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and error.exit_status:  # the form of torch.distributed.elastic's ``record``
        content = {"message": str(error), "extraInfo": {"timestamp": f"{time.time():.0f}"}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": content}))


def let_another_rank_report() -> None:
    """Wait, before this rank ends with an error that another one reports.

    Launchers end all ranks as soon as one has failed. At that time the reporting rank may not have
    printed its message yet. Once that rank has ended, the launcher's SIGTERM ends this wait.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(REPORT_SECONDS)


def end_workers() -> None:
    """End loader processes that an exception left behind.

    Loader processes ignore stop signals. multiprocessing's exit handler would send them SIGTERM,
    and then wait for them without a limit.
    """
    workers = multiprocessing.active_children()
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader's raises on a dead worker
    for worker in workers:
        with suppress(ProcessLookupError):
            worker.kill()
