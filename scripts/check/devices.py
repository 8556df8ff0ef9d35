"""Pretend GPUs on a machine that has none: every tensor stays on the CPU, and devices are noted.

Nothing here may be reported as a mistake of the script.
"""

import contextlib
import inspect
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import record
import torch
from record import replaces, state
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_current = 0
_in_use = False  # something was moved to a GPU
_visible: list[str] = []  # since the first use of one


def visible() -> list[str]:
    """Return the GPUs that this process sees. CUDA reads the variable only once."""
    if _visible:
        return _visible
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
    global _in_use
    index, count = index_of(device), len(visible())
    _visible[:] = visible()
    _in_use = True
    if index is None or index < 0:
        return _current
    if index >= count:
        if state.nodes > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
            record.tell("device by global rank", what=index, devices=count)
        raise RuntimeError(f"CUDA error: invalid device ordinal ({index} of {count} pretended)")
    return index


def begin() -> None:
    """Be a new process, which has used no GPU."""
    global _current, _in_use
    _current = 0
    _in_use = False
    _visible.clear()


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


# What a tensor says of where it is, and what the script gets as the answer.
PLACES: dict[Any, Any] = {
    Tensor.device.__get__: lambda: torch.device("cuda", _current),  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda: True,  # type: ignore[attr-defined]
    Tensor.get_device: lambda: _current,
}
DRAWING: list[Any] = [torch.rand, torch.randn, torch.randint, torch.normal]
DRAWING += [torch.rand_like, torch.randn_like, torch.randint_like]
drawn: set[int] = set()  # addresses of the storages that these have filled


class Devices(TorchFunctionMode):
    """Maps each device of a call to the CPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in PLACES and _in_use:
            is_script = sys._getframe(1).f_code.co_filename.startswith(state.root)
            return PLACES[func]() if is_script else func(*args, **kwargs)
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
        result = func(*args, **kwargs)
        if func in DRAWING:
            drawn.add(result.untyped_storage().data_ptr())
        return result


def is_drawn(tensor: Tensor) -> bool:
    """Whether a tensor is, or lies in, one that was filled with random numbers."""
    return tensor.untyped_storage().data_ptr() in drawn


@replaces(threading.Thread)
def start(real: Any, self: threading.Thread) -> None:
    """Let a thread of the script see the GPUs, too: a mode holds for one thread."""
    run = self.run

    def with_devices() -> None:
        with Devices():
            run()

    self.run = with_devices  # type: ignore[method-assign]
    real(self)


@replaces(nn.Module)
def to(real: Any, self: nn.Module, *args: Any, **keywords: Any) -> nn.Module:
    device = keywords.get("device", args[0] if args else None)
    if index_of(device) is not None:
        self.__dict__["_pretended"] = use(device)
        keywords["device"], args = "cpu", () if "device" in keywords else args[1:]
    return real(self, *args, **keywords)


@replaces(nn.Module)
def cuda(real: Any, self: nn.Module, device: Any = None) -> nn.Module:
    return self.to("cuda" if device is None else device)


@replaces(torch, nn.Module)
def compile(real: Any, model: Any = None, *args: Any, **options: Any) -> Any:
    record.tell("left out", what="torch.compile")
    if isinstance(model, nn.Module):
        model.__dict__["_orig_mod"] = model
    return model if model is not None else lambda function: function


class SyncBatchNorm(nn.BatchNorm1d.__base__):  # type: ignore[misc,name-defined]
    """Stands for the real one, which takes GPUs alone: each rank normalises its own batch."""

    def __init__(self, *args: Any, process_group: Any = None, **keywords: Any) -> None:
        self.convert_sync_batchnorm(self)
        super().__init__(*args, **keywords)

    def _check_input_dim(self, input: Tensor) -> None:
        """Take any number of dimensions, as the real one does."""

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        record.tell("left out", what="SyncBatchNorm (each rank normalised its own batch)")
        return module


nn.SyncBatchNorm = SyncBatchNorm  # type: ignore[misc]


@replaces(torch.autocast, name="__init__")
def autocast(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    if keywords.get("enabled", True):
        record.tell("left out", what="autocast (it computed in float32)")
    real(self, "cpu", dtype=torch.bfloat16, enabled=False)


@replaces(torch.amp.GradScaler, name="__init__")
def scaler(real: Any, self: Any, device: str = "cuda", *args: Any, **keywords: Any) -> None:
    real(self, "cpu", *args, **keywords)


RealGenerator = torch.Generator


class _AnyGenerator(type(RealGenerator)):  # type: ignore[misc]
    def __instancecheck__(cls, item: Any) -> bool:
        return isinstance(item, RealGenerator)


class Generator(RealGenerator, metaclass=_AnyGenerator):  # type: ignore[misc]
    """Makes generators of the CPU, whichever device they are for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return RealGenerator()


GIB = 2**30
STREAM = MagicMock(elapsed_time=lambda other: 1.0, is_capturing=lambda: False)  # or an event
PROPERTIES = MagicMock(total_memory=80 * GIB, major=8, minor=0, multi_processor_count=108)
PROPERTIES.name = "pretended"
# What functions of torch.cuda and torch.accelerator answer. All others answer 0.
ANSWERS: dict[str, Any] = {
    "get_device_properties": PROPERTIES,
    "get_device_name": PROPERTIES.name,
    "get_device_capability": (8, 0),
    "get_arch_list": ["sm_80"],
    "current_accelerator": torch.device("cuda"),
    "mem_get_info": (80 * GIB, 80 * GIB),
    "memory_stats": defaultdict(int),
    "memory_summary": "",
    "nvtx": MagicMock(),
}
ANSWERS |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), GIB)
ANSWERS |= dict.fromkeys(("max_memory_reserved", "memory_cached"), GIB)
ANSWERS |= dict.fromkeys(("Event", "Stream", "stream", "current_stream", "default_stream"), STREAM)
ANSWERS |= dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True)
CALLS: dict[str, Any] = {name: MagicMock(return_value=answer) for name, answer in ANSWERS.items()}
CALLS |= {"device": on_device, "device_count": lambda: len(visible())}
CALLS |= dict.fromkeys(("current_device", "current_device_index"), lambda: _current)
CALLS |= dict.fromkeys(("set_device", "set_device_index", "set_device_idx"), set_device)
CALLS |= {"get_rng_state": lambda *args: torch.get_rng_state()}
CALLS |= {name: getattr(torch, name) for name in dir(torch) if name.endswith("Tensor")}
for owner in (torch.cuda, torch.accelerator):
    for name, value in list(vars(owner).items()):
        if name in CALLS or (inspect.isfunction(value) and name[0] != "_"):
            setattr(owner, name, CALLS.get(name, MagicMock(return_value=0)))
torch.Generator = Generator  # type: ignore[misc]
torch.set_default_device = torch.set_default_tensor_type = MagicMock()
Devices().__enter__()
