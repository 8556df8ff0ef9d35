"""Data sets of a few samples, and a note of which samples each rank drew.

Lengths are shortened where a data set tells its length, not where a loop ends. So samplers share
out a short epoch by their own rules, and the script's loops end by themselves.
"""

import contextlib
import functools
import inspect
import os
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import record
import torch
import torch.utils.data as data
from record import around, state

BATCH = 4
SAMPLES = 15  # of each rank in an epoch: three batches of 4 and one of 3
COMPARED = 6  # samples whose content is compared
SETS: dict[str, Any] = {  # torchvision's: an image's shape, classes, training and test samples
    "MNIST": ((28, 28), 10, 60000, 10000),
    "FashionMNIST": ((28, 28), 10, 60000, 10000),
    "CIFAR10": ((32, 32, 3), 10, 50000, 10000),
    "CIFAR100": ((32, 32, 3), 100, 50000, 10000),
    "ImageNet": ((256, 256, 3), 1000, 1281167, 50000),
    "ImageFolder": ((256, 256, 3), 2, 2048, 512),
}
GENERATORS: dict[str, tuple[Any, Any]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "random": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
}
NO_WORKERS = {"num_workers": 0, "timeout": 0, "multiprocessing_context": None}
NO_WORKERS |= {"prefetch_factor": None, "persistent_workers": False, "pin_memory": False}
NO_WEIGHTS: dict[str, Any] = {}  # stands for weights that a script would download
whole_lengths = record.Nested()  # while data sets tell them
_datasets: defaultdict[str, dict[int, Any]] = defaultdict(dict)  # by the lines of their loaders
_contents: dict[int, list[int] | None] = {}  # by the data set
_counts: Counter[Any] = Counter()  # of passes, by the loader
_former: dict[Any, "Pass"] = {}  # the training pass before, by the loader
_open: list["Pass"] = []
_latest: list["Pass"] = []  # what the last forward saw
_downloaded: set[str] = set()  # by this process, or by the parent that it was before


def shorter(length: int) -> int:
    """Return a length that divides by the number of ranks exactly if the given one does."""
    most = SAMPLES * state.world
    return length if length <= most or whole_lengths.depth else most - (-length % state.world)


