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
from utils.cluster.addresses import Address, AgentStore
from utils.cluster.calls import call_within
from utils.cluster.job import Job, LostRank
from utils.cluster.rank_info import MANAGED, RankInfo
from utils.cluster.rendezvous import Peer, Peers, RendezvousError, meet
from utils.device import openmp_threads, select_devices, usable_cores
from utils.errors import UsageError, UserError
from utils.signals import Stopped
from utils.training import config

DESTROY_SECONDS = 5.0  # to destroy the process group after a failure

Train = Callable[[argparse.Namespace], int]


def launch(train: Train, args: argparse.Namespace) -> int:
    """Find out how this process was started, meet the other ranks, and call ``train``.

    Whatever the launcher, ``train`` finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT in the environment, where ``init_process_group`` looks for them, and
    in OMP_NUM_THREADS this rank's share of the cores. After an error in ``train`` the process group
    is destroyed here. One rank of several ends here, and does not return.

    Args:
        train: called with a copy of ``args`` whose ``backend`` is the one to use. ``given`` of the
            copy holds the flags as the user gave them.
        args: as ``config.parse_args`` returns them.

    Returns:
        The exit status.
    """
    if args.nprocs is not None:
        return errors.guard(children.spawn, partial(_run_rank, train, args), args.nprocs)
    return _run_rank(train, args)


def _run_rank(train: Train, args: argparse.Namespace, given: RankInfo | None = None) -> int:
    def start() -> int:
        info = given or rank_info.read_rank_info()
        os.environ.update(RANK=str(info.rank), WORLD_SIZE=str(info.world_size))
        if info.launcher in MANAGED and info.launcher != "slurm":  # others may outlive their shell
            rank_info.die_with_launcher(info)
        try:
            return _meet_and_train(train, args, info)
        except UserError as error:
            is_managed = info.launcher in MANAGED
            if isinstance(error, Stopped) and is_managed:
                error.exit_status = 0
            error.reported_elsewhere = _is_reported(error, info)
            if error.reported_elsewhere and error.exit_status and is_managed:
                errors.let_another_rank_report()
            raise

    # torchrun's report shows an error that passes ``record`` with its traceback. Only bugs pass it.
    status = record(errors.guard)(start) or 0
    if given is None and os.environ.get("WORLD_SIZE", "1") != "1":
        errors.end_process(status)
    return status


def _meet_and_train(train: Train, args: argparse.Namespace, info: RankInfo) -> int:
    backend = choose_backend(args.backend, select_devices(args.device, args.devices)[0])
    peers = _meet(args, info, backend)
    if backend == "nccl":  # the sums of metrics and all objects still go over the CPU
        backend = "cpu:gloo,cuda:nccl"
    job = Job(peers, args.rdzv_timeout, backend)
    flags = vars(args) | {"backend": backend, "given": vars(args)}
    job.watch()
    try:
        status = train(argparse.Namespace(**flags))
    except (Exception, SystemExit) as raised:
        error = job.explain(errors.explain(raised))
        errors.call_before_end(error)
        with suppress(Exception):  # there is none, or other ranks do not answer
            call_within(DESTROY_SECONDS, dist.destroy_process_group)
        if error is raised:
            raise
        raise error from raised
    job.has_ended = True
    # A launcher treats any other status as a crash, and may start a stopped run again.
    return 0 if info.launcher in MANAGED and status > 128 else status


def _is_reported(error: UserError, info: RankInfo) -> bool:
    """Return whether another rank of this machine prints the same error: one line is enough.

    Ranks that are started by hand have a terminal each. The ranks of a launcher share one.
    """
    if info.launcher == "environment":
        return False
    if isinstance(error, RendezvousError | LostRank):
        return error.reported_elsewhere
    # A stop, a mistake in the flags, a file that is missing and a run that is complete are the same
    # on all ranks.
    is_same = error.exit_status != 1 or isinstance(error.__cause__, FileNotFoundError)
    return bool(info.local_rank) and (is_same or error.reported_elsewhere)


def _meet(args: argparse.Namespace, info: RankInfo, backend: str) -> Peers:
    """Find the other ranks, agree with them on what has to agree, and set the environment.

    Raises:
        RendezvousError: ranks are missing, were started twice, or do not belong together.
    """
    facts = {"WORLD_SIZE": info.world_size, **config.shared(args)}
    facts |= {"torch": torch.__version__, "backend": backend}
    own = Peer(info.rank, {name: str(value) for name, value in facts.items()})
    peers = meet(_find_place(info), own, info.world_size, args.rdzv_timeout)
    local_rank, local_world_size = info.local_rank, info.local_world_size
    if local_rank is None:  # nobody but the ranks themselves knows
        local_rank = peers.local_ranks.index(info.rank)
    address, port = peers.address
    os.environ.update(
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_world_size or len(peers.local_ranks)),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        # Or ``init_process_group`` would take MASTER_PORT for the port of torchrun's own store. In
        # that one a restarted rank may find addresses of the attempt before.
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    if peers.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", peers.interface)
    share_cores(info, peers.sharing_cores)
    return peers


def _find_place(info: RankInfo) -> Address:
    """Return where rank 0 is to be found."""
    if info.world_size == 1:
        return Address("127.0.0.1", 0)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return AgentStore(info.master_addr, info.master_port)
    is_given = info.master_addr == os.environ.get("MASTER_ADDR", "").strip()
    return Address(info.master_addr, info.master_port, "MASTER_ADDR" if is_given else "")


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
