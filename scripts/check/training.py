"""Watch training: its process group, its wrapper, its optimizers, and what came between steps."""

import contextlib
import os
import re
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import devices
import record
import shares
import torch
import torch.distributed as dist
from record import around, state
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook as after_step
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_step

SHOWN = 40  # steps that are compared
COLLECTIVE = re.compile("new_group|reduce|gather|broadcast|scatter|all_to_all|barrier")
NORM_DROPOUT = nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd
wrappers: list["Watched"] = []
_names: dict[int, str] = {}  # of parameters that were wrapped
_averaged: set[int] = set()  # those of them that were to be trained
_optimizers: dict[int, Any] = {}
_scaled: set[Any] = set()  # scalers of losses since the last step
_stepping: list[Any] = []  # the parameters of each optimizer whose step has begun
# Where the training is, and which random states the forward began with.
_now = SimpleNamespace(depth=0, steps=0, drawn=None)
_backwards = record.Nested()  # in which checkpointing computes a part of the forward again


class Watched:
    """What is known of one wrapped model."""

    def __init__(self, ddp: Any, ranks: list[int]) -> None:
        self.ddp, self.ranks = ddp, ranks
        self.modules = {id(module) for module in ddp.module.modules()}
        self.inside = record.Nested()  # its forward
        self.calls, self.lines = "", list[str]()  # since the last step: a letter and a line of each

    def note(self, letter: str) -> None:
        if len(self.calls) < 60:
            self.calls += letter
            self.lines.append(next(record.frames(), ""))


@around(dist, c10d)
def init_process_group(real: Any, *args: Any, **keywords: Any) -> None:
    given = record.arguments(real, *args, **keywords)
    for name in ("world_size", "rank"):
        if given.get(name) in (-1, None):
            given[name] = os.environ[name.upper()]
    world, rank = int(given["world_size"]), int(given["rank"])
    if world != state.world:
        record.again(world, state.mode)
    record.call("init_process_group", rank=rank)
    state.groups += 1
    state.is_parent = False
    store = dist.FileStore(f"{state.root}/.store{state.groups}", world)
    with record.quietly:
        real("gloo", store=store, rank=rank, world_size=world)
    record.tell("group")


def _announce(name: str) -> None:
    def collective(real: Any, *args: Any, **keywords: Any) -> Any:
        given = record.arguments(real, *args, **keywords)
        outside = (group := given.get("group")) is dist.GroupMember.NON_GROUP_MEMBER
        if record.quietly.depth or outside or not dist.is_initialized():
            return real(*args, **keywords)
        facts = {key: given[key] for key in ("src", "dst", "ranks") if given.get(key) is not None}
        tensor = next((item for item in given.values() if isinstance(item, Tensor)), None)
        if tensor is not None and not re.search("all_to_all|object", name):  # sizes may differ
            sizes = [item.numel() for item in given.get("tensor_list") or [tensor]]
            facts |= {"elements": sum(sizes), "dtype": str(tensor.dtype)}
            groups = [group for own in _optimizers.values() for group in own.param_groups]
            grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            if any(grad.data_ptr() == tensor.data_ptr() for grad in grads):
                record.tell("averaged by hand")
        record.call(name, dist.get_process_group_ranks(group or dist.group.WORLD), **facts)
        if re.search("reduce|gather", name):
            record.tell("combined")
        if name == "new_group":
            given["backend"] = "gloo"
        with record.quietly:
            return real(**given)

    around(dist, c10d, name=name)(collective)


for _name, _function in list(vars(dist).items()):
    if COLLECTIVE.search(_name) and type(_function) is FunctionType and _name[0] != "_":
        _announce(_name)
dist.is_nccl_available = lambda: True


