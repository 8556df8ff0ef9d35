"""One process among many: how it was started, who else is there, and what they do together.

A function marked *collective* must be called by every rank, in the same order.
"""

import argparse
import ctypes
import os
import pickle
import re
import secrets
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from utils import rendezvous, runtime, signals
from utils.config import UsageError
from utils.rendezvous import Member, RendezvousError, Stopped

Result = TypeVar("Result")
Run = Callable[[argparse.Namespace], int]

DEFAULT_PORT = 29500
PR_SET_PDEATHSIG = 1  # prctl(2)
ROLL_SECONDS = 2.0  # in which every rank that is still there notices that one is not
GRACE_SECONDS = 5.0  # for the other ranks to end by themselves when one has failed
LAUNCHER_VARIABLE = "MNIST_LAUNCHER"  # tells the children of --nprocs who started them


_members: list[Member] = []  # of this job
_steps = 0  # that this process has agreed on


class LostRank(Exception):
    """A collective failed because another rank is gone, or did not answer in time."""

    exit_status = 1


def launch(run: Run, args: argparse.Namespace) -> int:
    """Find out how this process was started, call ``run`` as a rank, and return the exit status.

    Whatever the launcher, ``run`` finds RANK, WORLD_SIZE and, where it is known, LOCAL_RANK in
    the environment. On every way out the process group is destroyed. One rank of several ends
    here, without returning.
    """
    start = _spawn if args.nprocs is not None else _run_as_rank
    status = runtime.guard(lambda args: start(run, args), args)
    if len(_members) > 1:
        # DDP never lets go of gloo's threads (torch 2.15), not even when the group is destroyed.
        # The interpreter, ending beside them, now and then aborts: 3 complete runs of about 300.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run_as_rank(run: Run, args: argparse.Namespace) -> int:
    launcher = set_environment(args)
    if launcher in ("torchrun", "mpirun", "spawn"):  # a rank by hand may outlive its shell
        _die_with_parent()
    try:
        outcome = record(_attempt)(run, args) or 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if isinstance(outcome, Exception):
        # By hand each rank has a terminal; those of a launcher share one.
        if launcher != "alone":
            outcome.told_by_main = launcher != "environment" and _is_told(outcome)  # type: ignore[attr-defined]
        raise outcome
    # A launcher takes any other status for a crash, and may start a stopped run again.
    return 0 if launcher in ("torchrun", "slurm", "mpirun") and outcome > 128 else outcome


def _attempt(run: Run, args: argparse.Namespace) -> int | Exception:
    """Return the exit status, or an error that is told in one line.

    Others go through ``record``, which puts their traceback into torchrun's report.
    """
    try:
        return run(args)
    except Exception as error:
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            reason = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).partition(". ")[0]
            return LostRank(
                f"rank {os.environ['RANK']} lost {_find_absent('Timed out' in reason)} ({reason})"
            )
        if hasattr(error, "exit_status"):
            return error
        raise


def _find_absent(end_stalled: bool) -> str:
    """Name the ranks that no longer answer, among those that do.

    Each rank that notices leaves the number of its last step in the store; who leaves none is gone
    or stalled. A stalled one of this host is killed, or torchrun would wait for it half a minute.
    """
    rank, absent = int(os.environ["RANK"]), dict(enumerate(_members))
    steps: dict[int, int] = {}

    def roll_call() -> None:
        with suppress(RuntimeError):  # the store is rank 0's, and goes with it
            store = dist.distributed_c10d._get_default_store()
            store.set(f"lost/{rank}", str(_steps))
            deadline = time.monotonic() + ROLL_SECONDS
            while absent and time.monotonic() < deadline:
                for other in [other for other in absent if store.check([f"lost/{other}"])]:
                    steps[other] = int(store.get(f"lost/{other}"))
                    del absent[other]
                time.sleep(rendezvous.POLL_SECONDS)

    # In a thread: where rank 0 has stalled, its store never answers, nor looks at a timeout.
    caller = threading.Thread(target=roll_call, daemon=True)
    caller.start()
    caller.join(2 * ROLL_SECONDS)
    if not steps:
        absent = {0: _members[0]}
    if not absent:
        late = [str(_members[other]) for other in steps if steps[other] < max(steps.values())]
        return f"no rank, but {', '.join(late) or 'none'} is behind: look at its load and --timeout"
    for member in absent.values():
        if end_stalled and member.host == _members[rank].host:
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
    names = ", ".join(f"rank {member}" for member in absent.values())
    return f"{names} at step {_steps}: it crashed, left or stalled; its own output says more"


def _is_told(error: Exception) -> bool:
    """Tell whether a lower rank of this host reports the same error: one line will do."""
    if isinstance(error, RendezvousError):
        here, rank = rendezvous.host_identity(), int(os.environ["RANK"])
        return any(host == here and other < rank for other, host in error.present)
    everywhere = isinstance(error, UsageError | Stopped) or hasattr(error, "told_by_main")
    return everywhere and os.environ.get("LOCAL_RANK", "0") != "0"


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


