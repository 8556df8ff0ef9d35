"""Stand-ins for what is not here: GPUs, data sets and weights to download, and trackers.

Every tensor stays on the CPU. The check notes on which GPU the script wants it.
"""

import contextlib
import importlib.machinery as machinery
import inspect
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import record
import torch
import torch.utils.model_zoo
from record import replaces, state
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Stub(MagicMock):
    """Accepts everything, and forgets it: a mock would keep each loss with its whole graph."""

    def __reduce__(self) -> Any:
        return str, ()  # a checkpoint may hold it

    def _increment_mock_call(self, /, *args: Any, **keywords: Any) -> None:
        pass


OTHER_TYPES = re.compile("not implemented for|same dtype|should be the same|expected scalar type")
_current = 0
models_on: set[int] = set()  # indices of the GPUs that wrapped models are on
_elsewhere: set[str] = set()  # lines that put something on another one
_used: dict[str, int] = {}  # the GPU that each line used before a model was wrapped
_visible: list[str] = []  # the GPUs that this process sees, since it first used one


def visible() -> list[str]:
    """Return the GPUs that this process sees. CUDA reads the variable only once."""
    every = ",".join(map(str, range(state.each)))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    return _visible or [item.strip() for item in listed if item.strip()]


def index_of(device: Any) -> int | None:
    """Return the GPU's index that a device names, or None for anything but a GPU."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type == "cuda":
        return _current if device.index is None else device.index
    return device if type(device) is int else None


def use(device: Any = None) -> int:
    """Return the index of a GPU, None being the current one. This rank has to have it."""
    index, count = index_of(device), len(visible())
    _visible[:] = visible()
    if index is None or index < 0:
        return _current
    if index >= count:
        if state.nodes > 1 and "CUDA_VISIBLE_DEVICES" not in os.environ:
            record.tell("device by global rank", what=index, devices=count)
        raise RuntimeError(f"CUDA error: invalid device ordinal ({index} of {count} pretended)")
    return index


def put(device: Any) -> int:
    """Return the index of a GPU that gets a tensor or a model."""
    index = use(device)
    if state.is_parent:  # of which a rank is no part
        return index
    if not models_on:
        _used[next(record.frames(), "")] = index
    elif index not in models_on:
        _tell_elsewhere(next(record.frames(), ""), index)
    return index


def _tell_elsewhere(line: str, index: int) -> None:
    if line and line not in _elsewhere:
        _elsewhere.add(line)
        record.tell("uses another GPU", line=line, device=index, own=min(models_on))


def wrapped_on(index: int) -> None:
    """Note that a wrapped model is on this GPU, and tell what the process put on others before."""
    models_on.add(index)
    for line, used in _used.items():
        if used not in models_on:
            _tell_elsewhere(line, used)


def set_device(device: Any) -> Stub:
    """Choose a GPU. What is returned opens a block, as ``torch.cuda.device`` does."""
    global _current
    _current = use(device)
    return Stub()


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function, in float32 where only GPUs or autocast have its types."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if not OTHER_TYPES.search(str(error)):
            raise
        floats = [item.float() if isinstance(item, Tensor) else item for item in args]
        result = func(*floats, **kwargs)
        return result.to(args[0].dtype) if isinstance(result, Tensor) else result


class Devices(TorchFunctionMode):
    """Replaces each device in the arguments of a call by the CPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_first = func in (Tensor.to, Tensor.cuda) and len(args) > 1
        device = args[1] if is_first else kwargs.get("device")
        if func is Tensor.cuda:
            put(device)
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.get_device:
            return _current
        if func is Tensor.type and isinstance(args[-1], str):
            args = (args[0], args[1].replace("torch.cuda.", "torch."))
        if index_of(device) is not None:
            put(device)
            args = (args[0], "cpu", *args[2:]) if is_first else args
            kwargs |= {} if is_first else {"device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        result = computed(func, args, kwargs)
        for observe in record.observers:
            observe(func, args or tuple(kwargs.values()), result)
        return result


@replaces(threading.Thread)
def _bootstrap_inner(real: Any, self: Any) -> None:
    with Devices():  # each thread has modes of its own
        real(self)


@replaces(torch.autograd)
def _engine_run_backward(real: Any, *args: Any, **keywords: Any) -> Any:
    # Tensor.backward has switched the mode off, but hooks and custom functions need it.
    with Devices():
        return real(*args, **keywords)


@replaces(nn.Module)
def to(real: Any, self: nn.Module, *args: Any, **keywords: Any) -> nn.Module:
    device = keywords.get("device", args[0] if args else None)
    if index_of(device) is not None:
        index = put(device)
        for part in self.modules():
            part.__dict__["_pretended"] = index
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


@replaces(nn.SyncBatchNorm, name="__init__")
def synchronized(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    """Make a layer that normalises this rank's own batch: the real one needs a GPU."""
    record.tell("left out", what="SyncBatchNorm (each rank normalised its own batch)")
    real(self, *args, **keywords)


nn.SyncBatchNorm.forward = nn.BatchNorm2d.forward  # type: ignore[method-assign]


@replaces(torch.autocast, name="__init__")
def autocast(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    if keywords.get("enabled", True):
        record.tell("left out", what="autocast (it computed in float32)")
    real(self, "cpu", dtype=torch.bfloat16, enabled=False)


@replaces(torch.amp.GradScaler, name="__init__")
def scaler(real: Any, self: Any, device: str = "cuda", *args: Any, **keywords: Any) -> None:
    real(self, "cpu", *args, **keywords)


class Generator(torch.Generator):
    """A generator of the CPU, whatever device the script asks for."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls)


GIB = 2**30
STREAM = Stub(elapsed_time=lambda other: 1.0, is_capturing=lambda: False)  # an event, too
PROPERTIES = Stub(total_memory=80 * GIB, major=8, minor=0, multi_processor_count=108)
PROPERTIES.name = "pretended"
ANSWERS: dict[str, Any] = {  # what functions of torch.cuda return. All others return 0.
    "get_device_properties": PROPERTIES,
    "get_device_name": PROPERTIES.name,
    "get_device_capability": (8, 0),
    "current_accelerator": torch.device("cuda"),
    "mem_get_info": (80 * GIB, 80 * GIB),
    "memory_stats": defaultdict(int),
    "nvtx": Stub(),
}
ANSWERS |= dict.fromkeys(("Event", "Stream", "stream", "current_stream", "default_stream"), STREAM)
ANSWERS |= dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True)
CALLS: dict[str, Any] = {name: Stub(return_value=answer) for name, answer in ANSWERS.items()}
CALLS |= {"device_count": lambda: len(visible())}
CALLS |= dict.fromkeys(("current_device", "current_device_index"), lambda: _current)
CALLS |= dict.fromkeys(("set_device", "set_device_index", "set_device_idx", "device"), set_device)
CALLS |= {"get_rng_state": lambda *args, **keywords: torch.get_rng_state()}
CALLS |= {"get_rng_state_all": lambda: [torch.get_rng_state()] * len(visible())}
CALLS |= {name: getattr(torch, name) for name in dir(torch) if name.endswith("Tensor")}
for _owner in (torch.cuda, torch.accelerator):
    for _name, _value in list(vars(_owner).items()):
        if _name in CALLS or (inspect.isfunction(_value) and _name[0] != "_"):
            setattr(_owner, _name, CALLS.get(_name, Stub(return_value=0)))
torch.Generator = Generator  # type: ignore[misc]
# A function, since torch.fx looks at the names of all methods.
Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment, method-assign]
torch.set_default_device = torch.set_default_tensor_type = Stub()
Devices().__enter__()

WRITING = "add_scalar add_scalars add_image add_images add_histogram add_figure add_text"
TRACKERS = ["torch.utils.tensorboard", "tensorboardX", "wandb", "visdom", "comet_ml", "neptune"]
TRACKERS += ["mlflow", "swanlab"]


class Settings(dict[str, Any]):
    """A dictionary whose items are attributes as well, as in ``wandb.config``."""

    __getattr__ = dict.__getitem__

    def update(self, values: Any, **options: Any) -> None:  # type: ignore[override]
        super().update(values if isinstance(values, dict) else vars(values))


def tracker(name: str) -> Stub:
    """Return a stand-in for a package that logs runs, as TensorBoard does."""
    module = Stub(__path__=[], __name__=name)
    module.config, module.run = Settings(), None

    # The files of torch's TensorBoard have names of their own.
    level = "NOTE" if name.startswith("torch.") else "WARN"

    def log(*args: Any, **keywords: Any) -> None:
        record.tell("every rank logs", level=level, same=name, name=name)

    def open_one(log_dir: Any = "runs", *args: Any, **keywords: Any) -> Stub:
        module.config.update(keywords.get("config") or {})
        path = str(keywords.get("logdir") or log_dir or "runs")
        os.makedirs(path, exist_ok=True)  # scripts write more into it
        opened = Stub(log_dir=path, logdir=path, dir=path, config=module.config, id="run", url="")
        opened.get_logdir.return_value = path
        return opened

    def open_run(*args: Any, **keywords: Any) -> Stub:
        if keywords.get("mode") != "disabled":
            log()
        module.run = open_one(*args, **keywords)
        return module.run

    class Writer:
        """A class of its own, because scripts derive from it."""

        def __init__(self, *args: Any, **keywords: Any) -> None:
            self._opened = open_one(*args, **keywords)
            log()  # it makes its file at once

        def __getattr__(self, name: str) -> Any:
            return getattr(vars(self).get("_opened", Stub()), name)

        def __enter__(self) -> Any:
            return self

        def close(self, *error: object) -> None:
            pass

        flush = __exit__ = close

    for method in WRITING.split():
        setattr(Writer, method, log)
    for opener in ("init", "init_run", "Visdom", "start_run", "Experiment"):
        getattr(module, opener).side_effect = open_run
    module.SummaryWriter = Writer
    return module


class Trackers:
    """Finds a stand-in for each module of these packages."""

    def find_spec(self, name: str, *more: Any) -> machinery.ModuleSpec | None:
        is_one = any(f"{name}.".startswith(f"{package}.") for package in TRACKERS)
        spec = machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return spec if is_one else None

    def create_module(self, spec: machinery.ModuleSpec) -> Any:
        return tracker(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.insert(0, Trackers())  # type: ignore[arg-type]

SETS: dict[str, Any] = {  # torchvision's: an image's shape, classes, training and test samples
    "MNIST": ((28, 28), 10, 60000, 10000),
    "FashionMNIST": ((28, 28), 10, 60000, 10000),
    "CIFAR10": ((32, 32, 3), 10, 50000, 10000),
    "CIFAR100": ((32, 32, 3), 100, 50000, 10000),
    "SVHN": ((32, 32, 3), 10, 73257, 26032),
    "ImageNet": ((256, 256, 3), 1000, 1281167, 50000),
    "ImageFolder": ((256, 256, 3), 2, 2048, 512),
}
NO_WEIGHTS: dict[str, Any] = {}  # in place of weights that a script would download
_downloaded: set[str] = set()  # names of the data sets that this process has downloaded


def _no_weights(*args: Any, **keywords: Any) -> dict[str, Any]:
    record.tell("left out", what="pretrained weights (fresh ones instead)")
    same = ("weights", state.node)  # the downloads do not disturb each other
    record.tell("every rank downloads", level="NOTE", same=same, name="pretrained weights")
    return NO_WEIGHTS


def _drawn(real: Any, shape: tuple[int, ...], classes: int, *counts: int) -> Any:
    """Return a class of torchvision that draws its images, but reads a folder that exists."""
    name = real.__name__
    is_folder = "Folder" in real.__name__ or "Net" in real.__name__

    class Drawn(real):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            passed = record.by_name(real, *args, **keywords)
            passed |= passed.pop("kwargs", {})
            if is_folder and os.path.isdir(passed["root"]):
                with contextlib.suppress(FileNotFoundError, RuntimeError):
                    return super().__init__(*args, **keywords)
            record.tell("left out", what=f"the data set {name} (drawn images instead)")
            if passed.get("download") and name not in _downloaded:
                record.tell("every rank downloads", same=(name, state.node), name=name)
                _downloaded.add(name)
            how = {key: passed.get(key) for key in ("transform", "target_transform")}
            torchvision.datasets.VisionDataset.__init__(self, passed["root"], **how)
            split = passed.get("split", "train" if passed.get("train", True) else "test")
            self.train = split == "train" and "val" not in Path(passed["root"]).name
            count = counts[not self.train]
            images = np.random.RandomState(0).randint(0, 256, (64, *shape), np.uint8)
            self.classes = [str(number) for number in range(classes)]
            if not isinstance(getattr(real, "class_to_idx", None), property):
                self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
            # Few classes, so that an accuracy is not 0.
            self.targets: Any = [number % min(classes, 10) for number in range(count)]
            if is_folder:
                self.samples = self.imgs = list(enumerate(self.targets))
                self.loader = lambda number: Image.fromarray(images[number % 64])
            else:
                self.data: Any = np.resize(images, (count, *shape))
            if len(shape) == 2:
                self.data, self.targets = map(torch.as_tensor, (self.data, self.targets))

        def __iter__(self) -> Iterator[Any]:
            return map(self.__getitem__, range(len(self)))

    return Drawn


with contextlib.suppress(ImportError):
    import torchvision
    from PIL import Image

    for _name, _facts in SETS.items():
        _real = getattr(torchvision.datasets, _name)
        for _place in (torchvision.datasets, inspect.getmodule(_real)):
            setattr(_place, _name, _drawn(_real, *_facts))
    replaces(torchvision.models.ResNet18_Weights.__base__, name="get_state_dict")(_no_weights)


def hub_load(repository: str, model: str, *args: Any, **keywords: Any) -> Any:
    """Return a fresh model of torchvision. There is no network for others."""
    _no_weights()
    return torchvision.models.get_model(model)


torch.hub.load = hub_load  # type: ignore[assignment]
torch.hub.list = lambda *args, **keywords: torchvision.models.list_models()
torch.hub.load_state_dict_from_url = _no_weights  # type: ignore[assignment]
torch.utils.model_zoo.load_url = _no_weights  # type: ignore[assignment]
