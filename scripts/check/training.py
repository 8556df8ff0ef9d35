"""Watch a training: its process group, its wrapper, its optimizers, and what came between steps."""

import functools
import inspect
import os
from typing import Any

import devices
import record
import shares
import torch
import torch.distributed as dist
from record import state
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed import fsdp
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook as after_step
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_step

SHOWN = 40  # steps that are compared
COLLECTIVES = [
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
]
COLLECTIVES += ["reduce_scatter", "reduce_scatter_tensor", "scatter", "all_to_all", "barrier"]
COLLECTIVES += ["all_to_all_single", "monitored_barrier", "all_gather_object", "gather_object"]
COLLECTIVES += ["broadcast_object_list", "scatter_object_list"]
BATCH_NORM, DROPOUT = nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd
wrappers: list["Watched"] = []
optimizers: list[Any] = []
scalers: list[Any] = []
_real_init, _real_new_group = dist.init_process_group, dist.new_group
_real_load_state_dict = nn.Module.load_state_dict
_real_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


class Watched:
    """What is known of one wrapped model."""

    def __init__(self, ddp: Any) -> None:
        self.ddp, self.module = ddp, ddp.module
        named = list(ddp.module.named_parameters())
        self.names = {id(p): name for name, p in named}
        self.trainable = [name for name, p in named if p.requires_grad]
        self.trained = {id(p) for _, p in named if p.requires_grad}
        self.modules = {id(module) for module in ddp.module.modules()}
        self.inside = self.sent = 0  # forwards under way, backwards that were averaged
        self.events: list[tuple[str, str]] = []  # since the last step: a letter and a line
        self.user_hook: Any = None
        self.no_sync: list[int] | None = None

    def note(self, letter: str) -> None:
        if len(self.events) < 60:
            self.events.append((letter, record.line()))

    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.ddp.process_group)


def init_process_group(
    backend: Any = None, init_method: Any = None, timeout: Any = None, *args: Any, **given: Any
) -> None:
    given |= dict(zip(("world_size", "rank"), args, strict=False))
    world, rank = (
        int(os.environ[name.upper()] if given.get(name, -1) in (-1, None) else given[name])
        for name in ("world_size", "rank")
    )
    if world != state.world:
        record.leave("ranks", wanted=world)
    record.call("init_process_group", given=rank)
    state.groups += 1
    state.is_parent = False
    store = dist.FileStore(f"{state.root}/.store{state.groups}", world)
    with record.quietly():
        _real_init("gloo", store=store, rank=rank, world_size=world)
    record.emit("group")


def _new_group(ranks: Any = None, *args: Any, **keywords: Any) -> Any:
    if state.quiet:
        return _real_new_group(ranks, *args, **keywords)
    record.call("new_group", members=list(ranks) if ranks is not None else None)
    with record.quietly():
        return _real_new_group(ranks, backend="gloo")


