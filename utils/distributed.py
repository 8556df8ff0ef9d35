"""One process among many: how it was started, who else is there, and what they do together.

A function marked *collective* must be called by every rank, in the same order.
"""

import argparse
import ctypes
import json
import os
import pickle
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from utils import runtime, signals
from utils.config import UsageError

Result = TypeVar("Result")
Run = Callable[[argparse.Namespace], int]

POLL_SECONDS = 0.1
DEFAULT_PORT = 29500
PR_SET_PDEATHSIG = 1  # prctl(2)


class RendezvousError(Exception):
    """The ranks did not find each other, or do not belong together."""

    exit_status = 1


def launch(run: Run, args: argparse.Namespace) -> int:
    """Find out how this process was started, call ``run`` as a rank, and return the exit status.

    Whatever the launcher, ``run`` finds RANK, WORLD_SIZE and, where it is known, LOCAL_RANK and
    LOCAL_WORLD_SIZE in the environment. On every way out the process group is destroyed.
    """
    if args.nprocs is not None:
        return _spawn(run, args)
    return runtime.guard(lambda args: _run_as_rank(run, args), args)


def _run_as_rank(run: Run, args: argparse.Namespace) -> int:
    launcher = set_environment(args)
    if launcher != "alone":
        _die_with_parent()
    try:
        status = record(run)(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    # A launcher takes any other status for a crash, and may start a stopped run again.
    return 0 if launcher != "alone" and status > 128 else status


def set_environment(args: argparse.Namespace, environ: Any = os.environ) -> str:
    """Translate what the launcher tells into torchrun's variables; return the launcher's name.

    Raises:
        UsageError: variables that are missing or contradict each other.
    """
    launcher = _identify(args, environ)
    if launcher == "alone":
        environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if launcher == "slurm":
        port = 20_000 + int(environ.get("SLURM_JOB_ID", 0)) % 20_000
        environ.update(
            RANK=environ["SLURM_PROCID"],
            WORLD_SIZE=environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]),
            LOCAL_RANK=environ["SLURM_LOCALID"],
            MASTER_ADDR=environ.get("MASTER_ADDR") or _first_slurm_host(environ),
            MASTER_PORT=environ.get("MASTER_PORT", str(port)),
        )
    if launcher == "mpirun":
        size, local_size = environ["OMPI_COMM_WORLD_SIZE"], environ["OMPI_COMM_WORLD_LOCAL_SIZE"]
        if "MASTER_ADDR" not in environ and size != local_size:
            raise UsageError(
                "mpirun over several hosts does not say where rank 0 is: add"
                " -x MASTER_ADDR=<address of the first host>"
            )
        environ.update(
            RANK=environ["OMPI_COMM_WORLD_RANK"],
            WORLD_SIZE=size,
            LOCAL_RANK=environ["OMPI_COMM_WORLD_LOCAL_RANK"],
            LOCAL_WORLD_SIZE=local_size,
            MASTER_ADDR=environ.get("MASTER_ADDR", "127.0.0.1"),
            # mpirun is the parent of all ranks of a host: jobs side by side differ in it.
            MASTER_PORT=environ.get("MASTER_PORT", str(20_000 + os.getppid() % 20_000)),
        )
    if args.rank is not None:
        environ.update(RANK=str(args.rank), WORLD_SIZE=str(args.world_size))
    if args.local_rank is not None and "LOCAL_RANK" not in environ:
        environ["LOCAL_RANK"] = str(args.local_rank)
    _check_environment(environ)
    return launcher


def _identify(args: argparse.Namespace, environ: Any) -> str:
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
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    assert match is not None
    return "".join(part or "" for part in match.groups())


def _check_environment(environ: Any) -> None:
    values = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in environ:
            if not re.fullmatch(r"\d+", environ[name]):
                raise UsageError(f"{name}={environ[name]} is not a whole number")
            values[name] = int(environ[name])
    for name in ("RANK", "WORLD_SIZE"):
        if name not in values:
            raise UsageError(f"{name} is not set, though its sibling is: set both, or use torchrun")
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise UsageError(
            f"RANK={values['RANK']} is not below WORLD_SIZE={values['WORLD_SIZE']}: ranks count"
            " from 0 (rank = node_rank * nproc_per_node + local_rank)"
        )
    if values.get("LOCAL_RANK", 0) >= values.get("LOCAL_WORLD_SIZE", sys.maxsize):
        raise UsageError("LOCAL_RANK is not below LOCAL_WORLD_SIZE: it counts within a node")
    port = environ.get("MASTER_PORT", "1")
    if not re.fullmatch(r"\d+", port) or not 0 < int(port) < 65_536:
        raise UsageError(f"MASTER_PORT={port} is not a port (1 to 65535)")


