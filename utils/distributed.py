"""What the ranks of a process group do together.

A function marked *collective* must be called by every rank, in the same order.
"""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils.errors import UsageError, UserError, describe
from utils.metrics import OutOfStep

Result = TypeVar("Result")


def choose_backend(backend: str, device: torch.device) -> str:
    """Return the backend to use on a device: ``auto`` is nccl for CUDA, gloo otherwise.

    Raises:
        UsageError: it is not in this build, or cannot work here.
    """
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


def find_gpus(devices: list[torch.device]) -> list[str]:
    """Return the UUID of each GPU, or "" for one whose UUID the driver's library does not tell.

    From the library (NVML) and not from CUDA's properties of a device: it opens no context, for
    which each rank would take memory on the GPUs of the others. PyTorch's own functions take care
    of every form of ``CUDA_VISIBLE_DEVICES``.
    """
    try:
        uuids = torch.cuda._raw_device_uuid_nvml() or []
        return [uuids[torch.cuda._get_nvml_device_index(device)] for device in devices]
    except (OSError, AttributeError, RuntimeError, IndexError):  # ROCm, or a slice of a GPU (MIG)
        return [""] * len(devices)


def check_gpus(ranks: list[tuple[str, int, list[str]]]) -> None:
    """Check that each rank has a GPU of its own: number ``local_rank`` of those that it sees.

    A launcher may show each rank one GPU, which is then number 0 for all of them.

    Args:
        ranks: name, local rank and what ``find_gpus`` returned there, which is nothing for a rank
            that needs no GPU.

    Raises:
        UsageError: a rank has none, or two have the same.
    """
    holders: dict[str, str] = {}
    for name, local_rank, gpus in ranks:
        if local_rank >= len(gpus) > 1:
            raise UsageError(
                f"rank {name} is number {local_rank} on its node and sees {len(gpus)} GPUs: start"
                " one process for each (--nproc_per_node), or try --backend gloo, whose ranks may"
                " share"
            )
        gpu = gpus[local_rank % len(gpus)] if gpus else ""
        if gpu and gpu in holders:
            raise UsageError(
                f"ranks {holders[gpu]} and {name} have the same GPU, {gpu}: start one process for"
                " each, or give each one of its own (srun --gpus-per-task=1,"
                " CUDA_VISIBLE_DEVICES), or try --backend gloo, whose ranks may share"
            )
        holders[gpu] = name


def call_on_rank_0(function: Callable[..., Result], *args: Any) -> Result:
    """Call a function on rank 0; return its result, or raise its error, on all ranks. Collective.

    Args:
        function: its result is pickled.

    Raises:
        UserError: the same on all ranks, and on the others also in the place of any other
            exception, which rank 0 raises as it is.
    """
    outcome: list[Any] = [None, "", 0]  # result, message, exit status
    raised: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except UserError as error:
            raised, outcome[1:] = error, [str(error), error.exit_status]
        except Exception as error:
            raised, outcome[1:] = error, [f"rank 0 failed ({describe(error)})", 1]
    # PyTorch sends objects over gloo where the group has it, and leaves the GPU's queue alone.
    dist.broadcast_object_list(outcome, src=0)
    if raised is not None:
        raise raised
    result, message, status = outcome
    if message:
        copy = UserError(message)
        copy.exit_status, copy.reported_elsewhere = status, True
        raise copy
    return result


class AgreedMax:
    """Return the largest number of all ranks, one call late. Collective, called at every step.

    What a call begins the next one reads: in between the numbers travel beside the training, and
    no rank waits for another. The first call returns 0. A rank alone gets its number at once.

    Raises:
        OutOfStep: another rank called something else.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.pending: tuple[dist.Work, Tensor] | None = None

    def __call__(self, number: int) -> int:
        if dist.get_world_size() == 1:  # even alone it would wake another thread, in every step
            return number
        result = 0
        if self.pending is not None:
            work, values = self.pending
            work.wait()
            result, last, first = values.tolist()
            if last != -first:
                raise OutOfStep(f"the agreement of step {self.calls} met another call")
        self.calls += 1
        values = torch.tensor([number, self.calls, -self.calls])
        work = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True)
        self.pending = work, values
        return result


def gather(number: int) -> list[int]:
    """Return every rank's ``number``, in the order of ranks. Collective."""
    return gather_shards(torch.tensor([number]), dist.get_world_size()).tolist()


def gather_shards(values: Tensor, length: int) -> Tensor:
    """Put together what the ranks found for their samples ``rank::world_size``. Collective.

    Args:
        values: of this rank's samples, [n, ...]; numbers, not bools.
        length: of all samples.

    Returns:
        [length, ...], on the same device.
    """
    whole = values.new_zeros(length, *values.shape[1:])
    whole[dist.get_rank() :: dist.get_world_size()] = values
    dist.all_reduce(whole)
    return whole


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0, the ones that are saved. Collective."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def check_same(model: nn.Module, **facts: Any) -> None:
    """Compare what DDP does not: it looks at sizes and strides of parameters alone. Collective.

    Args:
        model: before DDP wraps it; the parameters' names, shapes, dtypes and whether they are
            frozen are compared.
        facts: what else has to be the same, the sizes of the data for example.

    Raises:
        UsageError: a rank has another model, or another fact.
    """

    def describe(tensor: Tensor) -> str:
        frozen = "" if tensor.requires_grad else ", frozen"
        return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{frozen}"

    own = {name.replace("_", " "): str(fact) for name, fact in facts.items()}
    own |= {name: describe(parameter) for name, parameter in model.named_parameters()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    for rank, theirs in enumerate(ranks):
        for name in ranks[0] | theirs:
            if theirs.get(name) != ranks[0].get(name):
                raise UsageError(
                    f"rank {rank} has {name}: {theirs.get(name)}, rank 0 {ranks[0].get(name)}:"
                    " start every rank with the same code and data"
                )


def warm_up(model: DistributedDataParallel, images: Tensor) -> None:
    """Let DDP make its buckets, by a step that changes nothing. Collective.

    It groups the gradients into new buckets after its first backward: sums of three or more ranks
    then differ in their last bit. After this step a fresh run and a resumed one are bit-identical.

    Args:
        images: a batch, on the model's device.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    model(images).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
