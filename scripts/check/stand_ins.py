"""What stands for data sets and weights to download, for trackers, and for other programs."""

import contextlib
import importlib.machinery as machinery
import inspect
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import record
import torch
import torch.utils.model_zoo
from record import replaces, state

SETS: dict[str, Any] = {  # torchvision's: an image's shape, classes, training and test samples
    "MNIST": ((28, 28), 10, 60000, 10000),
    "FashionMNIST": ((28, 28), 10, 60000, 10000),
    "CIFAR10": ((32, 32, 3), 10, 50000, 10000),
    "CIFAR100": ((32, 32, 3), 100, 50000, 10000),
    "ImageNet": ((256, 256, 3), 1000, 1281167, 50000),
    "ImageFolder": ((256, 256, 3), 2, 2048, 512),
}
TRACKERS = ["torch.utils.tensorboard", "tensorboardX", "wandb", "visdom", "comet_ml", "neptune"]
TRACKERS += ["neptune.new", "mlflow", "mlflow.pytorch", "swanlab"]
NO_WEIGHTS: dict[str, Any] = {}  # stands for weights that a script would download
# What other programs would print: a number, as of memory, which passes for a name, too.
OUTPUTS = {"scontrol": "127.0.0.1\n", "hostname": "localhost\n"}
_downloaded: set[str] = set()  # by this process, or by the parent that it was before


class Settings(dict[str, Any]):
    """Stands for ``wandb.config``: a dictionary whose items are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def update(self, *values: Any, allow_val_change: bool = True, **keywords: Any) -> None:
        for value in values:
            super().update(value if isinstance(value, dict) else vars(value or keywords))
        super().update(keywords)


def tracker(name: str) -> MagicMock:
    """Return a stand-in for a package that logs runs, such as TensorBoard."""
    settings = Settings()

    def open_one(log_dir: Any = "runs", *args: Any, **keywords: Any) -> MagicMock:
        record.tell("every rank logs", same=name, name=name)
        settings.update(keywords.get("config") or {})
        log_dir = keywords.get("logdir") or log_dir or "runs"
        opened = MagicMock(log_dir=str(log_dir), logdir=str(log_dir), dir=str(log_dir))
        opened.config = settings
        opened.get_logdir.return_value = str(log_dir)
        return opened

    module = MagicMock(__path__=[], __spec__=machinery.ModuleSpec(name, None), __name__=name)
    module.config = settings
    for opener in ("init", "init_run", "SummaryWriter", "Visdom", "start_run", "Experiment"):
        getattr(module, opener).side_effect = open_one
    return module


for _name in TRACKERS:
    sys.modules[_name] = tracker(_name)
    _package, _, _module = _name.rpartition(".")
    if _package:
        setattr(sys.modules[_package], _module, sys.modules[_name])


class NoProgram(subprocess.Popen):  # type: ignore[type-arg]
    """Stands for a program that the script starts, such as git: it prints a line, and ends well."""

    def __init__(self, args: Any, *rest: Any, **keywords: Any) -> None:
        passed = record.by_name(super().__init__, args, *rest, **keywords)
        words = args.split() if isinstance(args, str) else list(map(os.fsdecode, args))
        record.tell("left out", what=f"programs that the script starts, such as {words[0]}")
        output = OUTPUTS.get(os.path.basename(words[0]), "0\n")
        texts = ("text", "universal_newlines", "encoding", "errors")
        self._is_text = any(passed.get(name) for name in texts)
        pipes = {name: passed.get(name) == subprocess.PIPE for name in ("stdout", "stderr")}
        self._outputs = [output if pipes["stdout"] else None, "" if pipes["stderr"] else None]
        self.args, self.returncode = args, 0
        self.pid = 2**30  # of nobody, whom a signal could end
        self.stdin = io.StringIO() if self._is_text else io.BytesIO()  # type: ignore[assignment]
        self.stdout, self.stderr = map(self._file, self._outputs)

    def _file(self, text: str | None) -> Any:
        if text is None:
            return None
        return io.StringIO(text) if self._is_text else io.BytesIO(text.encode())

    def communicate(self, *args: Any, **keywords: Any) -> Any:
        files = self.stdout, self.stderr
        return tuple(file.read() if file else None for file in files)  # type: ignore[union-attr]

    def wait(self, timeout: Any = None) -> int:
        return 0

    poll = send_signal = kill = terminate = lambda self, *args: 0  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        """Nothing was started."""

    def __del__(self, *args: Any) -> None:
        """Nothing was started."""


subprocess.Popen = NoProgram  # type: ignore[misc]


@replaces(os)
def system(real: Any, command: Any) -> int:
    return NoProgram(command, shell=True).returncode


def _no_weights(*args: Any, **keywords: Any) -> dict[str, Any]:
    record.tell("left out", what="pretrained weights (fresh ones instead)")
    return NO_WEIGHTS


def _stand_in(real: Any, shape: tuple[int, ...], classes: int, *counts: int) -> Any:
    """Return a data set of torchvision that draws its images. A folder that exists is read."""
    name, is_folder = real.__name__, issubclass(real, torchvision.datasets.ImageFolder)

    class Drawn(real):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            passed = record.by_name(real, *args, **keywords)
            passed |= passed.pop("kwargs", {})
            if name == "ImageFolder" and os.path.isdir(passed["root"]):
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
            self.targets: Any = [number % classes for number in range(count)]
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
        _drawn = _stand_in(_real, *_facts)
        for _owner in (torchvision.datasets, inspect.getmodule(_real)):
            setattr(_owner, _name, _drawn)
    replaces(torchvision.models.ResNet18_Weights.__base__, name="get_state_dict")(_no_weights)
torch.hub.load_state_dict_from_url = _no_weights  # type: ignore[assignment]
torch.utils.model_zoo.load_url = _no_weights  # type: ignore[assignment]
