"""How this process was started: by which launcher, and as which rank."""

import os
import re
import signal
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from utils import signals
from utils.errors import UsageError

DEFAULT_PORT = 29500


class Names(NamedTuple):
    """The variables in which a launcher gives these numbers. Empty where it gives none."""

    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""


def _of_mpi(prefix: str) -> Names:
    return Names(f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE")


# Launchers that treat a stopped rank as a crashed one. mpich is any launcher that speaks PMI:
# MPICH's, Intel MPI's, or srun with --mpi=pmi2. pals is HPE's mpiexec.
MANAGED = {
    "torchrun": Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "slurm": Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "mpirun": _of_mpi("OMPI_COMM_WORLD"),
    "mvapich": _of_mpi("MV2_COMM_WORLD"),
    "pals": Names("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    "mpich": Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class RankInfo:
    """What the launcher says about this process.

    Attributes:
        launcher: one of ``MANAGED``, ``spawn``, ``environment`` (variables set by hand) or
            ``alone``.
        rank: of this process, among ``world_size``.
        local_rank: its number on this machine, among ``local_world_size``. Both are None if only
            the rendezvous of all ranks can tell.
        master_addr: address of rank 0, with ``master_port``.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT


def read_rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo:
    """Return what the launcher's variables say.

    Raises:
        UsageError: variables are missing or contradict each other.
    """
    launcher = _identify(environ)
    if launcher == "alone":
        return RankInfo(launcher)
    names = MANAGED.get(launcher, MANAGED["torchrun"])
    rank, world_size = _number(environ, names.rank), _number(environ, names.world_size)
    if rank is None or world_size is None:
        given, missing = names.rank, names.world_size
        if rank is None:
            given, missing = missing, given
        raise UsageError(f"{given} is set and {missing} is not: set both, or use torchrun")
    if rank >= world_size:
        problem = f"{names.rank}={rank} is not below {names.world_size}={world_size}"
        raise UsageError(f"{problem}: ranks count from 0")
    # A file of settings may leave a space in the address.
    address = environ.get("MASTER_ADDR", "").strip()
    job = environ.get("PMIX_NAMESPACE", "") or environ.get("PALS_APID", "")
    if launcher == "slurm":
        address = address or _first_slurm_host(environ)
        # All tasks of this step have the same name. A step beside it has another one.
        job = f"{environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"
    return RankInfo(
        launcher,
        rank,
        world_size,
        _number(environ, names.local_rank),
        _number(environ, names.local_world_size),
        address or "127.0.0.1",
        _read_port(environ, job),
    )


def _identify(environ: Mapping[str, str]) -> str:
    """Return the launcher that started this process itself."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return "environment"
    # Inside a job of Slurm these start their helpers with srun. Their ranks inherit its variables.
    for launcher in ("mpirun", "mvapich", "pals"):
        if MANAGED[launcher].rank in environ:
            return launcher
    # srun itself sets PMI_RANK, too, but not the local rank. In the batch script itself
    # SLURM_PROCID is set, but no step has started.
    has_step = "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ
    if has_step and MANAGED["mpich"].local_rank not in environ:
        return "slurm"
    return "mpich" if MANAGED["mpich"].rank in environ else "alone"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return the whole number that a variable holds, or None if it is not set."""
    text = environ.get(name)
    if text is not None and not re.fullmatch("[0-9]{1,9}", text):
        raise UsageError(f"{name}={text[:20]} is not a whole number below a thousand million")
    return None if text is None else int(text)


def _read_port(environ: Mapping[str, str], job: str) -> int:
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

    SIGTERM is a stop request, on which all ranks agree. If the job has other machines, the signal
    is SIGKILL. The other machines then notice a failure and start again, instead of stopping.
    """
    is_one_machine = info.local_world_size == info.world_size
    signals.die_with_parent(signal.SIGTERM if is_one_machine else signal.SIGKILL)
