"""Watch models in DistributedDataParallel: what goes through them, and past them."""

import contextlib
import re
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import devices
import draws
import passes
import record
import torch
import torch.distributed as dist
from record import replaces, state
from stand_ins import NO_WEIGHTS
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel as DDP

MOST = 40  # forwards whose inputs are compared
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
Loaded = namedtuple("Loaded", "missing_keys unexpected_keys")
NEEDED = (DDP.will_sync_module_buffers, dist.GradBucket.buffer, dist.GradBucket.index)
wrappers: list["Watched"] = []
names: dict[int, str] = {}  # of parameters that were wrapped
averaged: dict[int, list[int]] = {}  # those of them that were to be trained: ranks that average
ignored: set[int] = set()  # those that the script takes out on purpose
backwards = record.Nested()  # in which checkpointing computes a part of the forward again
_register = DDP.register_comm_hook


class Forward:
    """The outermost forward that is under way."""

    depth = noted = 0
    began: dict[str, int] | None = None  # the random states with which it began
    before: int | None = None  # torch's random state after the last forward


class Watched:
    """What is known of one wrapped model."""

    def __init__(self, ddp: Any) -> None:
        self.ddp, self.ranks = ddp, dist.get_process_group_ranks(ddp.process_group)
        self.modules = {id(module) for module in ddp.module.modules()}
        self.in_forward = record.Nested()
        # DDP makes its buckets again in the forward after the first backward, by a broadcast.
        self.buckets_follow = not ddp.find_unused_parameters or ddp.static_graph
        self.calls, self.lines = "", list[str]()  # since the last step: a letter and a line of each
        self.line = next(record.frames(), "")
        _register(ddp, self, _average)
        wrappers.append(self)
        for name, p in ddp.module.named_parameters():
            names[id(p)] = name
            if name in ddp.parameters_to_ignore:
                ignored.add(id(p))
            elif p.requires_grad:
                averaged[id(p)] = self.ranks

    def note(self, letter: str) -> None:
        if len(self.calls) < 60:
            self.calls += letter
            self.lines.append(next(record.frames(), ""))


def _average(item: Watched, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket, as DDP does, once all ranks have come to it."""
    buffer = bucket.buffer()
    record.call("gradients", item.ranks, bucket=bucket.index(), elements=buffer.numel())
    with record.in_collective:
        buffer.div_(len(item.ranks))
        work = dist.all_reduce(buffer, group=item.ddp.process_group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


@replaces(DDP, name="__init__")
def wrap(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    passed = record.by_name(real, self, *args, **keywords)
    model, group = passed["module"], passed.get("process_group") or dist.group.WORLD
    ids = [vars(part)["_pretended"] for part in model.modules() if "_pretended" in vars(part)]
    ids += passed.pop("device_ids", None) or []
    passed.pop("output_device", None)
    elements = sum(p.numel() for p in model.parameters())
    record.call("DistributedDataParallel", dist.get_process_group_ranks(group), elements=elements)
    with record.in_collective:
        real(**passed)
        self._watched = Watched(self)
    record.tell("wrapped", searches=self.find_unused_parameters)
    if ids:
        device = devices.visible()[devices.use(ids[0])]
        record.tell("two ranks on one device", same=(state.node, device), device=device)


@replaces(DDP)
def forward(real: Any, self: Any, *args: Any, **keywords: Any) -> Any:
    item = self._watched
    if torch.is_grad_enabled():
        item.note("F" if self.require_backward_grad_sync else "f")
        if not item.in_forward.depth and not backwards.depth:
            _note_inputs(draws.tensors_of([args, keywords]))
        if item.buckets_follow and state.steps and self.require_backward_grad_sync:
            item.buckets_follow = False
            record.call("the forward after the first backward", item.ranks)
    else:
        record.tell("through")
    if self.will_sync_module_buffers():
        record.call("buffers", item.ranks)
    with item.in_forward:
        return real(self, *args, **keywords)


@replaces(DDP)
def __getstate__(real: Any, self: Any) -> Any:
    """Save a whole wrapper as if nobody watched it."""
    kept = {name: value for name, value in real(self).items() if name != "_watched"}
    return kept | {"_comm_hooks": []}


@replaces(DDP)
def __setstate__(real: Any, self: Any, values: Any) -> None:
    """Watch a copy, too."""
    with record.in_collective:
        real(self, values)
        self._watched = Watched(self)


@replaces(DDP)
def register_comm_hook(real: Any, *args: Any, **keywords: Any) -> None:
    record.tell("left out", what="a communication hook (the gradients were averaged as without)")


@replaces(DDP)
@contextlib.contextmanager
def no_sync(real: Any, self: Any) -> Iterator[None]:
    item = self._watched
    item.note("(")
    with real(self):
        yield
    if found := re.search(r"F\w*(\()B+$", item.calls):
        record.tell("no_sync around the backward", line=item.lines[found.start(1)])
    item.note(")")


def _note_inputs(tensors: list[Tensor]) -> None:
    """Tell what goes into a forward that is trained, unless a loader's batch went into it."""
    if not tensors or Forward.noted >= MOST:
        return
    Forward.noted += 1
    passes.note_inputs(tensors)
    state_now = draws.marks()["torch"]
    drew = Forward.before is not None and state_now != Forward.before
    digests = [draws.digest(tensor) for tensor in tensors]
    record.tell("input", digests=digests, drew=drew, is_of_batch=passes.is_under_way())
    for tensor, digest in zip(tensors, digests, strict=True) if drew else ():
        is_varied = tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())
        if is_varied and devices.is_drawn(tensor):
            where = "for what goes into a forward"
            same = (where, Forward.before, digest)
            record.tell("equal random numbers", same=same, where=where, name="torch")


