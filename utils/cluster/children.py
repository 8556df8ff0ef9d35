"""The ranks of this machine as child processes, if no launcher starts them (``--nprocs``)."""

import logging
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.multiprocessing as mp
from torch.distributed.elastic.utils.distributed import get_free_port

from utils import errors, output, signals
from utils.cluster.calls import POLL_SECONDS
from utils.cluster.rank_info import RankInfo, die_with_launcher
from utils.errors import UsageError, UserError

# After a rank has failed, the others get SIGTERM after this time, and SIGKILL after twice this
# time. They need this time to find out who is lost (job.BUSY_SECONDS), and to destroy the
# process group (launch.DESTROY_SECONDS).
GRACE_SECONDS = 9.0


def spawn(start: Callable[[RankInfo], int], processes: int) -> int:
    """Start the ranks, wait for them, and return the exit status.

    Variables for a rendezvous that are left over in the shell do not count.

    Args:
        start: called in each process.
        processes: how many.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("--nprocs starts the processes itself: drop it, or drop torchrun")
    info = RankInfo("spawn", 0, processes, 0, processes, master_port=get_free_port())
    stopped = mp.get_context("spawn").RawValue("i", 0)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    context = mp.start_processes(_child, (start, info, stopped), processes, join=False)

    def interrupt(error: Exception) -> None:  # so that rank 0 can still write the state of the run
        _send(context.processes, signal.SIGINT)
        context.processes[0].join(signals.END_SECONDS / 2)

    errors.before_end(interrupt)
    try:
        return _wait_for(context) or stopped.value
    finally:
        errors.before_end(None)


def _child(rank: int, start: Callable[[RankInfo], int], info: RankInfo, stopped: Any) -> None:
    output.protect()
    signals.install_handlers()
    # A child inherits the start method spawn. With it each loader worker would import torch again.
    mp.set_start_method(None, force=True)
    die_with_launcher(info)
    try:
        status = start(replace(info, rank=rank, local_rank=rank))
    except Exception:  # a bug: print the traceback of this rank alone
        traceback.print_exc()
        status = 1
    if status > 128:  # an agreed stop. A failure would kill the others
        stopped.value, status = status, 0
    errors.end_process(status)


def _send(children: list[Any], number: int) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)


def _wait_for(context: Any) -> int:
    """Pass on a stop signal, end all ranks if one fails, and return the exit status."""
    forwarded = 0
    try:
        while not context.join(POLL_SECONDS, GRACE_SECONDS):
            if signals.received() and not forwarded:
                forwarded = signals.received()
                _send(context.processes, forwarded)
    except mp.ProcessExitedException as error:
        if signals.received():  # Ctrl-C reaches the children as well
            return 128 + signals.received()
        if error.signal_name:
            pid = context.processes[error.error_index].pid  # torch 2.9's error has none
            lost = f"rank {error.error_index} (pid {pid})"
            raise UserError(f"{lost} was killed by {error.signal_name}") from error
        return error.exit_code
    return 0
