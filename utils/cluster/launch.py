"""From a command line to a rank that knows the others. A distributed script starts only here."""

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from utils import config, distributed, errors
from utils.cluster import children, launchers
from utils.cluster.calls import call_within
from utils.cluster.failures import Job, LostRank
from utils.cluster.launchers import Launch
from utils.cluster.meeting import Meeting, Member, RendezvousError, meet
from utils.cluster.places import Address, AgentStore, File
from utils.device import import_dynamo, select_devices
from utils.errors import UsageError, UserError
from utils.signals import Stopped

DESTROY_SECONDS = 5.0  # to destroy the process group after a failure

Train = Callable[[argparse.Namespace, Job], int]


def launch(train: Train, args: argparse.Namespace) -> int:
    """Find out how this process was started, meet the other ranks, and call ``train``.

    Whatever the launcher, ``train`` finds RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in the
    environment. The process group is always destroyed, also after an error. One rank of several
    ends here, and does not return.

    Args:
        train: called with ``args`` and the ``Job``.
        args: as ``config.parse_args`` returns them.

    Returns:
        The exit status.
    """
    if args.nprocs is not None:
        return errors.guard(children.spawn, partial(_run_rank, train, args), args)
    return _run_rank(train, args)


def _run_rank(train: Train, args: argparse.Namespace, given: Launch | None = None) -> int:
    def start() -> int:
        found = given or launchers.read_launch(args)
        os.environ.update(RANK=str(found.rank), WORLD_SIZE=str(found.world_size))
        if found.launcher in ("torchrun", "mpirun"):  # others may outlive their shell
            launchers.die_with_parent(found)
        try:
            return _meet_and_train(train, args, found)
        except UserError as error:
            is_managed = found.launcher in launchers.MANAGED
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


def _meet_and_train(train: Train, args: argparse.Namespace, launch: Launch) -> int:
    job = _meet(args, launch)
    import_dynamo()  # otherwise DDP's constructor does it, more slowly
    try:
        status = train(args, job)
        # After training, rank 0 still writes results, and its store ends with it. Without this
        # barrier nobody would notice that rank 0 fails there. It runs on the CPU, over gloo, with
        # --timeout.
        dist.all_reduce(torch.zeros(1))
    except Exception as error:
        explained = job.explain(error)
        with suppress(Exception):  # there is none, or other ranks do not answer
            call_within(DESTROY_SECONDS, dist.destroy_process_group)
        if explained is error:
            raise
        raise explained from error
    dist.destroy_process_group()
    # A launcher treats any other status as a crash, and may start a stopped run again.
    return 0 if launch.launcher in launchers.MANAGED and status > 128 else status


def _is_reported(error: UserError, launch: Launch) -> bool:
    """Return whether another rank of this host prints the same error, since one line is enough.

    Ranks that are started by hand have a terminal each. The ranks of a launcher share one.
    """
    if launch.launcher == "environment":
        return False
    if isinstance(error, RendezvousError | LostRank):
        return error.reported_elsewhere
    everywhere = isinstance(error, Stopped) or error.exit_status == 2 or error.reported_elsewhere
    return everywhere and bool(launch.local_rank)


def _meet(args: argparse.Namespace, launch: Launch) -> Job:
    """Find the other ranks, agree with them on what has to agree, and set the environment.

    Raises:
        UsageError: the backend or the device does not exist, or a rank has no GPU.
        RendezvousError: ranks are missing, were started twice, or do not belong together.
    """
    devices = select_devices(args.device, args.devices)
    backend = distributed.choose_backend(args.backend, devices[0])
    facts = {"WORLD_SIZE": launch.world_size, **config.shared(args)}
    facts |= {"torch": torch.__version__, "backend": backend}
    own = Member(launch.rank, {name: str(value) for name, value in facts.items()})
    met = Meeting(own, launch.world_size, own)
    if launch.world_size > 1:
        place = _meeting_place(args.init_method, launch)
        met = meet(place, own, launch.world_size, args.rdzv_timeout)
    # tcp:// and file:// give no local rank.
    local_rank = met.mates.index(launch.rank) if launch.local_rank is None else launch.local_rank
    local_world_size = launch.local_world_size or len(met.mates)
    # A launcher may show each rank one GPU, which is then number 0 for all of them.
    if backend == "nccl" and local_world_size > len(devices) > 1:
        raise UsageError(
            f"{local_world_size} ranks are on this node and see {len(devices)} GPUs: start one"
            " process for each (--nproc_per_node), or try --backend gloo, whose ranks may share"
        )
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_world_size))
    if met.interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", met.interface)
    return Job(met, args.rdzv_timeout)


def _meeting_place(init_method: str, launch: Launch) -> Address:
    kind, _, where = init_method.partition("://")
    if kind == "file":
        return File(where)
    if kind == "tcp":
        address, _, port = where.rpartition(":")
        return Address(address.strip("[]"), int(port), "--init-method")
    # The variable alone may be left over in a shell.
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    place = AgentStore if has_store and launch.launcher == "torchrun" else Address
    is_given = launch.master_addr == os.environ.get("MASTER_ADDR", "").strip()
    return place(launch.master_addr, launch.master_port, "MASTER_ADDR" * is_given)
