"""From a command line to a rank that knows the others. A distributed script starts only here."""

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from utils import errors
from utils.cluster import children, rank_info
from utils.cluster.calls import call_within
from utils.cluster.job import Job, LostRank
from utils.cluster.meeting import Meeting, Member, RendezvousError, meet
from utils.cluster.places import Address, AgentStore, File
from utils.cluster.rank_info import RankInfo
from utils.device import openmp_threads, select_devices, usable_cores
from utils.errors import UsageError, UserError
from utils.signals import Stopped
from utils.training import config

DESTROY_SECONDS = 5.0  # to destroy the process group after a failure

Train = Callable[[argparse.Namespace, Job], int]


def launch(train: Train, args: argparse.Namespace) -> int:
    """Find out how this process was started, meet the other ranks, and call ``train``.

    Whatever the launcher, ``train`` finds RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in the
    environment, and in OMP_NUM_THREADS this rank's share of the cores. After an error in ``train``
    the process group is destroyed here. One rank of several ends here, and does not return.

    Args:
        train: called with ``args`` and the ``Job``.
        args: as ``config.parse_args`` returns them.

    Returns:
        The exit status.
    """
    if args.nprocs is not None:
        return errors.guard(children.spawn, partial(_run_rank, train, args), args)
    return _run_rank(train, args)


def _run_rank(train: Train, args: argparse.Namespace, given: RankInfo | None = None) -> int:
    def start() -> int:
        found = given or rank_info.read_rank_info(args)
        os.environ.update(RANK=str(found.rank), WORLD_SIZE=str(found.world_size))
        if found.launcher in ("torchrun", "mpirun"):  # others may outlive their shell
            rank_info.die_with_launcher(found)
        try:
            return _meet_and_train(train, args, found)
        except UserError as error:
            is_managed = found.launcher in rank_info.MANAGED
            if isinstance(error, Stopped) and is_managed:
                error.exit_status = 0
            error.reported_elsewhere = _is_reported(error, found)
            if error.reported_elsewhere and error.exit_status and is_managed:
                errors.let_another_rank_report()
            raise

    # torchrun's report shows an error that passes ``record`` with its traceback. Only bugs pass it.
    status = record(errors.guard)(start) or 0
    if given is None and os.environ.get("WORLD_SIZE", "1") != "1":
        children.end_process(status)
    return status


def _meet_and_train(train: Train, args: argparse.Namespace, info: RankInfo) -> int:
    job = _meet(args, info)
    try:
        status = train(args, job)
    except Exception as error:
        explained = job.explain(error)
        with suppress(Exception):  # there is none, or other ranks do not answer
            call_within(DESTROY_SECONDS, dist.destroy_process_group)
        if explained is error:
            raise
        raise explained from error
    # A launcher treats any other status as a crash, and may start a stopped run again.
    return 0 if info.launcher in rank_info.MANAGED and status > 128 else status


def _is_reported(error: UserError, info: RankInfo) -> bool:
    """Return whether another rank of this host prints the same error, since one line is enough.

    Ranks that are started by hand have a terminal each. The ranks of a launcher share one.
    """
    if info.launcher == "environment":
        return False
    if isinstance(error, RendezvousError | LostRank):
        return error.reported_elsewhere
    # A stop, a mistake in the flags, and a run that is complete are the same on all ranks.
    return bool(info.local_rank) and (error.exit_status != 1 or error.reported_elsewhere)


def _meet(args: argparse.Namespace, info: RankInfo) -> Job:
    """Find the other ranks, agree with them on what has to agree, and set the environment.

    Raises:
        UsageError: the backend or the device does not exist.
        RendezvousError: ranks are missing, were started twice, or do not belong together.
    """
    backend = choose_backend(args.backend, select_devices(args.device, args.devices)[0])
    facts = {"WORLD_SIZE": info.world_size, **config.shared(args)}
    facts |= {"torch": torch.__version__, "backend": backend}
    own = Member(info.rank, {name: str(value) for name, value in facts.items()})
    met = Meeting(own, info.world_size, own)
    if info.world_size > 1:
        place = _meeting_place(args.init_method, info)
        met = meet(place, own, info.world_size, args.rdzv_timeout)
    # tcp:// and file:// give no local rank.
    local_rank = met.mates.index(info.rank) if info.local_rank is None else info.local_rank
    local_world_size = info.local_world_size or len(met.mates)
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_world_size))
    if met.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", met.interface)
    share_cores(info, met.sharing_cores)
    # With nccl, the sums of metrics and all objects still go over the CPU.
    return Job(met, args.rdzv_timeout, "cpu:gloo,cuda:nccl" if backend == "nccl" else backend)


def choose_backend(backend: str, device: torch.device) -> str:
    """Return the backend to use on a device: ``auto`` is nccl for CUDA, gloo otherwise.

    Raises:
        UsageError: the backend is not in this build, or cannot work here.
    """
    # With torch 2.13 to 2.15.
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" and device.type == "cpu":
        raise UsageError("TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP on gloo: use INFO")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"gloo and nccl know no {device.type} device: use train_single.py, or --device cpu"
        )
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    built = [name for name in ("nccl", "gloo", "mpi") if dist.is_backend_available(name)]
    if backend not in built or (backend == "nccl" and device.type != "cuda"):
        raise UsageError(
            f"--backend {backend}: this torch was built with {' and '.join(built)}, nccl for CUDA"
        )
    return backend


def share_cores(info: RankInfo, ranks: int) -> None:
    """Note in OMP_NUM_THREADS this rank's share of the cores, unless a user has set the variable.

    Torch would take every core in each process. torchrun sets the variable to 1 if it is not set,
    so under torchrun any other number is the user's.

    Args:
        ranks: how many share the cores of this rank, itself included.
    """
    if openmp_threads() in (0, int(info.launcher == "torchrun")):
        os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // ranks))


def _meeting_place(init_method: str, info: RankInfo) -> Address:
    kind, _, where = init_method.partition("://")
    if kind == "file":
        return File(where)
    if kind == "tcp":
        address, _, port = where.rpartition(":")
        return Address(address.strip("[]"), int(port), "--init-method")
    place = AgentStore if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else Address
    is_given = info.master_addr == os.environ.get("MASTER_ADDR", "").strip()
    return place(info.master_addr, info.master_port, "MASTER_ADDR" * is_given)