def _die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher dies, which is then a stop request."""
    with suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _spawn(run: Run, args: argparse.Namespace) -> int:
    """Start the ranks of this node as child processes and wait for them."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise SystemExit("train_ddp.py: error: --nprocs starts processes itself: drop torchrun")
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT")
    if port is None and args.nnodes == 1:
        with socket.socket() as probe:  # free now; rank 0 says so if it no longer is
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
    shared = {
        "MASTER_ADDR": address,
        "MASTER_PORT": port or str(DEFAULT_PORT),
        "WORLD_SIZE": str(args.nnodes * args.nprocs),
        "LOCAL_WORLD_SIZE": str(args.nprocs),
    }
    first_rank = args.node_rank * args.nprocs
    context = mp.get_context("spawn")
    children = []
    for local_rank in range(args.nprocs):
        ranks = {"RANK": str(first_rank + local_rank), "LOCAL_RANK": str(local_rank)}
        child = context.Process(target=_child, args=(run, args, shared | ranks))
        child.start()
        children.append(child)
    return _wait_for(children)


def _child(run: Run, args: argparse.Namespace, environment: dict[str, str]) -> None:
    signals.install_handlers()
    _die_with_parent()
    os.environ.update(environment)
    args.nprocs = None
    sys.exit(launch(run, args))


