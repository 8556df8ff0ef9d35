"""Data sets of a few samples, and a note of which samples each rank drew.

Lengths are shortened where a data set tells its length, not where a loop ends. So samplers share
out a short epoch by their own rules, and the script's loops end by themselves.
"""

import contextlib
import functools
import inspect
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
    "SVHN": (32, 3, 10, 73257, 26032),
    "ImageNet": (256, 3, 1000, 1281167, 50000),
    "ImageFolder": (256, 3, 2, 2048, 512),
}
END = object()
_whole = 0  # while data sets tell their whole length
_open: list["Pass"] = []
_counts: Counter[str] = Counter()
_former: dict[str, "Pass"] = {}  # the training pass before, by the loader
_pending: list["Pass"] = []  # fetched since the last forward
_latest: list["Pass"] = []  # what the last forward saw


def shorter(length: int) -> int:
    """Return a length that divides by the number of ranks exactly if the given one does."""
    most = SAMPLES * state.world
    return length if length <= most or _whole else most - (-length % state.world)


@contextlib.contextmanager
def whole_lengths() -> Iterator[None]:
    global _whole
    _whole += 1
    try:
        yield
    finally:
        _whole -= 1


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
        self.about = {"begun": state.clock, "content": None, "length": None, **loader._about}
        self.key = self.about["key"]
        self.number = self.about["number"] = _counts[self.key]
        _counts[self.key] += 1
        self.mode: bool | None = None
        self.batches = 0
        self.trained = self.evaluated = self.through = self.capped = self.complete = False
        self.indices: list[int] = []
        self.base: list[int] = []
        self.drawn: Any = None
        if isinstance(loader.dataset, data.IterableDataset):
            return
        self.about["length"] = len(loader.dataset)
        if self.number == 0 and self.about["length"]:
            self.about["content"] = content(loader.dataset)

    def fetch(self, loader: Any, iterator: Any, index: Any) -> Any:
        """Return a batch. Workers would draw from seeds of their own, which follow from one."""
        seed = iterator._base_seed if self.about["workers"] else None
        before = marks()
        with randomness_kept() if seed is not None else contextlib.nullcontext():
            batch = iterator._dataset_fetcher.fetch(index)
            if self.batches < 3 and not (seed and loader.worker_init_fn):
                tell_draws("for their samples", before, seed)
        indices = index if isinstance(index, list | tuple) else [index]
        self.drawn = None  # what tells this batch from another one
        if not self.about["length"]:
            self.drawn = digest(batch)
        elif all(isinstance(item, int | np.integer) for item in indices):
            base = [base_index(loader.dataset, int(item)) for item in indices]
            self.indices += [int(item) for item in indices]
            self.base += base
            self.drawn = self.about["content"] and (*base, *self.about["content"])
        self.batches += 1
        if self not in _pending:
            _pending.append(self)
        return batch

    def finish(self) -> None:
        if self not in _open:
            return
        _open.remove(self)
        evaluates = not self.trained and (self.evaluated or self.mode is False)
        facts = self.about | {"evaluates": evaluates}
        record.tell("pass", **{**vars(self), **facts, "about": None})
        if evaluates and self.mode and (self.complete or self.capped):
            record.tell("evaluates in training mode", **facts)
        if not self.trained:
            return
        former, _former[self.key] = _former.get(self.key), self
        epoch = self.number + 1
        if self.mode is False:
            was = former is not None and former.mode
            kind = "trains in evaluation mode" if was else "always in evaluation mode"
            record.tell(kind, epoch=epoch, **facts)
        order = self.indices
        if former and len(order) > 3 and former.indices == order != sorted(order):
            record.tell("no set_epoch", former=epoch - 1, epoch=epoch, **facts)


def most_batches() -> int:
    return BATCH * state.world + 2


