"""Pretend GPUs on a machine that has none: every tensor stays on the CPU, and devices are noted.

Nothing here may be reported as a mistake of the script.
"""

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import record
import torch
from record import around, state
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_current = 0


def visible() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(state.each))))
    return [item.strip() for item in listed.split(",") if item.strip()]


def index_of(device: Any) -> int | None:
    """Return the GPU's index that a device names, or None for anything but a GPU."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        return _current if device.index is None else device.index
    return device if type(device) is int else None


def use(device: Any = None) -> int:
    """Return the index of a device, None being the current one, which this rank has to have."""
    index, count = index_of(device), len(visible())
    if index is None or index < 0:
        return _current
    if index >= count:
        if state.nodes > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
            record.tell("device by global rank", what=index, devices=count)
        raise RuntimeError(f"CUDA error: invalid device ordinal ({index} of {count} pretended)")
    return index


def set_device(device: Any) -> None:
    global _current
    _current = use(device)


@contextlib.contextmanager
def on_device(device: Any) -> Iterator[None]:
    """Stand for ``torch.cuda.device``, which chooses a device for a block."""
    before = _current
    set_device(device)
    yield
    set_device(before)


class Devices(TorchFunctionMode):
    """Maps each device of a call to the CPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_first = func in (Tensor.to, Tensor.cuda) and len(args) > 1
        device = args[1] if is_first else kwargs.get("device")
        if func in (Tensor.cuda, Tensor.pin_memory, Tensor.record_stream):
            use(device)
            return args[0]
        if index_of(device) is not None:
            use(device)
            if is_first:
                args = (args[0], "cpu", *args[2:])
            else:
                kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


@around(nn.Module)
def to(real: Any, self: nn.Module, *args: Any, **keywords: Any) -> nn.Module:
    device = keywords.get("device", args[0] if args else None)
    if index_of(device) is not None:
        self.__dict__["_pretended"] = use(device)
        keywords["device"], args = "cpu", () if "device" in keywords else args[1:]
    return real(self, *args, **keywords)


@around(nn.Module)
def cuda(real: Any, self: nn.Module, device: Any = None) -> nn.Module:
    return self.to("cuda" if device is None else device)


@around(torch, nn.Module)
def compile(real: Any, model: Any = None, *args: Any, **options: Any) -> Any:
    record.tell("left out", what="torch.compile")
    if isinstance(model, nn.Module):
        model.__dict__["_orig_mod"] = model
    return model if model is not None else lambda function: function


@around(nn.SyncBatchNorm)
def forward(real: Any, self: Any, input: Tensor) -> Tensor:
    record.tell("left out", what="SyncBatchNorm (each rank normalised its own batch)")
    return nn.modules.batchnorm._BatchNorm.forward(self, input)


@around(torch.amp.autocast_mode.autocast, name="__init__")
def autocast(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    if keywords.get("enabled", True):
        record.tell("left out", what="autocast (it computed in float32)")
    real(self, "cpu", dtype=torch.bfloat16, enabled=False)


@around(torch.amp.grad_scaler.GradScaler, name="__init__")
def scaler(real: Any, self: Any, device: str = "cuda", *args: Any, **keywords: Any) -> None:
    real(self, "cpu", *args, **keywords)


STREAM = MagicMock(elapsed_time=lambda other: 1.0, is_capturing=lambda: False)  # or an event
ABOUT = MagicMock(total_memory=80 * 2**30, major=8, minor=0, multi_processor_count=108)
ABOUT.name = "pretended"
ANSWERS: dict[str, Any] = {"get_device_properties": ABOUT, "get_device_name": ABOUT.name}
ANSWERS |= {"current_accelerator": torch.device("cuda"), "get_device_capability": (8, 0)}
ANSWERS |= {"mem_get_info": (ABOUT.total_memory, ABOUT.total_memory)}
ANSWERS |= dict.fromkeys(("Event", "Stream", "stream", "current_stream", "default_stream"), STREAM)
ANSWERS |= dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True)
CALLS: dict[str, Any] = {name: MagicMock(return_value=answer) for name, answer in ANSWERS.items()}
CALLS |= {"device": on_device, "device_count": lambda: len(visible()), "nvtx": MagicMock()}
CALLS |= dict.fromkeys(("current_device", "current_device_index"), lambda: _current)
CALLS |= dict.fromkeys(("set_device", "set_device_index", "set_device_idx"), set_device)
CALLS |= {"get_rng_state": lambda *args: torch.get_rng_state()}
CALLS |= {name: getattr(torch, name) for name in dir(torch) if name.endswith("Tensor")}
for owner in (torch.cuda, torch.accelerator):
    for name, value in list(vars(owner).items()):
        is_public = inspect.isfunction(value) and name[0] != "_"
        if name in CALLS or is_public or name == "_lazy_init":
            setattr(owner, name, CALLS.get(name, MagicMock(return_value=0)))
torch.Generator = lambda *args, **keywords: torch._C.Generator()  # type: ignore[assignment,misc]
torch.set_default_device = torch.set_default_tensor_type = MagicMock()
Devices().__enter__()
