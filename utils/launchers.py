"""How this process was started: by which launcher, as which rank, or as the parent of the ranks."""

import argparse
import ctypes
import os
import re
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from utils import rendezvous, signals
from utils.config import UsageError

Run = Callable[[argparse.Namespace], int]
AsRank = Callable[[Run, argparse.Namespace], int]

DEFAULT_PORT = 29500
PR_SET_PDEATHSIG = 1  # prctl(2)
GRACE_SECONDS = 5.0  # for the other ranks to end by themselves when one has failed
LAUNCHER_VARIABLE = "MNIST_LAUNCHER"  # tells the children of --nprocs who started them


def set_environment(args: argparse.Namespace, environ: Any = os.environ) -> str:
    """Translate what the launcher tells into torchrun's variables; return the launcher's name.

    Raises:
        UsageError: variables that are missing or contradict each other.
    """
    launcher = _identify(args, environ)
    if launcher == "alone":
        environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if launcher == "slurm":
        # The same for all tasks of this step, and another for a step beside it.
        port = _port_of(f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}")
        environ.update(
            RANK=environ["SLURM_PROCID"],
            WORLD_SIZE=environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"],
            LOCAL_RANK=environ["SLURM_LOCALID"],
            MASTER_ADDR=environ.get("MASTER_ADDR") or _first_slurm_host(environ),
            MASTER_PORT=environ.get("MASTER_PORT") or port,
        )
    if launcher == "mpirun":
        size, local_size = environ["OMPI_COMM_WORLD_SIZE"], environ["OMPI_COMM_WORLD_LOCAL_SIZE"]
        if "MASTER_ADDR" not in environ and size != local_size and args.init_method == "env://":
            raise UsageError(
                "mpirun over several hosts does not say where rank 0 is: add"
                " -x MASTER_ADDR=<address of the first host>"
            )
        port = _port_of(environ.get("PMIX_NAMESPACE", ""))  # mpirun's name of the job
        environ.update(
            RANK=environ["OMPI_COMM_WORLD_RANK"],
            WORLD_SIZE=size,
            LOCAL_RANK=environ["OMPI_COMM_WORLD_LOCAL_RANK"],
            LOCAL_WORLD_SIZE=local_size,
            MASTER_ADDR=environ.get("MASTER_ADDR") or "127.0.0.1",
            MASTER_PORT=environ.get("MASTER_PORT") or port,
        )
    if args.rank is not None:
        if launcher != "environment":
            raise UsageError(f"{launcher} numbers the processes: drop --rank and --world-size")
        environ.update(RANK=str(args.rank), WORLD_SIZE=str(args.world_size))
    if args.local_rank is not None:
        environ.setdefault("LOCAL_RANK", str(args.local_rank))
    _check_environment(environ)
    return launcher


def _identify(args: argparse.Namespace, environ: Any) -> str:
    if LAUNCHER_VARIABLE in environ:
        return environ[LAUNCHER_VARIABLE]
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "RANK" in environ or "WORLD_SIZE" in environ or args.rank is not None:
        return "environment"
    # In the batch script itself SLURM_PROCID is set too, but no step has started.
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return "slurm"
    if "OMPI_COMM_WORLD_RANK" in environ:
        return "mpirun"
    return "alone"


