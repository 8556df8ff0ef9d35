"""Watch the training: collectives, what goes through and past the wrapper, and each step."""

import contextlib
import inspect
import itertools
import linecache
import os
import re
import sys
from collections import Counter
from datetime import timedelta
from typing import Any

import loaders
import pretend
import reading
import record
import torch
import torch.distributed as dist
from record import replaces, state
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    _IncompatibleKeys,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook as after_step
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_step

TRAINERS = re.compile("/(pytorch_lightning|lightning|accelerate|ray)/")  # which wrap models, too
BETWEEN_TWO = r"(i?send|i?recv|batch_isend)\w*"
COLLECTIVES = (
    r"((all_)?(gather|reduce(?!_op))|all_to_all|broadcast|scatter)\w*|(monitored_)?barrier"
)
SENT = ("obj", "tensor", "input_tensor", "input", "input_list")  # arguments that a rank gives
MOST_VALUES = 64  # of a result of an evaluation
NODES = 100  # of a loss's graph that are looked at
SHOWN = 40  # steps of an optimizer that are compared
STEPS = (40, 200)  # after which a run ends: with smaller numbers, and with the script's own
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
WRITES = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
Sums = tuple[float, float] | None
wrappers: list["Watched"] = []
names: dict[int, str] = {}  # of parameters, by their id
owners: dict[int, "Watched"] = {}  # the wrapper that averages a parameter, by its id
_storages: dict[int, "Watched"] = {}  # the same, by the address of its values
_gathered: dict[int, tuple[Any, str]] = {}  # what ranks gathered, and the line, by its id
_counted = record.Nested()
_forwards = record.Nested()
_backwards = record.Nested()  # checkpointing computes a part of the forward again in them
_began: dict[str, int] = {}  # torch's random state when this step got its batch
_stepping: list[Any] = []  # the parameters of each optimizer whose step has begun
_turns: Counter[Any] = Counter()  # number of steps of each optimizer
_inputs: list[dict[str, Any]] = []  # of the last forward, if they are of no loader


def _timeout() -> timedelta:
    """Return the time of a group's collectives: a rank that waits for longer waits in vain."""
    return timedelta(seconds=state.limit / 3)


@replaces(dist, c10d)
def init_process_group(real: Any, *args: Any, **keywords: Any) -> None:
    passed = record.by_name(real, *args, **keywords)
    for name in ("world_size", "rank"):
        if passed.get(name) in (-1, None):
            passed[name] = os.environ[name.upper()]
    world, rank = int(passed["world_size"]), int(passed["rank"])
    if world != state.world:
        record.again(world, state.mode)
    state.clock += 1
    state.groups += 1
    state.is_parent = False
    store = dist.FileStore(f"{state.root}/.store{state.groups}", world)
    record.tell("group", given=rank)
    real("gloo", store=store, rank=state.rank, world_size=world, timeout=_timeout())


def _numbers(value: Any) -> list[float]:
    """Return the numbers of a result, as of a metric. Large tensors are no metric."""
    if isinstance(value, Tensor):
        value = value.detach().flatten().tolist() if value.numel() <= MOST_VALUES else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for item in value[:MOST_VALUES] for number in _numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []


def _count(real: Any, *args: Any, **keywords: Any) -> Any:
    """Count a collective of all ranks, and note what it combines."""
    if _counted.depth:  # all_gather_object calls all_gather
        return real(*args, **keywords)
    passed, name = record.by_name(real, *args, **keywords), real.__name__
    sent = next((passed[key] for key in SENT if passed.get(key) is not None), None)
    if re.fullmatch(BETWEEN_TWO, name):
        record.tell("sent between two")
        return real(*args, **keywords)
    state.clock += dist.get_world_size(passed.get("group")) == state.world
    if "object" in name:  # it puts its bytes on the current GPU
        pretend.put(None)
    state.has_broadcast |= name.startswith("broadcast")
    if re.search("reduce|gather|broadcast", name):
        elements = sent.numel() if isinstance(sent, Tensor) else 0
        facts = {"values": _numbers(sent), "mean": "AVG" in str(passed.get("op"))}
        facts["reduces"] = "reduce" in name
        facts["to_one"] = name in ("reduce", "gather", "gather_object")
        facts["rows"] = len(sent) if isinstance(sent, Tensor) and sent.dim() else 1
        facts["evaluates"] = all(p.evaluated or p.mode is False for p in loaders.latest)
        facts["lines"] = list(itertools.islice(record.frames(), 2))  # of a helper, and its call
        kind = "sent to all" if name.startswith("broadcast") else "combined"
        record.tell(kind, elements=elements, **facts)
    if name == "all_reduce":
        averaged = [item for item in wrappers if re.search("F[^f]*B$", item.calls)]
        if any(p.grad is sent for item in averaged for p in item.ddp.parameters()):
            record.tell("averaged twice")
    if name == "new_group":
        passed |= {"backend": "gloo", "timeout": _timeout()}
    with _counted:
        result = real(**passed)
    if name.startswith("all_gather") and isinstance(sent, Tensor) and sent.requires_grad:
        line = next(record.frames(), "")
        got = passed.get("tensor_list") or [passed.get("output_tensor")]
        _gathered.update({id(tensor): (tensor, line) for tensor in got})
    return result