def _wait_for(children: list[Any]) -> int:
    """Pass stop signals on, end the rest when one fails, and return the first bad status."""
    status, forwarded = 0, 0
    while any(child.is_alive() for child in children):
        time.sleep(POLL_SECONDS)
        if signals.received() and not forwarded:
            forwarded = signals.received()
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, forwarded)
        failed = [child.exitcode for child in children if child.exitcode]
        if failed and not status:
            status = failed[0] if failed[0] > 0 else 128 - failed[0]
            for child in children:
                child.join(timeout=5)  # what ended one usually ends all, each with its own word
                child.kill()
    return status or (128 + forwarded if forwarded else 0)


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
    facts = {"world size": world_size, "torch": str(torch.__version__), **(must_agree or {})}
    deadline = time.monotonic() + rdzv_timeout
    hellos = [{"host": socket.gethostname(), "pid": os.getpid(), "facts": facts}]
    if world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        store = _meet(init_method, rank, world_size, deadline, rdzv_timeout)
        hellos = _roll_call(store, rank, world_size, facts, deadline, rdzv_timeout)
    # tcp:// and file:// give no local rank: the hosts of the roll call do.
    local_ranks = [i for i in range(world_size) if hellos[i]["host"] == hellos[rank]["host"]]
    local_rank = int(os.environ.setdefault("LOCAL_RANK", str(local_ranks.index(rank))))
    local_size = int(os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(local_ranks))))
    if devices[0].type == "cpu" or backend == "gloo":
        device = devices[local_rank % len(devices)]  # gloo lets ranks share a GPU, NCCL does not
    elif local_rank < len(devices):
        device = devices[local_rank]
    else:
        raise UsageError(
            f"{local_size} processes on this node for {len(devices)} GPUs: start one for each"
            " (--nproc_per_node), or try --backend gloo, whose ranks may share"
        )
    runtime.setup_device(device, threads, local_size)
    dist.init_process_group(
        # Small host-side agreements go over gloo, which leaves the GPU's queue alone.
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
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


def _meet(
    init_method: str, rank: int, world_size: int, deadline: float, rdzv_timeout: float
) -> dist.Store:
    """Return a store of this attempt that all ranks can reach."""
    if init_method.startswith("file://"):
        return dist.FileStore(init_method.removeprefix("file://"), world_size)
    if init_method.startswith("tcp://"):
        address, _, port_text = init_method.removeprefix("tcp://").rpartition(":")
        port = int(port_text)
    else:
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            agent_store = _connect(address, port, deadline, rdzv_timeout)
            return _fresh_store(agent_store, address, rank, deadline, rdzv_timeout)
    if rank > 0:
        return _connect(address, port, deadline, rdzv_timeout)
    try:
        return dist.TCPStore(address, port, None, True, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RendezvousError(
            f"rank 0 cannot listen on {address}:{port} ({reason}): the port is taken by another"
            " program, or the address is not this machine's; choose another MASTER_PORT, or use"
            " torchrun --standalone, which finds a free one"
        ) from error


def _connect(address: str, port: int, deadline: float, rdzv_timeout: float) -> dist.TCPStore:
    """Connect to a TCPStore, waiting for it to appear until the deadline."""
    problem = "no attempt"
    while time.monotonic() < deadline and not signals.received():
        try:
            # A plain socket first: TCPStore itself would fill the log with its attempts.
            socket.create_connection((address, port), timeout=1).close()
            left = max(1.0, deadline - time.monotonic())
            return dist.TCPStore(
                address, port, None, False, timedelta(seconds=left), wait_for_workers=False
            )
        except (OSError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
            time.sleep(POLL_SECONDS)
    raise RendezvousError(
        f"rank {os.environ['RANK']} waited {rdzv_timeout:.0f} s for rank 0 at {address}:{port}"
        f" ({problem}): is rank 0 started, MASTER_ADDR its address, the port open, and no other"
        " program behind it?"
    )


def _fresh_store(
    agent_store: dist.Store, address: str, rank: int, deadline: float, rdzv_timeout: float
) -> dist.Store:
    """Return a store that no earlier attempt has written to, hosted by rank 0.

    torchrun's agent keeps its store over restarts, and ranks that read the addresses of the
    attempt before hang (pytorch/pytorch#135712). Rank 0 therefore publishes where its own is; the
    nonce in it proves to the others that it is alive and not what was published before.
    """
    key = "fresh_store"
    if rank == 0:
        store = dist.TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        nonce = secrets.token_hex(8)
        store.set("nonce", nonce)
        hosts = [_address_towards(address), address, socket.gethostname()]
        agent_store.set(key, json.dumps([list(dict.fromkeys(hosts)), store.port, nonce]))
        return store
    problem = "it published nothing"
    while time.monotonic() < deadline and not signals.received():
        if agent_store.check([key]):
            hosts, port, nonce = json.loads(agent_store.get(key))
            for host in hosts:
                try:
                    socket.create_connection((host, port), timeout=1).close()
                    store = dist.TCPStore(
                        host, port, None, False, timedelta(seconds=5), wait_for_workers=False
                    )
                    if store.check(["nonce"]) and store.get("nonce").decode() == nonce:
                        return store
                except (OSError, RuntimeError) as error:
                    problem = f"{host}:{port}: {str(error).splitlines()[0]}"
        time.sleep(POLL_SECONDS)
    raise RendezvousError(
        f"rank {rank} waited {rdzv_timeout:.0f} s for rank 0 ({problem}): did rank 0 start, and"
        " can this host reach it?"
    )


def _address_towards(address: str) -> str:
    """Return the own address that packets to ``address`` carry."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing; the kernel chooses the route
        return probe.getsockname()[0]
    return socket.gethostname()


def _roll_call(
    store: dist.Store,
    rank: int,
    world_size: int,
    facts: dict[str, Any],
    deadline: float,
    rdzv_timeout: float,
) -> list[dict[str, Any]]:
    """Wait until every rank has said hello, and compare what they said. Collective.

    Raises:
        RendezvousError: naming the ranks that are missing, twice there, or different.
    """
    own = {"host": socket.gethostname(), "pid": os.getpid(), "facts": facts}
    if store.add(f"claim/{rank}", 1) > 1:
        # FileStore keeps what an earlier job wrote.
        raise RendezvousError(
            f"two processes claim rank {rank}: the same node_rank or RANK was given twice, or the"
            " file of file:// is left from an earlier job (delete it)"
        )
    store.set(f"hello/{rank}", json.dumps(own))
    hellos: dict[int, dict[str, Any]] = {}
    while len(hellos) < world_size:
        with suppress(RuntimeError):  # rank 0 may have given up first, and its store with it
            for other in set(range(world_size)) - hellos.keys():
                if store.check([f"hello/{other}"]):
                    hellos[other] = json.loads(store.get(f"hello/{other}"))
                    _compare(rank, own, other, hellos[other])
        if time.monotonic() > deadline or signals.received():
            missing = [str(i) for i in range(world_size) if i not in hellos]
            here = ", ".join(f"{i} ({h['host']} pid {h['pid']})" for i, h in sorted(hellos.items()))
            raise RendezvousError(
                f"after {rdzv_timeout:.0f} s {len(hellos)} of {world_size} ranks are here: {here};"
                f" missing: {', '.join(missing)}. Is WORLD_SIZE (nnodes * nproc_per_node) right,"
                " every node started, and each with its own node_rank?"
            )
        time.sleep(POLL_SECONDS)
    return [hellos[i] for i in range(world_size)]


def _compare(rank: int, own: dict[str, Any], other_rank: int, other: dict[str, Any]) -> None:
    for name, value in json.loads(json.dumps(own["facts"])).items():
        theirs = other["facts"].get(name)
        if theirs != value:
            time.sleep(1)  # let the others read the same before this store goes
            raise RendezvousError(
                f"rank {other_rank} ({other['host']} pid {other['pid']}) has {name} {theirs},"
                f" rank {rank} has {value}: start every rank with the same command and packages"
            )


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
    """Return the largest ``number`` of all ranks. Collective."""
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
        **{_BUFFER_FLAG: False},  # once before each evaluation will do, see broadcast_buffers
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
