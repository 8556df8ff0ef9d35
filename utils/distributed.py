"""One process among many: how it was started, who else is there, and what they do together.

A function marked *collective* must be called by every rank, in the same order.
"""

import argparse
import os
import pickle
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from utils import launchers, rendezvous, runtime
from utils.config import UsageError
from utils.launchers import DEFAULT_PORT, Run
from utils.metrics import OutOfStep
from utils.rendezvous import Member, RendezvousError, Stopped

Result = TypeVar("Result")

ROLL_SECONDS = 2.0  # in which every rank that is still there notices that one is not


_members: list[Member] = []  # of this job
_steps = 0  # that this process has agreed on


class LostRank(Exception):
    """A collective failed because another rank is gone, or did not answer in time.

    Attributes:
        ranks: the ones concerned.
    """

    exit_status = 1

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


def launch(run: Run, args: argparse.Namespace) -> int:
    """Find out how this process was started, call ``run`` as a rank, and return the exit status.

    Whatever the launcher, ``run`` finds RANK, WORLD_SIZE and, where it is known, LOCAL_RANK in
    the environment. On every way out the process group is destroyed. One rank of several ends
    here, without returning.
    """

    def start(args: argparse.Namespace) -> int:
        if args.nprocs is not None:
            return launchers.spawn(launch, run, args)
        return _run_as_rank(run, args)

    status = runtime.guard(start, args)
    if len(_members) > 1:
        # DDP never lets go of gloo's threads (torch 2.15), not even when the group is destroyed.
        # The interpreter, ending beside them, now and then aborts: 3 complete runs of about 300.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _run_as_rank(run: Run, args: argparse.Namespace) -> int:
    launcher = launchers.set_environment(args)
    if launcher in ("torchrun", "mpirun", "spawn"):  # a rank by hand may outlive its shell
        launchers.die_with_parent()
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
        explained = explain(error)
        if not isinstance(explained, LostRank):
            _leave_word(explained)
        if hasattr(explained, "exit_status"):
            return explained
        raise


def explain(error: Exception) -> Exception:
    """Return a ``LostRank`` in the place of a backend's error, and any other error as it is."""
    if not hasattr(error, "explained"):  # asked once: who is absent changes soon
        error.explained = _explain(error)  # type: ignore[attr-defined]
    return error.explained  # type: ignore[attr-defined]


def _explain(error: Exception) -> Exception:
    if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
        return error
    reason = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).partition(". ")[0]
    absent, text = _find_absent("Timed out" in reason)
    return LostRank(f"rank {os.environ['RANK']} lost {text} ({reason})", absent)


def _leave_word(error: Exception) -> None:
    """Tell the ranks that are going to miss this one why."""
    with suppress(RuntimeError, ValueError):  # no store, or it went with rank 0
        store = dist.distributed_c10d._get_default_store()
        line = (str(error).splitlines() or [type(error).__name__])[0]
        store.set(f"failed/{os.environ['RANK']}", line)


def _find_absent(end_stalled: bool) -> tuple[list[int], str]:
    """Return the ranks that no longer answer those that do, and the same in words.

    Each rank that notices leaves the number of its last step in the store; who leaves none is gone
    or stalled. A stalled one of this host is killed, or torchrun would wait for it half a minute.
    """
    rank, absent = int(os.environ["RANK"]), dict(enumerate(_members))
    steps: dict[int, int] = {}
    words: dict[int, str] = {}

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
            for other in [other for other in absent if store.check([f"failed/{other}"])]:
                words[other] = store.get(f"failed/{other}").decode()

    # In a thread: where rank 0 has stalled, its store never answers, nor looks at a timeout.
    caller = threading.Thread(target=roll_call, daemon=True)
    caller.start()
    caller.join(2 * ROLL_SECONDS)
    if not steps:
        absent = {0: _members[0]}
    if not absent:
        late = [other for other in steps if steps[other] < max(steps.values())]
        names = ", ".join(str(_members[other]) for other in late) or "none"
        return late, f"no rank, but {names} is behind: look at its load and --timeout"
    for member in absent.values():
        if end_stalled and member.host == _members[rank].host:
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
    names = ", ".join(f"rank {member}" for member in absent.values())
    # The first to fail takes others along; what it said is the cause.
    why = next(iter(words.values()), "it crashed, left or stalled; its own output says more")
    return list(absent), f"{names} at step {_steps}: {why}"


def _is_told(error: Exception) -> bool:
    """Tell whether a lower rank of this host reports the same error: one line will do."""
    if isinstance(error, RendezvousError):
        here, rank = rendezvous.host_identity(), int(os.environ["RANK"])
        return any(host == here and other < rank for other, host in error.present)
    everywhere = isinstance(error, UsageError | Stopped) or hasattr(error, "told_by_main")
    return everywhere and os.environ.get("LOCAL_RANK", "0") != "0"


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
    runtime.explain = explain
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
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        None,
        True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, members


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
    """Return the largest ``number`` of all ranks; called at every step. Collective.

    Raises:
        OutOfStep: another rank called something else.
    """
    global _steps
    _steps += 1
    if dist.get_world_size() == 1:  # even alone it would wake another thread, in every step
        return number
    values = torch.tensor([number, _steps, -_steps])
    dist.all_reduce(values, dist.ReduceOp.MAX)
    number, last, first = values.tolist()
    if last != -first:
        raise OutOfStep(f"the agreement of step {_steps} met another call")
    return number


def gather(number: int) -> list[int]:
    """Return every rank's ``number``, in the order of ranks. Collective."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    values[dist.get_rank()] = number
    dist.all_reduce(values)
    return values.tolist()


def time_all_reduce(
    sizes: Sequence[int], device: torch.device, repeats: int = 4
) -> dict[int, tuple[float, bool]]:
    """Return for each message, in bytes, the least seconds, and whether all sums were right.

    Collective.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {}
    for size in sizes:
        times, is_right = [], True
        for _ in range(repeats):
            values = torch.full((size // 4,), float(rank + 1), device=device)
            largest(0)  # all begin together
            begin = time.perf_counter()
            dist.all_reduce(values)
            values[0].item()  # waits for a GPU
            times.append(time.perf_counter() - begin)
            is_right &= bool((values == world_size * (world_size + 1) / 2).all())
        results[size] = min(times), is_right
    return results


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

    Raises:
        UsageError: the ranks hold different models, or images.
    """
    _check_same(model, sample)
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


def _check_same(model: nn.Module, sample: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compare what DDP takes for equal: it looks at the shapes alone, and not at every one."""

    def describe(tensor: torch.Tensor) -> str:
        frozen = "" if tensor.requires_grad else ", frozen"
        return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{frozen}"

    own = {name: describe(parameter) for name, parameter in model.named_parameters()}
    own |= {"a batch of images": describe(sample[0]), "of labels": describe(sample[1])}
    main = from_main(lambda: own)
    names = [name for name in main | own if own.get(name) != main.get(name)]
    differ = [rank for rank, count in enumerate(gather(len(names))) if count]
    if differ:
        problem = [names and f"{names[0]}: {own.get(names[0])}, rank 0 {main.get(names[0])}"]
        dist.broadcast_object_list(problem, src=differ[0], device=torch.device("cpu"))
        raise UsageError(
            f"rank {differ[0]} has {problem[0]}: start every rank with the same code and data"
        )


# Renamed in torch 2.13, where the old name warns.
_BUFFER_FLAG = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in DistributedDataParallel.__init__.__code__.co_varnames
    else "broadcast_buffers"
)