for _name in filter(re.compile(f"{COLLECTIVES}|{BETWEEN_TWO}|new_group").fullmatch, dir(dist)):
    replaces(dist, c10d, name=_name)(_count)


dist.is_nccl_available = lambda: True


def _observe(func: Any, args: Any, result: Any) -> None:
    """Note a change of a wrapped parameter, and a loss of what was gathered."""
    name, first = getattr(func, "__name__", ""), args[0] if args else None
    sets = name[-1:] == "_" != name[-2:-1] or name in WRITES or func == SET_DATA
    if sets and not _stepping and isinstance(first, Tensor) and name != "requires_grad_":
        with contextlib.suppress(RuntimeError):  # not every tensor has an address
            if owner := owners.get(id(first)) or _storages.get(first.data_ptr()):
                owner.note("L")
    if not torch.is_grad_enabled():
        return
    if _gathered and args:
        _follow(args, result)
    if "div" in name and isinstance(result, Tensor) and result.grad_fn and result.numel() == 1:
        frame = next(record.calls(), None)
        if frame and reading.BY_RANKS.search(_expression(frame)):
            result.grad_fn.metadata["line"] = next(record.frames())  # type: ignore[index]


def _expression(frame: Any) -> str:
    """Return the lines of the expression that a frame computes."""
    first, last, *_ = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    path = frame.f_code.co_filename
    return "".join(linecache.getline(path, line) for line in range(first, last + 1))


def _tell_divided(loss: Any) -> None:
    """Tell where a loss, or a part of it, was divided by the number of ranks."""
    losses = [loss] if isinstance(loss, Tensor) else loss
    nodes = [each.grad_fn for each in losses if each.grad_fn]
    for node in nodes:  # a list that grows meanwhile
        if line := node.metadata.get("line"):  # type: ignore[union-attr]
            record.tell("loss divided by the ranks", line=line)
        nodes += [other for other, _ in node.next_functions if other and len(nodes) < NODES]


def _follow(args: Any, result: Any) -> None:
    """Tell when a loss is made of what was gathered, without the gradient of any rank."""
    parts = args[0] if isinstance(args[0], list | tuple) else args
    lines = [_gathered[id(part)][1] for part in parts if id(part) in _gathered]
    if not lines or not isinstance(result, Tensor) or result is args[0]:
        return
    if not result.requires_grad:
        _gathered[id(result)] = result, lines[0]
    elif parts is args:  # in a list, the rank's own tensor has taken the place of its copy
        record.tell("gathered without gradients", line=lines[0])


record.observers.append(_observe)


class Watched:
    """What is known of one wrapped model."""

    def __init__(self, ddp: Any) -> None:
        self.ddp, self.ranks = ddp, dist.get_process_group_ranks(ddp.process_group)
        self.modules = {id(module) for module in ddp.module.modules()}
        self.line = next(record.frames(), "")
        self.in_forward = record.Nested()
        # Calls since the last step of its parameters: a letter and a line of each.
        self.calls, self.lines, self.has_stepped = "", list[str](), False
        wrappers.append(self)
        for name, p in ddp.module.named_parameters():
            names[id(p)] = name
            if p.requires_grad:
                owners[id(p)] = _storages[p.data_ptr()] = self

    def note(self, letter: str) -> None:
        if self.has_stepped:
            self.calls, self.lines, self.has_stepped = "", [], False
        if len(self.calls) < 60:
            self.calls += letter
            self.lines.append(next(record.frames(), ""))


DDP._passing_sync_batchnorm_handle = lambda self, module: None  # type: ignore[method-assign]


