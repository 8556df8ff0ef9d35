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
from collections import Counter
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
SETS = {  # torchvision's: size, channels, classes, training and test samples
    "MNIST": (28, 1, 10, 60000, 10000),
    "FashionMNIST": (28, 1, 10, 60000, 10000),
    "CIFAR10": (32, 3, 10, 50000, 10000),
    "CIFAR100": (32, 3, 100, 50000, 10000),
    "ImageNet": (256, 3, 1000, 1281167, 50000),
    "ImageFolder": (256, 3, 2, 2048, 512),
}
OF_WORKERS = ("num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor")
OF_WORKERS += ("persistent_workers", "pin_memory_device", "in_order")  # type: ignore[assignment]
whole_lengths = record.Nested()  # while data sets tell them
_open: list["Pass"] = []
_known: dict[str, list[Any]] = {}  # data sets, by the lines of their loaders
_counts: Counter[Any] = Counter()  # of passes, by the loader
_contents: dict[Any, list[int] | None] = {}
_downloaded: set[str] = set()  # by this process, or by the parent that it was before
_former: dict[Any, "Pass"] = {}  # the training pass before, by the loader
_pending: list["Pass"] = []  # fetched since the last forward
_latest: list["Pass"] = []  # what the last forward saw


def shorter(length: int) -> int:
    """Return a length that divides by the number of ranks exactly if the given one does."""
    most = SAMPLES * state.world
    return length if length <= most or whole_lengths.depth else most - (-length % state.world)


