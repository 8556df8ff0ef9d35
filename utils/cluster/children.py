"""The ranks of this node as child processes, if no launcher starts them (``--nprocs``)."""

import argparse
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch.multiprocessing as mp
from torch.distributed.elastic.utils.distributed import get_free_port

from utils import output, signals
from utils.cluster.calls import POLL_SECONDS
from utils.cluster.rank_info import RankInfo, die_with_launcher, read_port
from utils.errors import UsageError, UserError

# After a rank has failed, the others get SIGTERM after this time, and SIGKILL after twice this
# time. They need this time to find out who is lost (job.BUSY_SECONDS), and to destroy the
# process group (launch.DESTROY_SECONDS).
GRACE_SECONDS = 9.0


def spawn(start: Callable[[RankInfo], int], args: argparse.Namespace) -> int:
    """Start the ranks of this node, wait for them, and return the exit status.

    Args:
        start: called in each process.
        args: ``nprocs``, ``nnodes``, ``node_rank`` and ``init_method`` say how many, and where.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("--nprocs starts the processes itself: drop it, or drop torchrun")
    address = os.environ.get("MASTER_ADDR", "").strip()
    if args.nnodes > 1 and args.init_method == "env://" and not address:
        raise UsageError(
            "--nnodes needs the address of node 0: MASTER_ADDR, or --init-method tcp://host:port"
        )
    # On one node, variables that are left over in the shell do not count.
    address, port = ("", get_free_port()) if args.nnodes == 1 else (address, read_port(os.environ))
    first, world_size = args.node_rank * args.nprocs, args.nnodes * args.nprocs
    info = RankInfo("spawn", first, world_size, 0, args.nprocs, address or "127.0.0.1", port)
    stopped = mp.get_context("spawn").RawValue("i", 0)
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    context = mp.start_processes(_child, (start, info, stopped), args.nprocs, False)

    def interrupt(error: Exception) -> None:  # so that rank 0 can still write the state of the run
        _send(context.processes, signal.SIGINT)
        context.processes[0].join(signals.END_SECONDS / 2)

    signals.before_end(interrupt)
    return _wait_for(context, first) or stopped.value


def _child(local_rank: int, start: Callable[[RankInfo], int], info: RankInfo, stopped: Any) -> None:
    output.protect()
    signals.install_handlers()
    # A child inherits the start method spawn. With it each loader worker would import torch again.
    mp.set_start_method(None, force=True)
    die_with_launcher(info)
    try:
        status = start(replace(info, rank=info.rank + local_rank, local_rank=local_rank))
    except Exception:  # a bug: print the traceback of this rank alone
        traceback.print_exc()
        status = 1
    if status > 128:  # an agreed stop. A failure would kill the others
        stopped.value, status = status, 0
    end_process(status)


def end_process(status: int) -> NoReturn:
    """End a rank of several without the shutdown of the interpreter.

    DDP keeps gloo's threads (torch 2.15), even after the group is destroyed. An interpreter that
    shuts down beside them sometimes aborts: 3 of about 300 complete runs did.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _send(children: list[Any], number: int) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)


def _wait_for(context: Any, first: int) -> int:
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
            lost = f"rank {first + error.error_index} (pid {pid})"
            raise UserError(f"{lost} was killed by {error.signal_name}") from error
        return error.exit_code
    return 0
