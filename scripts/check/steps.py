"""Watch backwards and the steps of optimizers: the weights and gradients that ranks compare."""

from typing import Any

import devices
import passes
import record
import torch
from record import replaces, state
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook as after_step
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_step
from wrapper import averaged, backwards, ignored, names, wrappers

SHOWN = 40  # steps that are compared
Sums = tuple[float, float] | None
_stepping: list[Any] = []  # the parameters of each optimizer whose step has begun
_scaled: list[Any] = []  # scalers of losses since the last step
_unscaled: set[int] = set()  # parameters whose gradients a scaler has divided
_held: set[int] = set()  # parameters of all optimizers
_left: dict[int, Sums] = {}  # gradients as the last backward left them


def _sums(tensor: Any) -> Sums:
    """Return two sums that tell tensors apart. A bias's gradients may add up to zero."""
    if tensor is None:
        return None
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = tensor.detach().double()
    return values.sum().item(), (values * values.abs()).sum().item()


@replaces(torch.autograd)
def backward(real: Any, *args: Any, **keywords: Any) -> Any:
    # Not in the backward that checkpointing makes within another.
    is_outermost = not backwards.depth
    if is_outermost:
        passes.backward_begins()
        for item in wrappers:
            item.note("B")
    with backwards:
        real(*args, **keywords)
    if is_outermost and (state.steps < 3 or _scaled):
        for item in wrappers:
            _left.update((id(p), _sums(p.grad)) for p in item.ddp.parameters())


@replaces(torch.autograd)
def _engine_run_backward(real: Any, *args: Any, **keywords: Any) -> Any:
    # Tensor.backward has switched the mode off, which hooks and custom functions need as well.
    with devices.Devices():
        return real(*args, **keywords)


@replaces(torch.optim.Optimizer)
def add_param_group(real: Any, self: Any, group: Any) -> None:
    real(self, group)
    _held.update(id(p) for added in self.param_groups for p in added["params"])


def _belongs(parameter: Tensor) -> str:
    """Return "averaged", or what is wrong if the parameter's gradients differ."""
    if id(parameter) in ignored:
        return "ignored"
    if id(parameter) in averaged:
        return "averaged"
    if any(parameter is other for item in wrappers for other in item.ddp.parameters()):
        return "added or unfrozen after wrapping"
    return "outside the wrapper" if wrappers else "gradients differ"


def _step_begins(optimizer: Any, args: Any, keywords: Any) -> None:
    values = []
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            name = names.get(id(p), f"parameter {position} of group {number}")
            facts = {"name": name, "belongs": _belongs(p), "elements": p.numel()}
            facts["ranks"] = averaged.get(id(p), list(range(state.world)))
            facts |= {"before": _sums(p), "grad": _sums(p.grad)}
            facts["left"] = None if _scaled else _left.get(id(p))
            values.append((p, facts))
    _stepping.append(values)


def _step_ends(optimizer: Any, args: Any, keywords: Any) -> None:
    values = [{**facts, "after": _sums(p)} for p, facts in _stepping.pop()]
    if _stepping:  # an optimizer inside of an optimizer
        return
    record.optimizers[id(optimizer)] = optimizer
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    logs = [(item.calls, item.lines) for item in wrappers]
    record.tell("step", optimizer=id(optimizer), values=values, rates=rates, logs=logs)
    for item in wrappers:
        item.calls, item.lines = "", []
    _scaled.clear()
    _unscaled.clear()
    _left.clear()
    state.steps += 1
    if state.cut or state.steps >= SHOWN:
        record.leave("cut", message=f"the training was ended after {state.steps} steps")


before_step(_step_begins)
after_step(_step_ends)


@replaces(GradScaler)
def scale(real: Any, self: Any, outputs: Any) -> Any:
    if self.is_enabled() and self not in _scaled:
        _scaled.append(self)
    return real(self, outputs)


@replaces(GradScaler)
def unscale_(real: Any, self: Any, optimizer: Any) -> None:
    _unscaled.update(id(p) for group in optimizer.param_groups for p in group["params"])
    real(self, optimizer)


def _is_as_left(parameter: Tensor) -> bool:
    """Whether a gradient is as the backward left it: nobody has divided it by hand."""
    now, left = _sums(parameter.grad), _left.get(id(parameter))
    return None in (now, left) or now == left


def _clip(real: Any, parameters: Any, *args: Any, **keywords: Any) -> Any:
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    scaled = [p for p in parameters if p.grad is not None and id(p) not in _unscaled]
    if _scaled and scaled and all(map(_is_as_left, scaled)):
        record.tell("clipped before unscaling")
    return real(parameters, *args, **keywords)


for _name in ("clip_grad_norm_", "clip_grad_value_"):
    replaces(nn.utils, nn.utils.clip_grad, name=_name)(_clip)


def _finish() -> None:
    """Tell which parameters got gradients that no optimizer takes."""
    for item in wrappers if state.steps > 1 else ():
        trained = [p for p in item.ddp.module.parameters() if id(p) in averaged]
        rest = [names[id(p)] for p in trained if p.grad is not None and id(p) not in _held]
        if 0 < len(rest) < len(trained):
            first = ", ".join(rest[:3])
            record.tell("held by no optimizer", line=item.line, count=len(rest), first=first)


record.at_the_end.append(_finish)
