"""What the ranks of a process group do together.

All ranks must call the functions marked *collective*, in the same order. Without a process group,
as in train_single.py and train_dp.py, these functions return their argument: a single process is
rank 0 of one.
"""

import hashlib
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data import ImageSet, fingerprint
from utils.errors import UsageError, UserError, describe

Result = TypeVar("Result")
# Each rank adds this mark to a sum. If gloo pairs the sum with another call, the marks do not add
# up.
CHECK_VALUE = 1021.0


class OutOfStep(UserError):
    """The ranks did not call the same collectives in the same order."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the ranks are out of step ({what}): some of them called a collective that the others"
            " did not; every rank has to call the same ones in the same order"
        )


def rank() -> int:
    """Return this process's number among all ranks. Only meaningful once the group exists."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks. Only meaningful once the group exists."""
    return dist.get_world_size() if dist.is_initialized() else 1


def backend(device: torch.device) -> str | None:
    """Return the name of the backend that serves a device, or None without a process group."""
    if not dist.is_initialized():
        return None
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))[device.type]


def choose_backend(backend: str, device: torch.device) -> str:
    """Return the backend to use on a device: ``auto`` is nccl for CUDA, gloo otherwise.

    Raises:
        UsageError: the backend is not in this build, or cannot work here.
    """
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL" and device.type == "cpu":
        raise UsageError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DDP on gloo (torch 2.13 to 2.15): use INFO"
        )
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"gloo and nccl know no {device.type} device: use train_single.py, or --device cpu"
        )
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    built = [name for name in ("nccl", "gloo", "mpi") if dist.is_backend_available(name)]
    if backend not in built or (backend == "nccl" and device.type != "cuda"):
        raise UsageError(
            f"--backend {backend}: this torch was built with {' and '.join(built)}, and nccl needs"
            " CUDA devices"
        )
    return backend


def call_on_rank_0(function: Callable[..., Result], *args: Any) -> Result:
    """Call a function on rank 0, and return its result or raise its error on all. Collective.

    Args:
        function: called on rank 0. Its result is pickled.

    Raises:
        UserError: the same on all ranks. If rank 0 raises any other exception, the other ranks
            raise a ``UserError`` that names it.
    """
    if not dist.is_initialized():
        return function(*args)
    outcome: list[Any] = [None, "", 0]  # result, message, exit status
    raised: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function(*args)
        except UserError as error:
            raised, outcome[1:] = error, [str(error), error.exit_status]
        except Exception as error:
            raised, outcome[1:] = error, [f"rank 0 failed ({describe(error)})", 1]
    # PyTorch sends objects over gloo if the group has it. So the GPU's queue is not disturbed.
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

    Each call starts to send a number, and the next call reads the result. In between, the numbers
    are sent beside the training, and no rank waits for another. The first call returns 0. Without
    other ranks a call returns its own number at once.

    Raises:
        OutOfStep: another rank called something else.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.pending: tuple[dist.Work, Tensor] | None = None

    def __call__(self, number: int) -> int:
        if world_size() == 1:
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


def sum_over_ranks(sums: Tensor) -> Tensor:
    """Return the element-wise sum of a float tensor [n] over all ranks. Collective.

    Raises:
        OutOfStep: another rank called something else. The backends pair calls by their order
            alone, and gloo notices only if the sizes differ.
    """
    if not dist.is_initialized():
        return sums
    checked = torch.cat([sums, sums.new_tensor([CHECK_VALUE])])
    dist.all_reduce(checked)
    if float(checked[-1]) != CHECK_VALUE * dist.get_world_size():
        raise OutOfStep("a sum of metrics met another call")
    return checked[:-1]


def gather(number: int) -> list[int]:
    """Return every rank's ``number``, in the order of ranks. Collective."""
    numbers = torch.zeros(world_size(), dtype=torch.int64)
    numbers[rank()] = number
    if dist.is_initialized():
        dist.all_reduce(numbers)
    return numbers.tolist()


def check_same(model: nn.Module, train_set: ImageSet, test_set: ImageSet) -> None:
    """Compare what DDP does not, which looks at the parameters' sizes and strides only. Collective.

    Every rank compares itself with rank 0: the data, the names, shapes and dtypes of parameters and
    buffers, what is frozen, and the source of the model's classes.

    Args:
        model: before DDP wraps it.
        train_set, test_set: all samples, before the ranks share them out.

    Raises:
        UsageError: a rank differs. All ranks raise the same error.
    """
    own = {"training data": fingerprint(train_set), "test data": fingerprint(test_set)}
    own |= {name: _describe(parameter) for name, parameter in model.named_parameters()}
    own |= {f"the buffer {name}": _describe(buffer) for name, buffer in model.named_buffers()}
    own["model classes whose source has the hash"] = _source_hash(model)
    first = [own]
    dist.broadcast_object_list(first, src=0)
    differing = [name for name in first[0] | own if own.get(name) != first[0].get(name)]
    speakers = [number for number, differs in enumerate(gather(bool(differing))) if differs]
    if not speakers:
        return
    name = differing[0] if differing else ""
    problem = [f"rank {rank()} has {name}: {own.get(name)}, rank 0 {first[0].get(name)}"]
    dist.broadcast_object_list(problem, src=speakers[0])
    raise UsageError(
        f"{problem[0]}: start every rank with the same code and data (data often differ by the"
        " order of a Python set, or a random split without a seed)"
    )


def _describe(tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{frozen}"


def _source_hash(model: nn.Module) -> str:
    """Return a hash of the source of the model's own classes, as far as it can be read."""
    classes = {type(module) for module in model.modules()}
    with suppress(OSError, TypeError):  # a class that was written in a notebook has none
        own = [kind for kind in classes if not kind.__module__.startswith("torch.")]
        sources = "".join(sorted(map(inspect.getsource, own)))
        return hashlib.sha256(sources.encode()).hexdigest()[:16]
    return "unknown"


def warm_up(model: DistributedDataParallel, images: Tensor, autocast: Any) -> None:
    """Let DDP make its final buckets, in a step that changes nothing. Collective.

    DDP groups the gradients into new buckets after its first backward. Sums of three or more ranks
    then differ in their last bit. After this step a fresh run and a resumed one are bit-identical.

    Args:
        images: a batch, on the model's device.
        autocast: the context of a forward in training. With another one a compiled model would
            compile twice.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    with autocast:
        outputs = model(images)
    outputs.float().sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