@replaces(DDP, name="__init__")
def wrap(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    if found := TRAINERS.search(sys._getframe(2).f_code.co_filename):
        record.leave("not judged", message=f"it uses {found[1]}, which is not judged")
    passed = record.by_name(real, self, *args, **keywords)
    model = passed["module"]
    if state.finds_unused:
        passed["find_unused_parameters"] = True
    ids = [vars(part)["_pretended"] for part in model.modules() if "_pretended" in vars(part)]
    given = passed.pop("device_ids", None)
    ids += given or []
    passed.pop("output_device", None)
    real(**passed)
    self.device_ids = given  # which a script may ask for
    state.clock += 1
    Watched(self)
    record.tell("wrapped")
    if ids:
        index = pretend.use(ids[0])
        pretend.wrapped_on(index)
        device = pretend.visible()[index]
        record.tell("two ranks on one device", same=(state.node, device), device=device)


@replaces(DDP)
def forward(real: Any, self: Any, *args: Any, **keywords: Any) -> Any:
    item = next((item for item in wrappers if item.ddp is self), None)
    if not item:  # a copy of a wrapped model
        return real(self, *args, **keywords)
    if torch.is_grad_enabled():
        item.note("F" if self.require_backward_grad_sync else "f")
    elif self.will_sync_module_buffers():  # it sends them from rank 0
        record.tell("through")
    ids = self.device_ids
    self.device_ids = None  # else it would move the inputs there
    with item.in_forward:
        outputs = real(self, *args, **keywords)
    self.device_ids = ids
    return outputs


def _module_begins(module: nn.Module, inputs: Any) -> None:
    if next(module.parameters(), None) is None:  # a transform, or a loss that calls the model
        return
    grads = torch.is_grad_enabled()
    trains = grads and any(p.requires_grad for p in module.parameters())
    if not _forwards.depth and not _backwards.depth:
        modes = [part.training for part in module.modules() if isinstance(part, NORMS + DROPOUTS)]
        mode = any(modes) if modes else None
        is_of_batch = loaders.forward_begins(grads, mode)
        if trains and (is_of_batch or not _began):
            _began["torch"] = loaders.at_batch.pop("torch", loaders.marks()["torch"])
        tensors = [item for item in inputs if isinstance(item, Tensor) and item.dim()]
        for batch in loaders.latest if trains else ():
            batch.rows = tensors[0].shape[0] if tensors else batch.rows
        if trains and tensors and not loaders.latest and state.steps < SHOWN:
            seeded = next((line for line, _ in loaders.seeds.values()), "")
            facts = {"digests": [loaders.digest(tensor) for tensor in tensors], "seeded": seeded}
            _inputs[:] = [facts | {"line": next(record.frames(), "")}]
    _forwards.depth += 1
    for item in wrappers if trains and not _backwards.depth else ():
        if id(module) in item.modules and not item.in_forward.depth and item.calls[-1:] != "P":
            item.note("P")


def _module_ends(module: nn.Module, inputs: Any, output: Any) -> None:
    if next(module.parameters(), None) is None:
        return
    _forwards.depth = max(_forwards.depth - 1, 0)
    for batch in loaders.latest if not _forwards.depth and not torch.is_grad_enabled() else ():
        if id(module) not in batch.tested:  # after it, because a wrapper may send buffers in it
            # A copy, such as an EMA, has the names of a wrapped model. Other models may differ.
            trained = {name for item in wrappers for name, _ in item.ddp.module.named_parameters()}
            items = [(name.replace("module.", ""), p) for name, p in module.named_parameters()]
            tested = {name: _sums(p) for name, p in items if name in trained}
            if tested and all(item.ddp.broadcast_buffers for item in wrappers):
                tested |= {f"buffer {name}": sums for name, sums in _buffers(module).items()}
            batch.tested[id(module)] = tested


register_module_forward_pre_hook(_module_begins)
register_module_forward_hook(_module_ends, always_call=True)


@replaces(nn.Module)
def load_state_dict(real: Any, self: Any, state_dict: Any, *args: Any, **keywords: Any) -> Any:
    if state_dict is pretend.NO_WEIGHTS:
        with loaders.randomness_kept():  # equal on all ranks, as the real weights would be
            torch.random.default_generator.manual_seed(0)
            self.apply(lambda part: getattr(part, "reset_parameters", int)())
        return _IncompatibleKeys([], [])
    return real(self, state_dict, *args, **keywords)


@replaces(torch.autograd)
def backward(real: Any, *args: Any, **keywords: Any) -> Any:
    if not _backwards.depth:  # not in the backward that checkpointing makes within another
        called = [item for item in wrappers if re.search("[FfP]", item.calls)]
        if wrappers:  # else the script may add up the gradients
            _tell_divided(record.by_name(real, *args, **keywords)["tensors"])
        is_apart = bool(wrappers) and all(item.has_stepped for item in called)
        loaders.backward_begins(is_apart)
        for facts in _inputs:
            record.tell("input", **facts)
        _inputs.clear()
        for item in wrappers:
            item.note("B" if item.ddp.require_backward_grad_sync else "b")
    with _backwards:
        real(*args, **keywords)


def _has_wrapper_names(value: Any) -> bool:
    """Whether a checkpoint holds weights of a wrapped model by the names of the wrapper."""
    for name, part in value.items() if isinstance(value, dict) else ():
        is_named = str(name).startswith("module.") and isinstance(part, Tensor)
        if _has_wrapper_names(part) or (is_named and part.data_ptr() in _storages):
            return True
    return isinstance(value, DDP)


@replaces(torch)
def save(real: Any, obj: Any, *args: Any, **keywords: Any) -> None:
    if _has_wrapper_names(obj):
        record.tell("names of the wrapper")
    real(obj, *args, **keywords)


def _sums(tensor: Any) -> Sums:
    """Return two sums that tell tensors apart. A bias's gradients may add up to zero."""
    if tensor is None:
        return None
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = tensor.detach().flatten().double()
    return values.sum().item(), (values @ values.abs()).item()


def _buffers(module: nn.Module) -> dict[str, Sums]:
    """Return sums of what a module holds besides trained parameters, but none that is pretended."""
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        return {}
    saved = module.state_dict()  # others are caches, as of positions
    return {name: _sums(buffer) for name, buffer in module.named_buffers() if name in saved}


def _tell_held() -> None:
    """Tell what each wrapped model holds that neither gradients nor DDP make equal."""
    for item in wrappers:
        module = item.ddp.module
        held = {} if item.ddp.broadcast_buffers else _buffers(module)
        frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        held |= {name: _sums(p) for name, p in frozen}
        record.tell("held", line=item.line, held=held, ranks=item.ranks)


record.at_the_end.append(_tell_held)


def _name_all() -> None:
    """Name parameters by the variables in which the script holds their models."""
    found = dict[int, str]()
    for frame in record.calls():
        local = frame.f_locals
        held = {**frame.f_globals, **local}
        if type(local) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            local.clear()  # a copy, which a function's frame would keep before Python 3.13
        held |= getattr(held.get("self"), "__dict__", {})
        for variable, model in held.items():
            if isinstance(model, nn.Module):
                root = model.module if isinstance(model, DDP) else model
                for name, p in root.named_parameters():
                    longer = found.get(id(p), f"{variable}.{name}")  # by a model around it
                    found[id(p)] = min(longer, f"{variable}.{name}", key=len)
    names.update(found)


def _belongs(parameter: Tensor) -> str:
    """Return "averaged", or what is wrong if the parameter's gradients differ."""
    if id(parameter) in owners:
        return "averaged"
    if any(parameter is other for item in wrappers for other in item.ddp.parameters()):
        return "added or unfrozen after wrapping"
    return "outside the wrapper" if wrappers else "gradients differ"


def _step_begins(optimizer: Any, args: Any, keywords: Any) -> None:
    _gathered.clear()
    loaders.tell_draws("between a batch and its step, as for noise or dropout", _began)
    if not _turns[optimizer]:
        _name_all()
    values = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if isinstance(p, DTensor):
            record.leave("not judged", message="it uses DTensors, as FSDP2, which is not judged")
        owner = owners.get(id(p))
        name = names.get(id(p), f"a parameter of the shape {tuple(p.shape)}")
        facts = {"name": name, "belongs": _belongs(p), "elements": p.numel()}
        facts["ranks"] = owner.ranks if owner else list(range(state.world))
        facts["log"] = wrappers.index(owner) if owner else None
        facts |= {"before": _sums(p), "grad": _sums(p.grad)}
        facts["is_awaited"] = owner is not None and not owner.ddp.find_unused_parameters
        values.append((p, facts))
    _stepping.append(values)


def _step_ends(optimizer: Any, args: Any, keywords: Any) -> None:
    stepped = _stepping.pop()
    if _stepping or not state.groups:  # an optimizer inside of another, or an example before DDP
        return
    _turns[optimizer] += 1
    is_shown = _turns[optimizer] <= SHOWN
    values = [{**facts, "after": _sums(p)} for p, facts in stepped if is_shown]
    facts: dict[str, Any] = {"turn": (list(_turns).index(optimizer), _turns[optimizer])}
    facts["rates"] = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    facts["logs"] = [(item.calls, item.lines) for item in wrappers]
    record.tell("step", values=values, **facts)
    for item in {owners[id(p)] for p, _ in stepped if id(p) in owners}:
        item.has_stepped = True
    _began.clear()
    state.steps += 1
    most = STEPS[not state.is_small]
    if _turns[optimizer] >= most:
        record.leave("cut", message=f"what follows after {most} steps: the check ended there")


before_step(_step_begins)
after_step(_step_ends)


def _note_schedule(real: Any, *args: Any, **keywords: Any) -> None:
    record.tell("stepped a schedule")
    real(*args, **keywords)


for _schedule in (LRScheduler, ReduceLROnPlateau):
    replaces(_schedule, name="step")(_note_schedule)


record.refuse("nn.DataParallel", nn.DataParallel, "__init__")
record.refuse("FSDP", FullyShardedDataParallel, "__init__")
record.refuse("FSDP2", torch.distributed.fsdp, "fully_shard")
record.refuse("Join, whose ranks may differ by intention", DDP, "join_hook")