def _first_slurm_host(environ: Any) -> str:
    """Return the first of ``node[03-05,9],other``, which is where task 0 runs."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "127.0.0.1")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def _port_of(job: str) -> str:
    """Choose a port by the name of a job, below those that the kernel hands out itself."""
    return str(10_000 + zlib.crc32(job.encode()) % 20_000)


def _check_environment(environ: Any) -> None:
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in environ:
            if not re.fullmatch(r"\d+", environ[name]):
                raise UsageError(f"{name}={environ[name]} is not a whole number")
            values[name] = int(environ[name])
    for name, sibling in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in values:
            raise UsageError(f"{sibling} is set and {name} is not: set both, or use torchrun")
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise UsageError(
            f"RANK={values['RANK']} is not below WORLD_SIZE={values['WORLD_SIZE']}: ranks count"
            " from 0 (rank = node_rank * nproc_per_node + local_rank)"
        )
    if values.get("LOCAL_RANK", 0) >= values.get("LOCAL_WORLD_SIZE", sys.maxsize):
        raise UsageError(
            f"LOCAL_RANK={values['LOCAL_RANK']} is not below"
            f" LOCAL_WORLD_SIZE={values['LOCAL_WORLD_SIZE']}: it counts within a node, from 0"
        )
    port = environ.get("MASTER_PORT", "1")
    if not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65_536:
        raise UsageError(f"MASTER_PORT={port} is not a port (1 to 65535)")


def die_with_parent() -> None:
    """Ask the kernel for a signal when the launcher dies, or the rank would train on without it.

    SIGTERM is a stop request, on which all ranks agree. With other nodes in the job it is SIGKILL:
    they are to notice a failure and start again, not to stop.
    """
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    with suppress(OSError, AttributeError):  # Linux alone has it
        number = signal.SIGTERM if is_one_node else signal.SIGKILL
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def spawn(as_rank: AsRank, run: Run, args: argparse.Namespace) -> int:
    """Start the ranks of this node as child processes, wait for them, and return the exit status.

    Args:
        as_rank: called with ``run`` and ``args`` in each process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("--nprocs starts the processes itself: drop it, or drop torchrun")
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if args.nnodes > 1 and args.init_method == "env://" and address is None:
        raise UsageError(
            "--nnodes needs the address of node 0: --init-method tcp://<address>:<port>, or"
            " MASTER_ADDR and MASTER_PORT, the same on every node"
        )
    if port is None and args.nnodes == 1:
        with socket.socket() as probe:  # free now; rank 0 says so if it no longer is
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
    shared = {
        LAUNCHER_VARIABLE: "spawn",
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": port or str(DEFAULT_PORT),
        "WORLD_SIZE": str(args.nnodes * args.nprocs),
        "LOCAL_WORLD_SIZE": str(args.nprocs),
    }
    first_rank = args.node_rank * args.nprocs
    context = mp.get_context("spawn")
    children: dict[int, Any] = {}
    try:
        for local_rank in range(args.nprocs):
            ranks = {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
            what = (as_rank, run, args, shared | ranks, os.getpid())
            child = context.Process(target=_child, args=what)
            child.start()
            children[first_rank + local_rank] = child
        return _wait_for(children)
    finally:
        for child in children.values():  # all have ended, unless a second Ctrl-C brought us here
            child.kill()


def _child(
    as_rank: AsRank,
    run: Run,
    args: argparse.Namespace,
    environment: dict[str, str],
    parent: int,
) -> None:
    signals.install_handlers()
    os.environ.update(environment)
    die_with_parent()
    if os.getppid() != parent:  # it died before the kernel knew of our wish
        sys.exit(1)
    args.nprocs = None
    sys.exit(as_rank(run, args))


def _wait_for(children: dict[int, Any]) -> int:
    """Pass a stop signal on, end the rest when one fails, and return the exit status."""
    status, forwarded, deadline = 0, 0, float("inf")
    while any(child.is_alive() for child in children.values()):
        time.sleep(rendezvous.POLL_SECONDS)
        if signals.received() and not forwarded:
            forwarded = signals.received()
            for child in children.values():
                with suppress(ProcessLookupError):
                    os.kill(child.pid, forwarded)
        for rank, child in children.items():
            # Above 128 all have agreed to stop, and rank 0 may still be saving.
            if child.exitcode and child.exitcode < 128 and not status:
                status, deadline = max(child.exitcode, 1), time.monotonic() + GRACE_SECONDS
                if child.exitcode < 0 and not forwarded:
                    script, name = Path(sys.argv[0]).name, signal.Signals(-child.exitcode).name
                    print(
                        f"{script}: error: rank {rank} (pid {child.pid}) was killed by {name}",
                        file=sys.stderr,
                    )
        if time.monotonic() > deadline:
            for child in children.values():
                child.kill()
    codes = [child.exitcode for child in children.values()]
    return 128 + forwarded if forwarded and any(codes) else status or max(codes)