def _module_begins(module: nn.Module, inputs: Any) -> None:
    grads = torch.is_grad_enabled()
    trains = grads and any(p.requires_grad for p in module.parameters())
    if Forward.depth == 0:
        modes = [part.training for part in module.modules() if isinstance(part, NORMS + DROPOUTS)]
        mode = any(modes) if modes else None
        is_of_batch = passes.forward_begins(grads, mode)
        # BatchNorm alone may be switched off on purpose, in a model that is in training mode.
        root = module.module if isinstance(module, DDP) else module
        for batch in passes.latest if trains and not backwards.depth else ():
            batch.modes.add(None if mode is None else mode or root.training)
        Forward.began = draws.marks() if is_of_batch and grads else None
        if is_of_batch:
            Forward.before = draws.marks()["torch"]
        if trains and not wrappers:
            _note_inputs(draws.tensors_of(list(inputs)))
    Forward.depth += 1
    if not grads or backwards.depth:
        return
    for item in wrappers:
        past = id(module) in item.modules and not item.in_forward.depth and item.calls[-1:] != "P"
        if past and trains:
            item.note("P")


def _module_ends(module: nn.Module, inputs: Any, output: Any) -> None:
    Forward.depth = max(Forward.depth - 1, 0)
    if Forward.depth == 0:
        if Forward.began is not None:
            draws.tell_draws("in a forward, as for dropout", Forward.began)
        Forward.began = None
        Forward.before = draws.marks()["torch"]


register_module_forward_pre_hook(_module_begins)
register_module_forward_hook(_module_ends, always_call=True)


@replaces(nn.Module)
def load_state_dict(real: Any, self: Any, values: Any, *args: Any, **keywords: Any) -> Any:
    if values is NO_WEIGHTS:
        return Loaded([], [])
    for item in wrappers:
        if self is item.ddp or id(self) in item.modules:
            item.note("L")
    return real(self, values, *args, **keywords)


record.refuse("nn.DataParallel", nn.DataParallel, "__init__")
record.refuse("FSDP", FullyShardedDataParallel, "__init__")
record.refuse("Join, whose ranks may differ by intention", DDP, "join_hook")