def digest(value: Any) -> int:
    """Return a checksum of a sample, of anything that data sets return."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float().contiguous().numpy()
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    if isinstance(value, list | tuple):
        return zlib.crc32(repr([digest(item) for item in value]).encode())
    if hasattr(value, "tobytes"):
        return zlib.crc32(value.tobytes())
    plain = isinstance(value, int | float | str | bytes | bool | None)
    return zlib.crc32(repr(value).encode()) if plain else 0


def marks() -> dict[str, int]:
    """Return a checksum of the state of each random generator."""
    _, array, position, *_ = np.random.get_state()
    states = {"torch": torch.get_rng_state(), "random": random.getstate()[1]}
    return {name: digest(own) for name, own in {**states, "numpy": [array, position]}.items()}


def tell_draws(where: str, before: dict[str, int], seed: int | None = None) -> None:
    """Tell from which states numbers were drawn since: equal states draw equal numbers."""
    for name, after in marks().items():
        if after != before[name]:
            mark = before[name] if seed is None else seed
            record.tell("equal random numbers", same=(where, name, mark), where=where, name=name)


@contextlib.contextmanager
def randomness_kept() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def content(dataset: Any) -> list[int] | None:
    """Return checksums of some samples under a fixed seed, or None if they differ at each look."""
    looks: list[list[int]] = [[], []]
    with randomness_kept():
        try:
            for look in looks:
                for part in range(COMPARED):
                    index = part * (len(dataset) - 1) // (COMPARED - 1)
                    torch.random.default_generator.manual_seed(index)
                    random.seed(index)
                    np.random.seed(index)
                    look.append(digest(dataset[index]))
        except Exception:  # an index that this data set does not take
            return None
    return looks[0] if looks[0] == looks[1] else None


class Pass:
    """One iteration over a loader: what was drawn, and what was done with it."""

    def __init__(self, loader: Any) -> None:
        self.key, self.line, self.workers = "", "", 0  # and what else is known of the loader
        self.__dict__.update(loader._about)
        self.number, self.begun = -1, state.clock  # the number follows with the first forward
        self.mode: bool | None = None
        self.samples = 0
        self.trained = self.evaluated = self.complete = False
        self.indices: list[int] = []
        self.base: list[int] = []
        self.drawn: Any = None  # what tells the last batch from another one
        is_stream = isinstance(loader.dataset, data.IterableDataset)
        self.length = 0 if is_stream else len(loader.dataset)
        if self.key not in _contents:
            _contents[self.key] = content(loader.dataset) if self.length else None
        self.content = _contents[self.key]

    def fetch(self, loader: Any, iterator: Any, index: Any) -> Any:
        """Return a batch. Workers would draw from seeds of their own, which follow from one."""
        seed, before = iterator._base_seed if self.workers else None, marks()
        with randomness_kept() if self.workers else contextlib.nullcontext():
            batch = iterator._dataset_fetcher.fetch(index)
            if self.samples < 3 * BATCH and not (self.workers and loader.worker_init_fn):
                tell_draws("for their samples", before, seed)
        indices = index if isinstance(index, list | tuple) else [index]
        if self.length and all(isinstance(item, int | np.integer) for item in indices):
            base = [base_index(loader.dataset, int(item)) for item in indices]
            self.indices += [int(item) for item in indices]
            self.base += base
            self.drawn = self.content and (*base, *self.content)
        else:
            self.drawn = None if self.length else digest(batch)
        self.samples += len(indices)
        if self not in _pending:
            _pending.append(self)
        return batch

    def finish(self) -> None:
        """Tell what was drawn, once, and what is wrong with it that this rank alone can see."""
        if self not in _open:
            return
        _open.remove(self)
        if self in _pending:
            _pending.remove(self)
        if self.number < 0:  # a mere look at the data
            return
        evaluates = not self.trained and (self.evaluated or self.mode is False)
        if not self.trained and not evaluates:  # a look at the model, as at its accuracy
            _counts[self.key] -= 1
            return
        facts = vars(self) | {"evaluates": evaluates, "epoch": self.number + 1}
        record.tell("pass", **facts)
        if evaluates and self.mode and self.complete:
            record.tell("evaluates in training mode", **facts)
        former = _former.get(self.key)
        if self.trained:
            _former[self.key] = self
        if self.trained and self.mode is False:
            changed = former is not None and former.mode
            record.tell(f"{'trains' if changed else 'always'} in evaluation mode", **facts)
        order = self.indices
        if self.trained and former and len(order) > 3 and former.indices == order != sorted(order):
            record.tell("no set_epoch", **facts)


def base_index(dataset: Any, index: int) -> int:
    while isinstance(dataset, data.Subset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return index


def forward_begins(grads: bool, mode: bool | None) -> bool:
    """Note what the batches fetched last are used for; return whether there were any."""
    if not _pending:
        return False
    _latest[:] = _pending
    _pending.clear()
    for item in _latest:
        if item.number < 0:
            item.number = _counts[item.key]
            _counts[item.key] += 1
        item.evaluated = item.evaluated or not grads
        item.mode = mode if item.mode is None else item.mode
    return True


def backward_begins() -> None:
    for item in _latest:
        if item.number >= 2 and not item.trained:
            record.leave("cut", message="the training was ended after two epochs")
        item.trained = True
        if item.drawn and item.number == 0:
            record.tell("equal samples", same=item.drawn, line=item.line)


def _shorten(kind: Any) -> None:
    real = kind.__dict__.get("__len__")
    if real is not None and not hasattr(real, "_real"):
        length = functools.wraps(real)(lambda self: shorter(real(self)))
        length._real = real  # type: ignore[attr-defined]
        kind.__len__ = length
    for child in kind.__subclasses__():
        _shorten(child)


@around(data.DataLoader, name="__init__")
def loader(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    given = record.arguments(real, self, *args, **keywords)
    sampler, size, whole = given.get("sampler"), given.get("batch_size", 1), None
    with whole_lengths, contextlib.suppress(Exception):
        whole = len(sampler or given["dataset"]), size
    # A loader is known by its lines and, where a loop makes several, by the number of its data set.
    key = " < ".join(record.frames())
    known = _known.setdefault(key, [])
    number = next((n for n, one in enumerate(known) if one is given["dataset"]), len(known))
    known += [given["dataset"]] if number == len(known) else []
    own: dict[str, Any] = {"key": (key, number), "line": next(record.frames(), "")}
    own["drop_last"] = given.get("drop_last", False) or getattr(sampler, "drop_last", False)
    own |= {"workers": given.get("num_workers", 0), "whole": whole}
    self.__dict__["_about"] = own | {"sampler": type(sampler).__name__}
    if isinstance(size, int) and given.get("batch_sampler") is None:
        given["batch_size"] = min(size, BATCH)
    real(**{key: value for key, value in given.items() if key not in OF_WORKERS})


@around(data.DataLoader, name="__iter__")
def batches(real: Any, self: Any) -> Iterator[Any]:
    """Yield the batches of a loader, as its own iterator would."""
    iterator, item = real(self), Pass(self)
    _open.append(item)
    try:
        with contextlib.suppress(StopIteration):  # an IterableDataset raises it as well
            while item.samples <= SAMPLES * state.world + BATCH:
                yield item.fetch(self, iterator, next(iterator._sampler_iter))
            record.tell("left out", what="the end of an epoch: a loader was stopped after a while")
        item.complete = True
    finally:
        item.finish()


@around(data, data.dataset)
def random_split(real: Any, *args: Any, **keywords: Any) -> Any:
    with whole_lengths:
        return real(*args, **keywords)


class NoWeights(dict):
    """Stands for weights that a script would download."""


def _no_weights(*args: Any, **keywords: Any) -> NoWeights:
    record.tell("left out", what="pretrained weights (fresh ones instead)")
    return NoWeights()


def _stand_in(name: str, real: Any, size: int, channels: int, classes: int, *lengths: int) -> Any:
    """Return a data set of torchvision that draws images. A folder that exists is read."""

    class Drawn(torchvision.datasets.FakeData):
        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            is_plain = name == "ImageFolder" and cls is Drawn
            is_there = is_plain and os.path.isdir(record.arguments(real, *args, **keywords)["root"])
            return real(*args, **keywords) if is_there else super().__new__(cls)

        def __init__(self, *args: Any, **keywords: Any) -> None:
            given = record.arguments(real, *args, **keywords)
            given |= given.pop("kwargs", {})
            record.tell("left out", what=f"the data set {name} (drawn images instead)")
            if given.get("download") and name not in _downloaded:
                record.tell("every rank downloads", same=(name, state.node), name=name)
                _downloaded.add(name)
            split = given.get("split", "train" if given.get("train", True) else "test")
            self.train = split == "train" and "val" not in str(given["root"])
            length, how = (
                lengths[not self.train],
                (given.get("transform"), given.get("target_transform")),
            )
            super().__init__(length, (channels, size, size), classes, *how)
            self.classes = [str(number) for number in range(classes)]
            self.targets = self.labels = [number % classes for number in range(length)]
            if size < 99:  # as the real one holds its images
                drawn = np.random.RandomState(0).randint(0, 256, (64, size, size, 3), np.uint8)
                self.data = np.resize(drawn, (length, size, size, 3))
            if channels == 1:
                self.data = torch.from_numpy(self.data[..., 0])  # type: ignore[assignment]
                self.targets = torch.tensor(self.targets)  # type: ignore[assignment]

        def __getitem__(self, index: int) -> Any:
            with whole_lengths:  # a split has indices of the whole
                return super().__getitem__(index)

        def __iter__(self) -> Iterator[Any]:
            return map(self.__getitem__, range(len(self)))

    return Drawn


def _subclasses(cls: Any, **keywords: Any) -> None:
    super(data.Dataset, cls).__init_subclass__(**keywords)
    _shorten(cls)


def _finish() -> None:
    for item in list(_open):
        item.finish()


data.Dataset.__init_subclass__ = classmethod(_subclasses)  # type: ignore[assignment]
_shorten(data.Dataset)
record.at_the_end.append(_finish)
with contextlib.suppress(ImportError):
    import torchvision

    for _name, _about in SETS.items():
        _real = getattr(torchvision.datasets, _name)
        _drawn = _stand_in(_name, _real, *_about)
        for _owner in (torchvision.datasets, inspect.getmodule(_real)):
            setattr(_owner, _name, _drawn)
    torchvision.models._api.load_state_dict_from_url = _no_weights
torch.hub.load_state_dict_from_url = _no_weights  # type: ignore[assignment]
