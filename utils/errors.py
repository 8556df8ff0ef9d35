"""Errors that a person can correct: one line that says what is wrong and what to do."""

import atexit
import errno
import gc
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

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
REPORT_SECONDS = 10.0  # for the rank that reports for its machine, which may still be importing
EXIT_SECONDS = 10.0  # for exit handlers, one of which may wait for a rank that is lost
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# What DDP says where it wraps the model, by the number of parameters or by the shape of one.
OTHER_MODEL = re.compile(
    "Rank [0-9]+ has [0-9]+ params, while rank [0-9]+ has inconsistent [0-9]+ params"
    "|params.[0-9]+. in this process with .*? appears not to match .*? in process 0"
)
# PyTorch's lines about parameters that a forward left unused. They give indices, and with
# TORCH_DISTRIBUTED_DEBUG=INFO names.
UNUSED = re.compile("Parameters? [^:\\n]*not receive grad[^:\\n]*: .*")
MEMORY = (
    "out of memory: lower --batch-size, or raise --grad-accum-steps to keep the global batch; on a"
    " GPU nvidia-smi shows which other programs use it"
)
GPU_MEMORY = "is its memory full, or does another program use this GPU? nvidia-smi shows it"
SAME_GPU = (
    "two ranks have the same GPU: start one process for each GPU (torchrun --nproc_per_node, in"
    " Slurm --gpus-per-node and the same number in --ntasks-per-node), or try --backend gloo"
)
NO_COMPILER = (
    "--compile needs a C++ compiler: install gcc and g++, or name them in CC and CXX, or drop"
    " --compile"
)
# A part of an error's text, by PyTorch, a library or the system, and what to say instead.
KNOWN = {
    "InvalidCxxCompiler": NO_COMPILER,  # on a CPU
    "Failed to find C compiler": NO_COMPILER,  # by Triton, on a GPU
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
    # By NCCL before 2.30 and since. NCCL_MULTI_RANK_GPU_ENABLE=1 allows it since then.
    "Duplicate GPU detected": SAME_GPU,
    "Multiple Ranks are using the same GPU": f"{SAME_GPU}, or set NCCL_MULTI_RANK_GPU_ENABLE=1",
    # PyTorch's newer class for NCCL does not say why.
    "NCCL communicator: invalid usage": f"NCCL says invalid usage, most likely since {SAME_GPU}",
}
# The same for what is wrong on one rank alone.
KNOWN_OF_GPUS = {
    "CUBLAS_STATUS_ALLOC_FAILED": f"cuBLAS got no memory: {GPU_MEMORY}, or lower --batch-size",
    "CUDNN_STATUS_NOT_INITIALIZED": f"cuDNN does not start: {GPU_MEMORY}",
    "busy or unavailable": f"the GPU is busy or unavailable: {GPU_MEMORY}",
}


def explain(error: Exception | SystemExit) -> Exception:
    """Return a ``UserError`` for an error of PyTorch or the system whose cause is known.

    Any other error is returned as it is.
    """
    if isinstance(error, UserError):  # it has been explained
        return error
    text = str(error)
    if isinstance(error, SystemExit):
        called = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{called.filename}, line {called.lineno}"
        return UserError(f"{where}, has called sys.exit({text}): raise an error that says why")
    out_of_memory = ("out of memory", "can't allocate memory")
    if isinstance(error, MemoryError) or any(part in text for part in out_of_memory):
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
    for part, message in KNOWN_OF_GPUS.items():
        if part in text:
            return UserError(message)
    if other := OTHER_MODEL.search(text):
        return UsageError(
            f"the ranks have different models ({other[0]}): start every rank with the same code,"
            " and freeze the same parameters on all"
        )
    if "no kernel image" in text:
        return UsageError(_explain_no_kernel())
    if isinstance(error, OSError) and (error.filename or error.errno in DISK):
        where = error.filename2 or error.filename or "a file cannot be written"
        message = f"{where}: {error.strerror}"
        if error.errno in DISK:
            message += "; earlier checkpoints are whole: make room and continue with --resume"
        return UserError(message)
    # A worker that dies while it sends a batch shows as a broken connection.
    functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_broken = isinstance(error, EOFError | ConnectionError) and "_try_get_data" in functions
    if is_broken or text.startswith("DataLoader worker"):
        return UserError(
            f"a loader worker died ({text.partition('. ')[0] or type(error).__name__}): is memory"
            " or /dev/shm full, or does the data set call sys.exit? Try --num-workers 0, and"
            " continue with --resume"
        )
    return error


def _explain_no_kernel() -> str:
    """Say which GPU this build of PyTorch has no code for."""
    major, minor = torch.cuda.get_device_capability()
    return (
        f"this torch has no code for {torch.cuda.get_device_name()}, a GPU of capability"
        f" {major}.{minor} (it has {' '.join(torch.cuda.get_arch_list())}): install another build"
        " (https://pytorch.org/get-started/locally), or pass --device cpu"
    )


_before_end: Callable[[Exception], None] | None = None


def before_end(function: Callable[[Exception], None] | None) -> None:
    """Let a run write what ended it: the function is called once, with the explained error.

    Args:
        function: replaces the previous function, and None removes it. It may be called in another
            thread than the main one, which then waits in C++.
    """
    global _before_end
    _before_end = function


def has_begun() -> bool:
    """Return whether there is a run in this process whose end somebody wants to write."""
    return _before_end is not None


def call_before_end(error: Exception) -> None:
    """Call what ``before_end`` has registered, and forget it."""
    function = _before_end
    before_end(None)
    if function is not None:
        function(error)


def guard(run: Callable[..., int], *args: object) -> int:
    """Call ``run(*args)`` and return the exit status. A ``UserError`` is a line on stderr.

    The run first writes the explained error, if it has begun (see ``before_end``).
    """
    try:
        return run(*args)
    except KeyboardInterrupt:
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as raised:
        error = explain(raised)
        call_before_end(error)
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


def end_process(status: int) -> NoReturn:
    """End a rank of several without the shutdown of the interpreter, but with all that it does.

    DDP keeps gloo's threads (torch 2.15), even after the group is destroyed. An interpreter that
    shuts down beside them sometimes aborts: 3 of about 300 complete runs did.
    """
    limit = threading.Timer(EXIT_SECONDS, os._exit, (status,))
    limit.daemon = True
    limit.start()
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that still work
    run_exit_handlers()
    os._exit(status)


def run_exit_handlers() -> None:
    """Call what is registered with ``atexit``, and flush the files that are still open.

    Trackers finish their run in such a handler. multiprocessing's processes end so, too.
    """
    with suppress(BaseException):
        atexit._run_exitfuncs()
    gc.unfreeze()  # or the files of before an import that froze all objects would not be found
    for file in (sys.stdout, sys.stderr, *gc.get_objects()):
        if issubclass(type(file), io.IOBase):
            with suppress(Exception):  # it is closed, or nobody reads any more
                file.flush()