def _die_with_parent() -> None:
    """Ask the kernel for a signal when the launcher dies, or the rank would train on without it.

    SIGTERM is a stop request, on which all ranks agree. With other nodes in the job it is SIGKILL:
    they are to notice a failure and start again, not to stop.
    """
    is_one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    with suppress(OSError, AttributeError):  # Linux alone has it
        number = signal.SIGTERM if is_one_node else signal.SIGKILL
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def _spawn(run: Run, args: argparse.Namespace) -> int:
    """Start the ranks of this node as child processes and wait for them."""
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
            child = context.Process(target=_child, args=(run, args, shared | ranks, os.getpid()))
            child.start()
            children[first_rank + local_rank] = child
        return _wait_for(children)
    finally:
        for child in children.values():  # all have ended, unless a second Ctrl-C brought us here
            child.kill()


def _child(run: Run, args: argparse.Namespace, environment: dict[str, str], parent: int) -> None:
    signals.install_handlers()
    os.environ.update(environment)
    _die_with_parent()
    if os.getppid() != parent:  # it died before the kernel knew of our wish
        sys.exit(1)
    args.nprocs = None
    sys.exit(launch(run, args))


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


def setup_process_group(
    backend: str,
    device_kind: str,
    device_ids: list[int] | None,
    threads: int | None,
    *,
    init_method: str = "env://",
    rdzv_timeout: float = 120.0,
    timeout: float = 600.0,
    must_agree: dict[str, Any] | None = None,
) -> tuple[torch.device, int, int, str]:
    """Meet the other ranks, join the process group and take this process's device. Collective.

    Args:
        backend: ``auto`` (nccl for CUDA, gloo otherwise) or a backend of this build.
        device_kind: as for ``runtime.select_devices``.
        device_ids: logical ids, one for each local rank.
        threads: CPU threads of each process, or None for an equal share of the cores.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        rdzv_timeout: seconds to wait for all ranks.
        timeout: seconds that a collective may take.
        must_agree: what every rank has to have the same, name to value.

    Returns:
        device, rank, world size, backend.

    Raises:
        UsageError: backend or device not there.
        RendezvousError: ranks are missing, twice there, or do not belong together.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    devices = runtime.select_devices(device_kind, device_ids)
    backend = _choose_backend(backend, devices[0])
    own = Member(
        rank,
        world_size,
        {"torch": str(torch.__version__), "backend": backend, **(must_agree or {})},
        local_rank=int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None,
        devices=len(devices) if backend == "nccl" else 0,  # gloo lets ranks share a GPU
        patience=rdzv_timeout,
    )
    deadline = time.monotonic() + rdzv_timeout
    store, members = _meet(init_method, own)
    _members[:] = members
    local_rank, sharing = _find_local_rank(own, members)
    _choose_interface(own, members)
    device = devices[local_rank % len(devices)]
    runtime.setup_device(device, threads, sharing)
    try:
        dist.init_process_group(
            # Small host-side agreements go over gloo, which leaves the GPU's queue alone.
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=max(3.0, deadline - time.monotonic())),
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {own} has met all ranks, but {backend} cannot connect them"
            f" ({str(error).splitlines()[0]}): each host must reach each other one on all ports,"
            " through the interface that GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names"
        ) from error
    # What bounds the rendezvous is too short for a collective. Older releases hide the setter.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=timeout))
    return device, rank, world_size, backend


def _choose_backend(backend: str, device: torch.device) -> str:
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" and device.type == "cpu":
        raise UsageError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP on gloo (torch 2.13 to 2.15): use INFO"
        )
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    built = [name for name in ("nccl", "gloo", "mpi") if dist.is_backend_available(name)]
    if backend not in built:
        raise UsageError(f"--backend {backend}: this torch was built with {' and '.join(built)}")
    if backend == "nccl" and device.type != "cuda":
        raise UsageError(f"--backend nccl needs CUDA devices, not {device.type}: use gloo")
    return backend


def _meet(init_method: str, own: Member) -> tuple[dist.Store, list[Member]]:
    """Hold the roll call; return a store that all ranks of this attempt share, and all ranks."""
    if own.world_size == 1:
        return dist.HashStore(), [own]
    place = _meeting_place(init_method)
    if own.rank > 0:
        host, port, members = rendezvous.answer_roll(place, own)
        return dist.TCPStore(host, port, None, False, wait_for_workers=False), members
    word = secrets.token_hex(8) if place.is_published else ""
    listener = rendezvous.open_roll(place, own, word)
    members = rendezvous.call_roll(listener, word, own, place.hint())
    place.withdraw()
    port = listener.getsockname()[1]
    # The port stays ours: the store goes on listening where the others found us.
    descriptor = listener.detach()

    def serve(**options: Any) -> dist.TCPStore:
        return dist.TCPStore(
            "127.0.0.1",
            port,
            None,
            True,
            wait_for_workers=False,
            master_listen_fd=descriptor,
            **options,
        )

    try:
        return serve(), members
    except NotImplementedError:  # the newer of torch's two servers cannot, up to torch 2.6 at least
        return serve(use_libuv=False), members


def _meeting_place(init_method: str) -> rendezvous.Address:
    if init_method.startswith("file://"):
        return rendezvous.File(init_method.removeprefix("file://"))
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
    if init_method.startswith("tcp://"):
        address, _, text = init_method.removeprefix("tcp://").rpartition(":")
        return rendezvous.Address(address.strip("[]"), int(text))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent has the port, and keeps its store over restarts: ranks that read there
        # the addresses of the attempt before hang (pytorch/pytorch#135712).
        store = dist.TCPStore(address, port, None, False, wait_for_workers=False)
        return rendezvous.Board(address, port, store)
    return rendezvous.Address(address, port)


def _find_local_rank(own: Member, members: list[Member]) -> tuple[int, int]:
    """Return this rank's number on its host, and how many ranks share its cores.

    tcp:// and file:// give no local rank: the roll call does. Slurm and mpirun may give each rank
    cores of its own.
    """
    for member in members:
        mates = [other for other in members if other.host == member.host]
        local_rank = mates.index(member) if member.local_rank is None else member.local_rank
        if member.rank == own.rank:
            os.environ["LOCAL_RANK"] = str(local_rank)
            sharing = sum(bool(int(mate.cores, 16) & int(own.cores, 16)) for mate in mates)
            result = local_rank, max(1, sharing)
        if member.devices and local_rank >= member.devices:
            raise UsageError(
                f"rank {member} is number {local_rank} on its node and sees {member.devices} GPUs:"
                " start one process for each (--nproc_per_node), or try --backend gloo, whose"
                " ranks may share"
            )
    return result


def _choose_interface(own: Member, members: list[Member]) -> None:
    """Let gloo use the interface by which the hosts met.

    Its own choice is where the hostname resolves to: 127.0.1.1 on many a Debian, where the other
    hosts wait in vain.
    """
    if len({member.host for member in members}) > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        main = members[0]
        address = main.address if own.host == main.host else own.address
        for name, its_address in rendezvous.own_addresses().items():
            if its_address == address:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def from_main(function: Callable[..., Result], *args: Any) -> Result:
    """Call a function on rank 0; return its result, or raise its exception, on all. Collective."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = function(*args)
        except Exception as error:
            pickle.dumps(error)
            box[1] = error
    # Over gloo also where the group has NCCL: a checkpoint need not pass through the GPU.
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if box[1] is not None:
        box[1].told_by_main = True
        raise box[1]
    return box[0]