def digest(value: Any) -> int:
    """Return a checksum of what data sets return. It is 0 for a kind that nobody knows."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float().numpy()
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, list | tuple):
        value = str([digest(item) for item in value])
    if hasattr(value, "tobytes"):
        return zlib.crc32(value.tobytes())
    plain = isinstance(value, int | float | str | bytes | None)
    return zlib.crc32(repr(value).encode()) if plain else 0


def marks() -> dict[str, int]:
    """Return a checksum of the state of each random generator."""
    return {name: digest(get()) for name, (get, _) in GENERATORS.items()}


def tell_draws(where: str, before: dict[str, int], seed: int | None = None) -> None:
    """Tell from which states numbers were drawn since: equal states draw equal numbers."""
    for name, after in marks().items():
        if after != before[name]:
            mark = before[name] if seed is None else seed
            record.tell("equal random numbers", same=(where, name, mark), where=where, name=name)


@contextlib.contextmanager
def randomness_kept() -> Iterator[None]:
    states = [(put, get()) for get, put in GENERATORS.values()]
    try:
        yield
    finally:
        for put, own in states:
            put(own)


def content(dataset: Any) -> list[int] | None:
    """Return checksums of some samples under a fixed seed, or None if they differ at each look."""
    if id(dataset) not in _contents:
        looks: list[list[int]] = [[], []]
        with randomness_kept(), contextlib.suppress(Exception):  # an index that it does not take
            for look in looks:
                for part in range(COMPARED):
                    index = part * (len(dataset) - 1) // (COMPARED - 1)
                    torch.random.default_generator.manual_seed(index)
                    random.seed(index)
                    np.random.seed(index)
                    look.append(digest(dataset[index]))
        _contents[id(dataset)] = looks[0] if looks[0] and looks[0] == looks[1] else None
    return _contents[id(dataset)]


def sample(dataset: Any, index: int) -> tuple[Any, int]:
    """Return what tells a sample from others: a mark of the whole set, and the index in it."""
    while isinstance(dataset, data.Subset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    seen = content(dataset)
    return seen and digest(seen), index


class Pass:
    """One iteration over a loader: what was drawn, and what was done with it."""

    def __init__(self, loader: Any) -> None:
        self.about, self.key, self.begun = loader._about, loader._about["key"], state.clock
        self.number = -1  # follows with the first forward
        self.mode: bool | None = None  # of the model in that forward
        self.is_fresh = self.trained = self.evaluated = self.complete = False
        self.count = 0
        self.drawn: Any = None  # what tells the last batch from another one
        is_stream = isinstance(loader.dataset, data.IterableDataset)
        self.length = 0 if is_stream else len(loader.dataset)
        self.content = content(loader.dataset) if self.length else None
        self.indices: list[int] = []
        self.samples: list[Any] = []

    def fetch(self, loader: Any, iterator: Any, index: Any) -> Any:
        """Return a batch. Workers would draw from seeds of their own, which follow from one."""
        workers, before = self.about["workers"], marks()
        with randomness_kept() if workers else contextlib.nullcontext():
            batch = iterator._dataset_fetcher.fetch(index)
            if not (workers and loader.worker_init_fn):
                tell_draws("for their samples", before, iterator._base_seed if workers else None)
        indices = index if isinstance(index, list | tuple) else [index]
        self.drawn = None if self.length else digest(batch)
        if self.length and all(isinstance(item, int | np.integer) for item in indices):
            drawn = [sample(loader.dataset, int(item)) for item in indices]
            self.drawn = self.content and (*drawn, *self.content)
            self.indices += map(int, indices)
            self.samples += drawn
        self.count += len(indices)
        self.is_fresh = True
        return batch

    def finish(self) -> None:
        """Tell what was drawn, and what is wrong with it that this rank alone can see."""
        if self.number < 0:  # a mere look at the data
            return
        if not self.trained and not self.evaluated and self.mode is not False:
            _counts[self.key] -= 1  # a look at the model, as at its accuracy
            return
        use = "training" if self.trained else "evaluation"
        facts = {**self.about, **vars(self), "use": use, "epoch": self.number + 1}
        record.tell("pass", **facts)
        if not self.trained:
            if self.mode and self.complete:
                record.tell("evaluates in training mode", **facts)
            if self.about["left"] and self.complete:
                record.tell("leaves samples out", **facts)
            elif self.about["pads"]:
                record.tell("padded evaluation", **facts)
            return
        former, order = _former.get(self.key), self.indices
        _former[self.key] = self
        if self.mode is False:
            level = "WRONG" if former and former.mode else "WARN"  # it may be meant
            record.tell("trains in evaluation mode", level=level, **facts)
        if former and len(order) > 3 and former.indices == order != sorted(order):
            record.tell("no set_epoch", **facts)


def forward_begins(grads: bool, mode: bool | None) -> bool:
    """Note what the batches fetched last are used for; return whether there were any."""
    fresh = [item for item in _open if item.is_fresh]
    _latest[:] = fresh or _latest
    for item in fresh:
        if item.number < 0:
            item.number = _counts[item.key]
            _counts[item.key] += 1
        item.mode = mode if item.mode is None else item.mode
        item.evaluated = item.evaluated or not grads
        item.is_fresh = False
    return bool(fresh)


def backward_begins() -> None:
    for item in _latest:
        if item.number >= 2 and not item.trained:
            record.leave("cut", message="the training was ended after two epochs")
        item.trained = True
        if item.drawn and item.number == 0:
            facts = {"level": "WARN", "what": "two ranks train on the same batch"}
            record.tell("equal shares", same=item.drawn, line=item.about["line"], **facts)


@around(data.DataLoader, name="__init__")
def loader(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    given = record.arguments(real, self, *args, **keywords)
    dataset, sampler, size = given["dataset"], given.get("sampler"), given.get("batch_size", 1)
    # A loader is known by its lines and, where a loop makes several, by the number of its data set.
    lines = list(record.frames())
    known = _datasets[" < ".join(lines)]
    known[id(dataset)] = dataset
    about: dict[str, Any] = {"key": (*lines, list(known).index(id(dataset))), "line": lines[0]}
    about |= {"workers": given.get("num_workers", 0), "batches": None, "left": 0}
    about["pads"] = type(sampler) is data.DistributedSampler and not sampler.drop_last
    if size and given.get("batch_sampler") is None:
        given["batch_size"] = min(size, BATCH)
        with whole_lengths, contextlib.suppress(Exception):  # a stream has no length
            whole, drops = len(sampler or dataset), given.get("drop_last", False)
            about["batches"] = whole // size if drops else -(-whole // size)
            about |= {"whole": whole, "left": drops and whole % size}
    self._about = about
    real(**given | {name: value for name, value in NO_WORKERS.items() if name in given})


@around(data.DataLoader, name="__iter__")
def batches(real: Any, self: Any) -> Iterator[Any]:
    """Yield the batches of a loader, as its own iterator would."""
    iterator, item = real(self), Pass(self)
    _open.append(item)
    try:
        with contextlib.suppress(StopIteration):  # an IterableDataset raises it as well
            while item.count <= SAMPLES * state.world + BATCH:
                yield item.fetch(self, iterator, next(iterator._sampler_iter))
            record.tell("left out", what="the end of an epoch: a loader was stopped after a while")
        item.complete = True
    finally:
        _open.remove(item)
        item.finish()


@around(data, data.dataset)
def random_split(real: Any, *args: Any, **keywords: Any) -> Any:
    with whole_lengths:
        return real(*args, **keywords)


def _no_weights(*args: Any, **keywords: Any) -> dict[str, Any]:
    record.tell("left out", what="pretrained weights (fresh ones instead)")
    return NO_WEIGHTS


def _stand_in(real: Any, shape: tuple[int, ...], classes: int, *counts: int) -> Any:
    """Return a data set of torchvision that draws its images. A folder that exists is read."""
    name, is_folder = real.__name__, issubclass(real, torchvision.datasets.ImageFolder)

    class Drawn(real):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            given = record.arguments(real, *args, **keywords)
            given |= given.pop("kwargs", {})
            if name == "ImageFolder" and os.path.isdir(given["root"]):
                return super().__init__(*args, **keywords)
            record.tell("left out", what=f"the data set {name} (drawn images instead)")
            if given.get("download") and name not in _downloaded:
                record.tell("every rank downloads", same=(name, state.node), name=name)
                _downloaded.add(name)
            how = {key: given.get(key) for key in ("transform", "target_transform")}
            torchvision.datasets.VisionDataset.__init__(self, given["root"], **how)
            split = given.get("split", "train" if given.get("train", True) else "test")
            self.train = split == "train" and "val" not in str(given["root"])
            count = counts[not self.train]
            images = np.random.RandomState(0).randint(0, 256, (64, *shape), np.uint8)
            self.classes = [str(number) for number in range(classes)]
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


def _shorten(kind: Any) -> None:
    if real := vars(kind).get("__len__"):
        kind.__len__ = functools.wraps(real)(lambda self: shorter(real(self)))
    for child in kind.__subclasses__():
        _shorten(child)


def _subclasses(cls: Any, **keywords: Any) -> None:
    super(data.Dataset, cls).__init_subclass__(**keywords)
    _shorten(cls)


def _finish() -> None:
    for item in _open:
        item.finish()


data.Dataset.__init_subclass__ = classmethod(_subclasses)  # type: ignore[assignment]
_shorten(data.Dataset)
record.at_the_end.append(_finish)
with contextlib.suppress(ImportError):
    import torchvision
    from PIL import Image

    for _name, _about in SETS.items():
        _real = getattr(torchvision.datasets, _name)
        _drawn = _stand_in(_real, *_about)
        for _owner in (torchvision.datasets, inspect.getmodule(_real)):
            setattr(_owner, _name, _drawn)
    torchvision.models._api.load_state_dict_from_url = _no_weights
torch.hub.load_state_dict_from_url = _no_weights  # type: ignore[assignment]
