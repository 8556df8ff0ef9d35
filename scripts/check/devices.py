"""Pretend GPUs on a machine that has none: every tensor stays on the CPU, and devices are noted."""

import os
from typing import Any
from unittest.mock import MagicMock

import record
import torch
from record import state
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_current = 0
INVALID = "CUDA error: invalid device ordinal"
MEMORY = 80 * 2**30
QUIET = MagicMock(return_value=None)


def visible() -> list[str]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(index) for index in range(state.world // state.nodes)]
    return [item.strip() for item in listed.split(",") if item.strip()]


def index_of(device: Any) -> int | None:
    """Return the GPU's index that a device names, or None for anything but a GPU."""
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        return _current if device.index is None else device.index
    return None


def use(device: Any) -> int:
    index = _current if device is None else index_of(device)
    if index is None or index < 0:
        return _current
    if index >= len(visible()):
        if os.environ.get("CUDA_VISIBLE_DEVICES") is None:
            record.emit_once("ordinal", index, index=index, devices=len(visible()))
        raise RuntimeError(f"{INVALID} ({index} of {len(visible())} pretended devices)")
    return index


def set_device(device: Any) -> None:
    global _current
    _current = use(device)


def stream(*args: Any, **keywords: Any) -> MagicMock:
    """Return what stands for a stream, an event, or a block of either."""
    stub = MagicMock()
    stub.elapsed_time.return_value, stub.query.return_value = 1.0, True
    stub.is_capturing.return_value = False
    return stub


class Device:
    """Stands for ``torch.cuda.device``, which chooses a device for a block."""

    def __init__(self, device: Any) -> None:
        self.index = use(device)

    def __enter__(self) -> None:
        self.before = _current
        set_device(self.index)

    def __exit__(self, *error: Any) -> None:
        set_device(self.before)


class Devices(TorchFunctionMode):
    """Map each device of a call to the CPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return moved(args[0], use(args[1] if len(args) > 1 else kwargs.get("device")))
        if func in (Tensor.pin_memory, Tensor.record_stream):
            return args[0]
        index = index_of(kwargs.get("device"))
        if func is Tensor.to and len(args) > 1 and not isinstance(args[1], torch.dtype | Tensor):
            index = index_of(args[1])
            args = args if index is None else (args[0], "cpu", *args[2:])
        elif index is not None:
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if index is None:
            return func(*args, **kwargs)
        index, result = use(index), func(*args, **kwargs)
        if func is Tensor.to:
            return moved(result, index) if result is args[0] else result
        if isinstance(result, Tensor):
            result._pretended = index  # type: ignore[attr-defined]
        return result


def moved(tensor: Tensor, index: int) -> Tensor:
    """Return a copy, as a GPU would hold it, but of what is there already or needs gradients."""
    if tensor.requires_grad or hasattr(tensor, "_pretended"):
        return tensor
    copy = tensor.clone()
    copy._pretended = index  # type: ignore[attr-defined]
    return copy


def place_of(module: nn.Module) -> int | None:
    """Return the GPU on which a module was put, as far as that was seen."""
    parts = [*module.modules(), *module.parameters()]
    return next((part._pretended for part in parts if hasattr(part, "_pretended")), None)  # type: ignore[union-attr,return-value]


def _module_to(self: nn.Module, *args: Any, **keywords: Any) -> nn.Module:
    given = keywords.get("device", args[0] if args else None)
    if isinstance(given, Tensor | torch.dtype) or index_of(given) is None:
        return _real_to(self, *args, **keywords)
    self.__dict__["_pretended"] = use(given)
    if "device" in keywords:
        return _real_to(self, *args, **{**keywords, "device": "cpu"})
    return _real_to(self, "cpu", *args[1:], **keywords)


def _module_cuda(self: nn.Module, device: Any = None) -> nn.Module:
    self.__dict__["_pretended"] = use(device)
    return self


_real_to, _real_load, _real_generator = nn.Module.to, torch.load, torch.Generator


def _load(f: Any, map_location: Any = None, *args: Any, **keywords: Any) -> Any:
    return _real_load(f, map_location if callable(map_location) else "cpu", *args, **keywords)


def _compile(model: Any = None, *args: Any, **options: Any) -> Any:
    record.left_out("torch.compile")
    if isinstance(model, nn.Module):
        model.__dict__["_orig_mod"] = model
    return model if model is not None else lambda function: function


def _compile_in_place(self: nn.Module, *args: Any, **options: Any) -> None:
    record.left_out("torch.compile")


def _sync_batch_norm(self: Any, input: Tensor) -> Tensor:
    record.left_out("SyncBatchNorm (each rank normalised its own batch)")
    return nn.modules.batchnorm._BatchNorm.forward(self, input)


def _replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def install() -> None:
    """Replace what asks for a GPU. Nothing here may be reported as a mistake of the script."""
    cuda = torch.cuda
    for name in dir(cuda):
        if name.startswith(("memory_", "max_memory_", "utilization", "temperature")):
            setattr(cuda, name, MagicMock(return_value=0))
        if name.startswith(("synchronize", "empty_", "reset_", "manual_", "seed", "set_", "ipc_")):
            setattr(cuda, name, QUIET)
    about = MagicMock(total_memory=MEMORY, major=8, minor=0, multi_processor_count=108)
    about.name = "pretended"
    _replace(cuda, is_available=lambda: True, device_count=lambda: len(visible()), device=Device)
    _replace(cuda, current_device=lambda: _current, set_device=set_device, init=QUIET)
    _replace(cuda, get_device_name=lambda *a: "pretended", get_device_properties=lambda *a: about)
    _replace(
        cuda, get_device_capability=lambda *a: (8, 0), mem_get_info=lambda *a: (MEMORY, MEMORY)
    )
    _replace(cuda, is_bf16_supported=lambda *a, **k: True, memory_summary=lambda *a, **k: "")
    _replace(cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: False)
    _replace(cuda, get_rng_state=lambda *a: torch.get_rng_state(), _lazy_init=QUIET)
    _replace(cuda, get_rng_state_all=lambda: [torch.get_rng_state()], nvtx=MagicMock())
    _replace(cuda, Event=stream, Stream=stream, stream=stream, current_stream=stream)
    _replace(cuda, default_stream=stream, initial_seed=torch.initial_seed)
    for name in dir(torch):
        if name.endswith("Tensor"):
            setattr(cuda, name, getattr(torch, name))
    if hasattr(torch, "accelerator"):
        here = torch.accelerator
        _replace(here, is_available=lambda: True, device_count=lambda: len(visible()))
        _replace(here, current_device_index=lambda: _current, current_stream=stream)
        _replace(here, current_accelerator=lambda *a, **k: torch.device("cuda"))
        _replace(here, set_device_index=set_device, set_device_idx=set_device, synchronize=QUIET)
    _replace(nn.Module, to=_module_to, cuda=_module_cuda, compile=_compile_in_place)
    _replace(torch, load=_load, compile=_compile, Generator=lambda *a, **k: _real_generator())
    _replace(torch, set_default_device=QUIET, set_default_tensor_type=QUIET)
    nn.SyncBatchNorm.forward = _sync_batch_norm  # type: ignore[method-assign]
    autocast, scaler = torch.amp.autocast_mode.autocast, torch.amp.grad_scaler.GradScaler
    autocast_init, scaler_init = autocast.__init__, scaler.__init__

    def no_autocast(self: Any, *args: Any, **keywords: Any) -> None:
        if keywords.get("enabled", True):
            record.left_out("autocast (it computed in float32)")
        autocast_init(self, "cpu", dtype=torch.bfloat16, enabled=False)

    def scaler_on_cpu(self: Any, device: str = "cuda", *args: Any, **keywords: Any) -> None:
        scaler_init(self, "cpu", *args, **keywords)

    _replace(autocast, __init__=no_autocast)
    _replace(scaler, __init__=scaler_on_cpu)
    Devices().__enter__()