def _wrap_collective(name: str) -> None:
    real = getattr(dist, name)
    signature = inspect.signature(real)

    @functools.wraps(real)
    def collective(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        given = bound.arguments
        group = given.get("group")
        outside = group is dist.GroupMember.NON_GROUP_MEMBER
        if state.quiet or outside or not dist.is_initialized():
            return real(*args, **keywords)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        tensor = given.get("tensor", given.get("input_tensor", given.get("input")))
        facts = {key: given[key] for key in ("src", "dst") if given.get(key) is not None}
        if isinstance(tensor, Tensor):
            facts |= {"elements": tensor.numel(), "dtype": str(tensor.dtype)}
            owners = (p for o in optimizers for g in o.param_groups for p in g["params"])
            at = tensor.data_ptr()
            if any(p.grad is not None and p.grad.data_ptr() == at for p in owners):
                record.emit_once("averaged by hand")
        record.call(name, ranks, **facts)
        record.emit("collective", name=name)
        mean = given.get("op") == dist.ReduceOp.AVG  # which gloo does not have
        if mean:
            given["op"] = dist.ReduceOp.SUM
        with record.quietly():
            work = real(*bound.args, **bound.kwargs)
            if mean:
                if work is not None:
                    work.wait()
                given.get("output", given.get("tensor")).div_(len(ranks))  # type: ignore[union-attr]
        return work

    setattr(dist, name, collective)
    setattr(c10d, name, collective)


def _average(item: Watched, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket, as DDP does, once all ranks have come to it."""
    ranks, buffer = item.ranks(), bucket.buffer()
    record.call("gradients", ranks, bucket=bucket.index(), elements=buffer.numel())
    item.sent += bucket.is_last()
    with record.quietly():
        if item.user_hook is not None:
            own, hook = item.user_hook
            return hook(own, bucket)
        buffer.div_(len(ranks))
        work = dist.all_reduce(buffer, group=item.ddp.process_group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def _wrap_ddp() -> None:
    real_init, real_forward, before = DDP.__init__, DDP.forward, DDP._pre_forward
    buffers, register, no_sync = DDP._sync_buffers, DDP.register_comm_hook, DDP.no_sync
    signature = inspect.signature(real_init)

    @functools.wraps(real_init)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        bound = signature.bind(self, *args, **keywords)
        given = bound.arguments
        module, listed = given["module"], given.pop("device_ids", None)
        given.pop("output_device", None)
        index = devices.index_of(listed[0]) if listed else devices.place_of(module)
        index = None if index is None else devices.use(index)
        group = given.get("process_group")
        if dist.is_initialized():
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            elements = sum(p.numel() for p in module.parameters())
            record.call("DistributedDataParallel", ranks, elements=elements)
        with record.quietly():
            real_init(*bound.args, **bound.kwargs)
            item = self.__dict__["_watched"] = Watched(self)
            register(self, item, _average)
        wrappers.append(item)
        device = None if index is None else devices.visible()[index]
        record.emit("wrapped", device=device, unused=self.find_unused_parameters)

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        item = self.__dict__["_watched"]
        if torch.is_grad_enabled():
            item.note("F" if self.require_backward_grad_sync else "f")
            if item.no_sync is not None:
                item.no_sync[0] += 1
        item.inside += 1
        try:
            return real_forward(self, *args, **keywords)
        finally:
            item.inside -= 1

    def pre_forward(self: Any, *args: Any, **keywords: Any) -> Any:
        item = self.__dict__["_watched"]
        rebuilds = torch.is_grad_enabled() and not self.find_unused_parameters
        if rebuilds and item.sent and not self._has_rebuilt_buckets:
            record.call("new buckets", item.ranks())
        return before(self, *args, **keywords)

    def sync_buffers(self: Any) -> None:
        record.call("buffers", self.__dict__["_watched"].ranks())
        with record.quietly():
            buffers(self)

    def register_comm_hook(self: Any, own: Any, hook: Any) -> None:
        self.__dict__["_watched"].user_hook = (own, hook)

    def join(self: Any, *args: Any, **keywords: Any) -> Any:
        record.leave("not judged", reason="it uses Join, whose ranks may differ by intention")

    devices._replace(DDP, __init__=init, forward=forward, _pre_forward=pre_forward, join=join)
    devices._replace(DDP, _sync_buffers=sync_buffers, register_comm_hook=register_comm_hook)
    devices._replace(DDP, no_sync=lambda self: _NoSync(self, no_sync(self)))
    DDP._passing_sync_batchnorm_handle = lambda self, module: None  # type: ignore[method-assign]


class _NoSync:
    """``no_sync``, with a count of the forwards and backwards that it encloses."""

    def __init__(self, ddp: Any, real: Any) -> None:
        self.item, self.real, self.line = ddp.__dict__["_watched"], real, record.line()

    def __enter__(self) -> None:
        self.item.no_sync = [0, 0]
        self.real.__enter__()

    def __exit__(self, *error: Any) -> Any:
        (forwards, backwards), self.item.no_sync = self.item.no_sync, None
        if backwards and not forwards and any(letter == "F" for letter, _ in self.item.events):
            record.emit_once("half no_sync", self.line, line=self.line)
        return self.real.__exit__(*error)


class _Forward:
    """Where the forwards stand: how deep in modules, and whether a backward is under way."""

    depth = backwards = seen = 0
    before: Any = None
    entered: Any = None


_Forward.entered = []


def _module_begins(module: nn.Module, inputs: Any) -> None:
    grads = torch.is_grad_enabled()
    if _Forward.depth == 0:
        alike = [p for p in module.modules() if isinstance(p, BATCH_NORM | DROPOUT)]
        mode = any(p.training for p in alike) if alike else None
        used = shares.forward_begins(grads, isinstance(module, DDP), mode)
        if used and grads and _Forward.seen < 3:
            _Forward.seen += 1
            _Forward.before = shares.Randomness()
    _Forward.depth += 1
    if not grads or _Forward.backwards:
        return
    for item in wrappers:
        if id(module) in item.modules and not item.inside:
            is_inner = any(entry[0] is item for entry in _Forward.entered)
            if not is_inner and any(p.requires_grad for p in module.parameters()):
                item.note("P")
            _Forward.entered.append((item, module))


def _module_ends(module: nn.Module, inputs: Any, output: Any) -> None:
    _Forward.depth = max(_Forward.depth - 1, 0)
    while _Forward.entered and (_Forward.depth == 0 or _Forward.entered[-1][1] is module):
        _Forward.entered.pop()
    if _Forward.depth == 0 and _Forward.before is not None:
        draws, _Forward.before = _Forward.before.used(), None
        record.emit("forward", draws=draws)


def _run_backward(*args: Any, **keywords: Any) -> Any:
    if keywords.get("accumulate_grad"):  # not in torch.autograd.grad
        shares.backward_begins()
        for item in wrappers:
            item.note("B")
            if item.no_sync is not None:
                item.no_sync[1] += 1
    _Forward.backwards += 1  # in which checkpointing computes a part of the forward again
    try:
        # Tensor.backward has switched the mode off, which hooks and custom functions need as well.
        with devices.Devices():
            return _real_run_backward(*args, **keywords)
    finally:
        _Forward.backwards -= 1


def _sums(tensor: Any) -> tuple[float, float] | None:
    """Return two sums that tell tensors apart. A bias's gradients may add up to zero."""
    if tensor is None:
        return None
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = tensor.detach().double()
    return values.sum().item(), (values * values.abs()).sum().item()


class _Step:
    depth = count = 0
    facts: Any = None


def _step_begins(optimizer: Any, args: Any, keywords: Any) -> None:
    _Step.depth += 1
    if _Step.depth > 1:  # an optimizer inside of an optimizer
        return
    _Step.facts = []
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            name = f"parameter {position} of group {number}"
            name = next((w.names[id(p)] for w in wrappers if id(p) in w.names), name)
            _Step.facts.append((name, p, _sums(p), _sums(p.grad)))


def _kind(parameter: Tensor) -> str:
    """Return how a parameter belongs to a wrapper."""
    if any(id(parameter) in item.trained for item in wrappers):
        return "averaged"
    if any(id(parameter) in item.names for item in wrappers):
        return "unfrozen after wrapping"
    own = (p for item in wrappers for p in item.module.parameters())
    return "added after wrapping" if any(parameter is p for p in own) else "outside the wrapper"


def _step_ends(optimizer: Any, args: Any, keywords: Any) -> None:
    _Step.depth -= 1
    if _Step.depth:
        return
    if not any(optimizer is own for own in optimizers):
        optimizers.append(optimizer)
    number = next(n for n, own in enumerate(optimizers) if own is optimizer)
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    values = [(name, _kind(p), before, grad, _sums(p)) for name, p, before, grad in _Step.facts]
    events = [item.events for item in wrappers]
    record.emit("step", optimizer=number, values=values, rates=rates, events=events)
    _Step.count += 1
    for item in wrappers:
        item.events = []
    if state.cut or _Step.count >= SHOWN:
        record.leave("cut", reason=f"the training was ended after {_Step.count} steps")


def _wrap_scaling() -> None:
    scaler = torch.amp.grad_scaler.GradScaler
    scale, update, clip = scaler.scale, scaler.update, torch.nn.utils.clip_grad_norm_

    def scaled(self: Any, outputs: Any) -> Any:
        scalers[:] = [*(own for own in scalers if own is not self), self]
        self.__dict__["_scaled"] = self.is_enabled()
        return scale(self, outputs)

    def clipped(*args: Any, **keywords: Any) -> Any:
        for own in scalers:
            states = getattr(own, "_per_optimizer_states", {})  # a disabled one has none
            stages = [item["stage"].name for item in states.values()]
            if own.__dict__.get("_scaled") and "UNSCALED" not in stages:
                record.emit_once("clipped before unscaling")
        return clip(*args, **keywords)

    def updated(self: Any, *args: Any, **keywords: Any) -> None:
        self.__dict__["_scaled"] = False
        update(self, *args, **keywords)

    scaler.scale, scaler.update = scaled, updated  # type: ignore[method-assign]
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clipped


def _load_state_dict(self: Any, values: Any, *args: Any, **keywords: Any) -> Any:
    if isinstance(values, shares.NoWeights):
        return modules._IncompatibleKeys([], [])
    for item in wrappers:
        if id(self) in item.modules or self is item.ddp:
            item.note("L")
    return _real_load_state_dict(self, values, *args, **keywords)


def _not_judged(what: str) -> Any:
    def refuse(*args: Any, **keywords: Any) -> None:
        record.leave("not judged", reason=f"it uses {what}, which is not judged")

    return refuse


def install() -> None:
    for name in COLLECTIVES:
        _wrap_collective(name)
    for module in (dist, c10d):
        devices._replace(module, init_process_group=init_process_group, new_group=_new_group)
    dist.is_nccl_available = lambda: True
    _wrap_ddp()
    _wrap_scaling()
    modules.register_module_forward_pre_hook(_module_begins)
    modules.register_module_forward_hook(_module_ends, always_call=True)
    before_step(_step_begins)
    after_step(_step_ends)
    torch.autograd._engine_run_backward = _run_backward  # type: ignore[attr-defined]
    devices._replace(nn.Module, load_state_dict=_load_state_dict)
    devices._replace(nn.DataParallel, __init__=_not_judged("nn.DataParallel"))
    devices._replace(fsdp.FullyShardedDataParallel, __init__=_not_judged("FSDP"))
    devices._replace(fsdp, fully_shard=_not_judged("FSDP"))