def base_index(dataset: Any, index: int) -> int:
    while isinstance(dataset, data.Subset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return index


def forward_begins(grads: bool, through: bool, mode: bool | None) -> bool:
    """Note what the batches fetched last are used for; return whether there were any."""
    if not _pending:
        return False
    _latest[:] = _pending
    _pending.clear()
    for item in _latest:
        item.evaluated = item.evaluated or not grads
        item.through = item.through or through
        item.mode = mode if item.mode is None else item.mode
    return True


def backward_begins() -> None:
    for item in _latest:
        if item.number >= 2 and not item.trained:
            record.leave("cut", message="the training was ended after two epochs")
        item.trained = True
        if item.drawn and item.number == 0:
            record.tell("equal samples", same=item.drawn, line=item.about["line"])


def _shorten(kind: Any) -> None:
    real = kind.__dict__.get("__len__")
    if real is not None and not hasattr(real, "_real"):
        length = functools.wraps(real)(lambda self: shorter(real(self)))
        length._real = real  # type: ignore[attr-defined]
        kind.__len__ = length
    for child in kind.__subclasses__():
        _shorten(child)


def _given(kind: Any, change: Any) -> None:
    """Let a function change the arguments of a class, by their names."""
    signature = inspect.signature(kind.__init__)

    def init(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
        bound = signature.bind(self, *args, **keywords)
        change(self, bound.arguments)
        real(*bound.args, **bound.kwargs)

    around(kind, name="__init__")(init)


def _samples(self: Any, given: dict[str, Any]) -> None:
    if isinstance(given.get("num_samples"), int):
        given["num_samples"] = shorter(given["num_samples"])


def _small_batch(self: Any, given: dict[str, Any]) -> None:
    if isinstance(size := given.get("batch_size", 1), int):
        given["batch_size"] = min(size, BATCH)


def _loader(self: Any, given: dict[str, Any]) -> None:
    sampler, whole = given.get("sampler"), None
    with whole_lengths(), contextlib.suppress(Exception):
        size = given.get("batch_size", 1)
        whole = len(sampler or given["dataset"]), size
    own: dict[str, Any] = {"key": " < ".join(record.frames()), "line": next(record.frames(), "")}
    drops = given.get("drop_last", False) or getattr(sampler, "drop_last", False)
    own |= {"workers": given.get("num_workers", 0), "whole": whole, "drop_last": drops}
    self.__dict__["_about"] = own | {"sampler": type(sampler).__name__}
    _small_batch(self, given)
    given.update(num_workers=0, pin_memory=False, persistent_workers=False)
    for name in ("prefetch_factor", "multiprocessing_context", "timeout", "pin_memory_device"):
        given.pop(name, None)


@around(data.DataLoader, name="__iter__")
def batches(real: Any, self: Any) -> Iterator[Any]:
    """Yield the batches of a loader, as its own iterator would."""
    iterator, item = real(self), Pass(self)
    _open.append(item)
    try:
        while item.batches < most_batches():
            try:
                batch = item.fetch(self, iterator, next(iterator._sampler_iter))
            except StopIteration:
                item.complete = True
                return
            yield batch
        item.capped = True
    finally:
        item.finish()


@around(data.DataLoader, name="__len__")
def number_of_batches(real: Any, self: Any) -> int:
    return min(real(self), most_batches())


@around(data, data.dataset)
def random_split(real: Any, *args: Any, **keywords: Any) -> Any:
    with whole_lengths():
        return real(*args, **keywords)


class NoWeights(dict):
    """Stands for weights that a script would download."""


def _no_weights(*args: Any, **keywords: Any) -> NoWeights:
    record.tell_once("left out", "pretrained weights (fresh ones instead)")
    return NoWeights()


def _stand_in(name: str, real: Any, size: int, channels: int, classes: int, *lengths: int) -> Any:
    """Return a data set of torchvision that draws images. A folder that exists is read."""
    signature = inspect.signature(real.__init__)
    shape = (size, size, 3) if channels == 3 else (size, size)

    class Drawn(real):
        class_to_idx = None  # not the property of some sets, which cannot be set

        def __init__(self, *args: Any, **keywords: Any) -> None:
            self.drawn = False
            if name == "ImageFolder":
                with contextlib.suppress(Exception):
                    return super().__init__(*args, **keywords)
            given = signature.bind(self, *args, **keywords).arguments
            given = {**given, **given.get("kwargs", {})}
            record.tell_once("left out", f"the data set {name} (drawn images instead)")
            if given.get("download"):
                record.tell("every rank downloads", same=(name, state.node), name=name)
            split = str(given.get("split", "train" if given.get("train", True) else "test"))
            if name == "ImageFolder" and "val" in str(given["root"]):
                split = "val"
            length = lengths[0 if split.startswith(("train", "extra")) else 1]
            self.drawn, self.root, self.split = True, given["root"], split
            self.train = split == "train"
            for key in ("transform", "target_transform", "transforms"):
                setattr(self, key, given.get(key))
            self.classes = [str(number) for number in range(classes)]
            self.class_to_idx = {key: number for number, key in enumerate(self.classes)}
            self.targets = self.labels = [i % classes for i in range(length)]
            self.samples = self.imgs = [(f"{i}.png", label) for i, label in enumerate(self.targets)]
            self.data = np.zeros((length if size < 99 else 64, *shape), dtype=np.uint8)
            drawn = np.random.RandomState(0).randint(0, 256, (64, *shape), dtype=np.uint8)
            self.data[:64] = drawn
            if channels == 1:
                self.data = torch.from_numpy(self.data)  # type: ignore[assignment]
                self.targets = torch.tensor(self.targets)  # type: ignore[assignment]

        def __len__(self) -> int:
            return len(self.targets) if self.drawn else super().__len__()

        def __getitem__(self, index: int) -> Any:
            if not self.drawn:
                return super().__getitem__(index)
            array = np.asarray(self.data[index % len(self.data)])
            image, target = Image.fromarray(array), int(self.targets[index])
            if self.transforms is not None:
                return self.transforms(image, target)
            image = self.transform(image) if self.transform else image
            return image, self.target_transform(target) if self.target_transform else target

        def __repr__(self) -> str:
            return f"{name} (drawn)"

    Drawn.__name__ = name
    return Drawn


def _subclasses(cls: Any, **keywords: Any) -> None:
    super(data.Dataset, cls).__init_subclass__(**keywords)
    _shorten(cls)


def _finish() -> None:
    for item in list(_open):
        item.finish()


data.Dataset.__init_subclass__ = classmethod(_subclasses)  # type: ignore[assignment]
_shorten(data.Dataset)
for _kind in (data.WeightedRandomSampler, data.RandomSampler):
    _given(_kind, _samples)
_given(data.BatchSampler, _small_batch)
_given(data.DataLoader, _loader)
record.at_the_end.append(_finish)
with contextlib.suppress(ImportError):
    import torchvision
    from PIL import Image

    for _name, _about in SETS.items():
        _real = getattr(torchvision.datasets, _name)
        _drawn = _stand_in(_name, _real, *_about)
        for _owner in (torchvision.datasets, inspect.getmodule(_real)):
            setattr(_owner, _name, _drawn)
    torchvision.models._api.load_state_dict_from_url = _no_weights
torch.hub.load_state_dict_from_url = _no_weights  # type: ignore[assignment]