def largest(number: int) -> int:
    """Return the largest ``number`` of all ranks; called at every step. Collective."""
    global _steps
    _steps += 1
    value = torch.tensor(number)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)


def gather(number: int) -> list[int]:
    """Return every rank's ``number``, in the order of ranks. Collective."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    values[dist.get_rank()] = number
    dist.all_reduce(values)
    return values.tolist()


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0, the ones that are saved. Collective."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def use_sync_bn(model: nn.Module, device: torch.device) -> nn.Module:
    """Replace batch normalisation by one whose statistics are those of the global batch.

    Raises:
        UsageError: on a CPU, where PyTorch has none.
    """
    if device.type == "cpu":
        raise UsageError("--sync-bn: SyncBatchNorm works on GPUs only, drop it on a CPU")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def wrap(
    model: nn.Module,
    device: torch.device,
    sample: tuple[torch.Tensor, torch.Tensor],
    bucket_cap_mb: float = 25.0,
) -> DistributedDataParallel:
    """Wrap a model in DDP and let it settle. Collective.

    DDP groups the gradients into new buckets after its first backward, and with ``static_graph``
    another time: sums of three or more ranks then differ in their last bit. Two steps that change
    nothing make a fresh run and a resumed one bit-identical.

    Args:
        model: on ``device``.
        device: of this process.
        sample: images [B, 1, H, W] and labels [B] to settle with.
        bucket_cap_mb: size of a gradient bucket; smaller ones overlap more and cost more calls.
    """
    ddp = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        bucket_cap_mb=bucket_cap_mb,  # type: ignore[arg-type]
        gradient_as_bucket_view=True,
        static_graph=True,
        # Once before each evaluation will do, see broadcast_buffers.
        **{_BUFFER_FLAG: False},  # type: ignore[arg-type]
    )
    buffers = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2):
        nn.functional.cross_entropy(ddp(sample[0]), sample[1]).backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return ddp


# Renamed in torch 2.13, where the old name warns.
_BUFFER_FLAG = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in DistributedDataParallel.__init__.__code__.co_varnames
    else "broadcast_buffers"
)