def _average(item: Watched, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket, as DDP does, once all ranks have come to it."""
    buffer = bucket.buffer()
    record.call("gradients", item.ranks, bucket=bucket.index(), elements=buffer.numel())
    with record.quietly:
        buffer.div_(len(item.ranks))
        work = dist.all_reduce(buffer, group=item.ddp.process_group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


@around(DDP, name="__init__")
def wrap(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    given = record.arguments(real, self, *args, **keywords)
    model, group = given["module"], given.get("process_group") or dist.group.WORLD
    ids = [vars(part)["_pretended"] for part in model.modules() if "_pretended" in vars(part)]
    ids += given.pop("device_ids", None) or []
    given.pop("output_device", None)
    elements = sum(p.numel() for p in model.parameters())
    ranks = dist.get_process_group_ranks(group)
    record.call("DistributedDataParallel", ranks, elements=elements)
    with record.quietly:
        real(**given)
        self._watched = Watched(self, ranks)
        _register(self, self._watched, _average)
    wrappers.append(self._watched)
    _names.update((id(p), name) for name, p in model.named_parameters())
    _averaged.update(id(p) for p in model.parameters() if p.requires_grad)
    record.tell("wrapped", searches=self.find_unused_parameters)
    if ids:
        device = devices.visible()[devices.use(ids[0])]
        record.tell("two ranks on one device", same=(state.node, device), device=device)


@around(DDP)
def forward(real: Any, self: Any, *args: Any, **keywords: Any) -> Any:
    if torch.is_grad_enabled():
        self._watched.note("F" if self.require_backward_grad_sync else "f")
    else:
        record.tell("through")
    with self._watched.inside:
        return real(self, *args, **keywords)


@around(DDP)
def __getstate__(real: Any, self: Any) -> Any:
    """Save a whole wrapper as if nobody watched it."""
    ours = "_watched", "_comm_hooks"
    return {name: value for name, value in real(self).items() if name not in ours}


@around(DDP)
def _sync_buffers(real: Any, self: Any) -> None:
    record.call("buffers", self._watched.ranks)
    with record.quietly:
        real(self)


_register = DDP.register_comm_hook


@around(DDP)
def register_comm_hook(real: Any, *args: Any, **keywords: Any) -> None:
    record.tell("left out", what="a communication hook (the gradients were averaged as without)")


@around(DDP)
@contextlib.contextmanager
def no_sync(real: Any, self: Any) -> Iterator[None]:
    item = self._watched
    item.note("(")
    with real(self):
        yield
    if found := re.search(r"F\w*(\()B+$", item.calls):
        record.tell("no_sync around the backward", line=item.lines[found.start(1)])
    item.note(")")


DDP._passing_sync_batchnorm_handle = lambda self, module: None  # type: ignore[method-assign]


def _module_begins(module: nn.Module, inputs: Any) -> None:
    grads = torch.is_grad_enabled()
    if _now.depth == 0:
        modes = [part.training for part in module.modules() if isinstance(part, NORM_DROPOUT)]
        mode = any(modes) if modes else None
        is_of_batch = shares.forward_begins(grads, mode)
        _now.drawn = shares.marks() if is_of_batch and grads else None
    _now.depth += 1
    if not grads or _backwards.depth:
        return
    for item in wrappers:
        past = id(module) in item.modules and not item.inside.depth and item.calls[-1:] != "P"
        if past and any(p.requires_grad for p in module.parameters()):
            item.note("P")


def _module_ends(module: nn.Module, inputs: Any, output: Any) -> None:
    _now.depth = max(_now.depth - 1, 0)
    if _now.depth == 0 and _now.drawn is not None:
        shares.tell_draws("in a forward, as for dropout", _now.drawn)
        _now.drawn = None


modules.register_module_forward_pre_hook(_module_begins)
modules.register_module_forward_hook(_module_ends, always_call=True)


@around(torch.autograd)
def _engine_run_backward(real: Any, *args: Any, **keywords: Any) -> Any:
    # Not in torch.autograd.grad, and not in the backward that checkpointing makes within another.
    if keywords.get("accumulate_grad") and not _backwards.depth:
        shares.backward_begins()
        for item in wrappers:
            item.note("B")
    # Tensor.backward has switched the mode off, which hooks and custom functions need as well.
    with _backwards, devices.Devices():
        return real(*args, **keywords)


def _sums(tensor: Any) -> tuple[float, float] | None:
    """Return two sums that tell tensors apart. A bias's gradients may add up to zero."""
    if tensor is None:
        return None
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = tensor.detach().double()
    return values.sum().item(), (values * values.abs()).sum().item()


def _belongs(parameter: Tensor) -> str:
    """Return "averaged", or what is wrong if the parameter's gradients differ."""
    if id(parameter) in _averaged:
        return "averaged"
    if any(parameter is own for item in wrappers for own in item.ddp.parameters()):
        return "added or unfrozen after wrapping"
    return "outside the wrapper" if wrappers else "gradients differ"


def _step_begins(optimizer: Any, args: Any, keywords: Any) -> None:
    values = []
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            name = _names.get(id(p), f"parameter {position} of group {number}")
            sums = {"before": _sums(p), "grad": _sums(p.grad)}
            values.append((p, {"name": name, "belongs": _belongs(p), **sums}))
    _stepping.append(values)


def _step_ends(optimizer: Any, args: Any, keywords: Any) -> None:
    values = [{**about, "after": _sums(p)} for p, about in _stepping.pop()]
    if _stepping:  # an optimizer inside of an optimizer
        return
    _optimizers[id(optimizer)] = optimizer
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    logs = [(item.calls, item.lines) for item in wrappers]
    record.tell("step", optimizer=id(optimizer), values=values, rates=rates, logs=logs)
    for item in wrappers:
        item.calls, item.lines = "", []
    _scaled.clear()
    _now.steps += 1
    if state.cut or _now.steps >= SHOWN:
        record.leave("cut", message=f"the training was ended after {_now.steps} steps")


before_step(_step_begins)
after_step(_step_ends)


@around(GradScaler)
def scale(real: Any, self: Any, outputs: Any) -> Any:
    if self.is_enabled():
        _scaled.add(self)
    return real(self, outputs)


@around(nn.utils, nn.utils.clip_grad)
def clip_grad_norm_(real: Any, *args: Any, **keywords: Any) -> Any:
    for own in _scaled:
        stages = [item["stage"].name for item in own._per_optimizer_states.values()]
        if "UNSCALED" not in stages:
            record.tell("clipped before unscaling")
    return real(*args, **keywords)


@around(nn.Module)
def load_state_dict(real: Any, self: Any, values: Any, *args: Any, **keywords: Any) -> Any:
    if values is shares.NO_WEIGHTS:
        return modules._IncompatibleKeys([], [])
    for item in wrappers:
        if self is item.ddp or id(self) in item.modules:
            item.note("L")
    return real(self, values, *args, **keywords)


def _refuse(what: str, owner: Any, name: str) -> None:
    message = f"it uses {what}, which is not judged"
    setattr(owner, name, lambda *args, **keywords: record.leave("not judged", message=message))


_refuse("nn.DataParallel", nn.DataParallel, "__init__")
_refuse("Join, whose ranks may differ by intention", DDP, "join_hook")
