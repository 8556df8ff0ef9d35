"""How this process was started: by which launcher, and as which rank."""

import argparse
import os
import re
import signal
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from utils import signals
from utils.errors import UsageError

DEFAULT_PORT = 29500
MANAGED = ("torchrun", "slurm", "mpirun")  # they treat a stopped rank as a crashed one

# The names of each launcher for rank, world size, local rank and local world size.
NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "mpirun": tuple(f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
}


@dataclass(frozen=True)
class RankInfo:
    """What the launcher says about this process.

    Attributes:
        launcher: ``torchrun``, ``spawn``, ``slurm``, ``mpirun``, ``environment`` (variables or
            flags given by hand) or ``alone``.
        rank: of this process, among ``world_size``.
        local_rank: its number on this node, among ``local_world_size``. Both are None if only the
            meeting of all ranks can tell.
        master_addr: address of rank 0, with ``master_port``.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT


def read_rank_info(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return what the launcher's variables and the flags say.

    Raises:
        UsageError: variables are missing or contradict each other.
    """
    launcher = _identify(args, environ)
    if launcher == "alone":
        return RankInfo(launcher)
    names = NAMES.get(launcher, NAMES["torchrun"])
    rank, world_size, local_rank, local_world_size = (_number(environ, name) for name in names)
    # The job's name under mpirun, and an address without the space that a file may put there.
    job, address = environ.get("PMIX_NAMESPACE", ""), environ.get("MASTER_ADDR", "").strip()
    if launcher == "slurm":
        address = address or _first_slurm_host(environ)
        # All tasks of this step have the same name. A step beside it has another one.
        job = f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    if args.rank is not None:
        rank, world_size = args.rank, args.world_size
    if rank is None or world_size is None:
        missing, other = names[:2] if rank is None else names[1::-1]
        raise UsageError(f"{other} is set and {missing} is not: set both, or use torchrun")
    if rank >= world_size:
        raise UsageError(f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0")
    sizes, port = (rank, world_size, local_rank, local_world_size), read_port(environ, job)
    return RankInfo(launcher, *sizes, address or "127.0.0.1", port)


def _identify(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "RANK" in environ or "WORLD_SIZE" in environ or args.rank is not None:
        return "environment"
    # In the batch script itself SLURM_PROCID is set too, but no step has started.
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return "slurm"
    return "mpirun" if "OMPI_COMM_WORLD_RANK" in environ else "alone"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the whole number that a variable holds, or None if it is not set."""
    text = environ.get(name)
    if text is not None and not re.fullmatch("[0-9]{1,9}", text):
        raise UsageError(f"{name}={text[:20]} is not a whole number below a thousand million")
    return None if text is None else int(text)


def read_port(environ: Mapping[str, str], job: str = "") -> int:
    """Return MASTER_PORT. If it is not set, the name of the job, if any, chooses a port."""
    port = _number(environ, "MASTER_PORT")
    if port is None:
        # These ports are below those that the kernel gives out itself.
        return 10_000 + zlib.crc32(job.encode()) % 20_000 if job else DEFAULT_PORT
    if not 0 < port < 65_536:
        raise UsageError(f"MASTER_PORT={port} is not a port (1 to 65535)")
    return port


def _first_slurm_host(environ: Mapping[str, str]) -> str:
    """Return the first of ``node[03-05,9],other``, which is where task 0 runs."""
    nodes = environ.get("SLURM_STEP_NODELIST", "127.0.0.1")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def die_with_launcher(info: RankInfo) -> None:
    """Get a signal when the launcher dies.

    SIGTERM is a stop request, on which all ranks agree. If the job has other nodes, the signal is
    SIGKILL. The other nodes then notice a failure and start again, instead of stopping.
    """
    is_one_node = info.local_world_size == info.world_size
    signals.die_with_parent(signal.SIGTERM if is_one_node else signal.SIGKILL)
