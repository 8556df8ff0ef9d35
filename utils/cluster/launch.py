"""From a command line to a rank that knows the others: the one way into a distributed script."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from utils import config, distributed, errors
from utils.cluster import launchers
from utils.cluster.calls import call_within
from utils.cluster.failures import Job
from utils.cluster.launchers import Launch
from utils.cluster.members import Member, host_identity
from utils.cluster.network import choose_interface
from utils.cluster.places import Address, AgentStore, File
from utils.cluster.rendezvous import RendezvousError, meet
from utils.device import import_dynamo, select_devices
from utils.errors import UsageError, UserError
from utils.signals import Stopped

DESTROY_SECONDS = 5.0  # for the process group to go after a failure


Run = Callable[[argparse.Namespace, Job], int]


def launch(run: Run, args: argparse.Namespace) -> int:
    """Find out how this process was started, meet the other ranks, and call ``run``.

    Whatever the launcher, ``run`` finds RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE in the
    environment. On every way out the process group is destroyed. One rank of several ends here,
    without returning.

    Args:
        run: called with ``args`` and the ``Job``.
        args: as ``config.parse_args`` returns them.

    Returns:
        The exit status.
    """
    if args.nprocs is not None:
        return errors.guard(launchers.spawn, partial(_run_rank, run, args), args)
    return _run_rank(run, args)


def _run_rank(run: Run, args: argparse.Namespace, given: Launch | None = None) -> int:
    world_size = 1

    def start() -> int:
        nonlocal world_size
        found = given or launchers.read_launch(args)
        world_size = found.world_size
        if found.launcher in ("torchrun", "mpirun"):  # a rank by hand may outlive its shell
            launchers.die_with_parent(found)
        try:
            return _meet_and_run(run, args, found)
        except UserError as error:
            if isinstance(error, Stopped) and found.is_managed:
                error.exit_status = 0
                if error.number == signal.SIGUSR1:
                    _meeting_place(args.init_method, found).publish_stop()
            error.reported_elsewhere = _is_reported(error, found)
            if error.reported_elsewhere and error.exit_status and found.is_managed:
                errors.let_another_rank_report()
            raise

    # What passes through ``record`` stands with its traceback in torchrun's report: bugs alone.
    status = record(errors.guard)(start) or 0
    if world_size > 1:
        # DDP never lets go of gloo's threads (torch 2.15), not even when the group is destroyed.
        # The interpreter, ending beside them, now and then aborts: 3 complete runs of about 300.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _meet_and_run(run: Run, args: argparse.Namespace, launch: Launch) -> int:
    job = _meet(args, launch)
    import_dynamo()  # or DDP's constructor would, more slowly
    try:
        status = run(args, job)
        job.leave()
    except Exception as error:
        explained = job.explain(error)
        job.publish_failure(explained)
        if dist.is_initialized():
            with suppress(TimeoutError):  # other ranks may not answer any more
                call_within(DESTROY_SECONDS, dist.destroy_process_group)
        if explained is error:
            raise
        raise explained from error
    dist.destroy_process_group()
    # A launcher takes any other status for a crash, and may start a stopped run again.
    return 0 if launch.is_managed and status > 128 else status


def _is_reported(error: UserError, launch: Launch) -> bool:
    """Tell whether a lower rank of this host reports the same error: one line will do.

    By hand each rank has a terminal; those of a launcher share one.
    """
    if launch.launcher == "environment":
        return False
    if isinstance(error, RendezvousError):
        here = host_identity()
        return any(other.host == here and other.rank < launch.rank for other in error.present)
    everywhere = isinstance(error, UsageError | Stopped) or error.reported_elsewhere
    return everywhere and bool(launch.local_rank)


def _meet(args: argparse.Namespace, launch: Launch) -> Job:
    """Find the other ranks, agree with them on what has to agree, and set the environment.

    Raises:
        UsageError: backend or device not there, or a GPU that two ranks would share.
        RendezvousError: ranks are missing, twice there, or do not belong together.
    """
    devices = select_devices(args.device, args.devices)
    backend = distributed.choose_backend(args.backend, devices[0])
    facts = {name: str(value) for name, value in config.shared(args).items()}
    own = Member(
        launch.rank,
        launch.world_size,
        {"torch": str(torch.__version__), "backend": backend, **facts},
        local_rank=-1 if launch.local_rank is None else launch.local_rank,
        # Gloo lets ranks share a GPU.
        gpus=distributed.find_gpus(devices) if backend == "nccl" else [],
        wait_seconds=args.rdzv_timeout,
    )
    store: dist.Store = dist.HashStore()
    members = [own]
    if launch.world_size > 1:
        # PyTorch looks up the name of every address that it connects to, at both ends, and one name
        # server that does not answer takes ten seconds. glibc reads this at its first lookup.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
        store, members = meet(_meeting_place(args.init_method, launch), own)
    for member in members:
        mates = [other.rank for other in members if other.host == member.host]
        if member.local_rank < 0:  # tcp:// and file:// give none
            member.local_rank = mates.index(member.rank)
        if member.rank == launch.rank:
            local_world_size = launch.local_world_size or len(mates)
    distributed.check_gpus([(str(m), m.local_rank, m.gpus) for m in members])
    os.environ.update(
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world_size),
        LOCAL_RANK=str(members[launch.rank].local_rank),
        LOCAL_WORLD_SIZE=str(local_world_size),
    )
    interface = choose_interface(members[launch.rank], members)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return Job(store, launch.rank, members, args.rdzv_timeout)


def _meeting_place(init_method: str, launch: Launch) -> Address:
    if init_method.startswith("file://"):
        return File(init_method.removeprefix("file://"))
    if init_method.startswith("tcp://"):
        address, _, port = init_method.removeprefix("tcp://").rpartition(":")
        return Address(address.strip("[]"), int(port))
    if launch.has_agent_store:
        return AgentStore(launch.master_addr, launch.master_port)
    return Address(launch.master_addr, launch.master_port)
