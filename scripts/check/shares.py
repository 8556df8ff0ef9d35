"""Data sets of a few samples, and a note of which samples each rank drew.

Lengths are shortened where a data set tells its length, not where a loop ends. So samplers share
out a short epoch by their own rules, and the script's loops end by themselves.
"""

import contextlib
import functools
import inspect
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import record
import torch
import torch.utils.data as data
from record import state
from torch.utils.data import _utils
from torch.utils.data import dataloader as loaders

BATCH = 4
SAMPLES = 15  # of each rank in an epoch: three batches of 4 and one of 3
COMPARED = 6  # samples whose content is compared
SETS = {  # torchvision's: size, channels, classes, training and test samples
    "MNIST FashionMNIST KMNIST": (28, 1, 10, 60000, 10000),
    "EMNIST": (28, 1, 10, 112800, 18800),
    "CIFAR10": (32, 3, 10, 50000, 10000),
    "CIFAR100": (32, 3, 100, 50000, 10000),
    "SVHN": (32, 3, 10, 73257, 26032),
    "STL10": (96, 3, 10, 5000, 8000),
    "ImageNet": (256, 3, 1000, 1281167, 50000),
    "ImageFolder": (256, 3, 2, 2048, 512),
    "Flowers102 OxfordIIITPet Food101 StanfordCars": (256, 3, 37, 3680, 3669),
    "EuroSAT Caltech101": (64, 3, 10, 27000, 27000),
}
_whole = 0  # while data sets tell their whole length
_passes: list["Pass"] = []
_counts: dict[str, int] = {}
pending: list["Pass"] = []  # fetched since the last forward
latest: list["Pass"] = []  # what the last forward saw


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


class Randomness:
    """The states of the generators of torch, Python and NumPy."""

    def __init__(self) -> None:
        self.states: Any = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore(self) -> None:
        setters: Any = torch.set_rng_state, random.setstate, np.random.set_state
        for restore, own in zip(setters, self.states, strict=True):
            restore(own)

    def used(self) -> dict[str, int]:
        """Return the generators that drew numbers since, with a mark of where they began."""
        marks = [
            [digest(own) for own in (states[0], states[1], [*states[2][2:], states[2][1]])]
            for states in (self.states, Randomness().states)
        ]
        pairs = zip(("torch", "random", "numpy"), *marks, strict=True)
        return {name: first for name, first, last in pairs if first != last}


def seed(number: int) -> None:
    torch.random.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def content(dataset: Any, length: int) -> list[int] | None:
    """Return checksums of some samples under a fixed seed, or None if they differ at each look."""
    before = Randomness()
    looks: list[list[int]] = [[], []]
    try:
        for look in looks:
            for part in range(COMPARED):
                index = part * (length - 1) // (COMPARED - 1)
                seed(index)
                look.append(digest(dataset[index]))
    except Exception:  # an index that this data set does not take
        return None
    finally:
        before.restore()
    return looks[0] if looks[0] == looks[1] else None


class Pass:
    """One iteration over a loader: what was drawn, and what was done with it."""

    def __init__(self, iterator: Any, loader: Any) -> None:
        self.loader, self.about = loader, loader.__dict__["_about"]
        self.random, self.info = None, None
        key, length = self.about["key"], None
        self.number = _counts[key] = _counts.get(key, -1) + 1
        self.is_map = loader._dataset_kind == loaders._DatasetKind.Map
        self.batches = self.trained = self.evaluated = self.through = 0
        self.capped = False
        self.mode, self.begun = None, state.clock
        self.indices: list[int] = []
        self.base: list[int] = []
        self.digests: list[int] = []
        self.draws: list[dict[str, int]] = []
        self.content = None
        if self.is_map:
            length = len(loader.dataset)
            if self.number == 0 and length > 0:
                self.content = content(loader.dataset, length)
        self.length = length
        if self.about["workers"]:  # whose random numbers are their own
            first = iterator._base_seed
            info = {"id": 0, "num_workers": 1, "seed": first, "dataset": loader.dataset}
            self.info = _utils.worker.WorkerInfo(**info)
            with self.worker():
                seed(first)
                if loader.worker_init_fn:
                    loader.worker_init_fn(0)
        _passes.append(self)

    @contextlib.contextmanager
    def worker(self) -> Iterator[None]:
        """Be a worker of the loader, with random numbers of its own, if the script wants one."""
        if self.info is None:
            yield
            return
        before = Randomness()
        if self.random is not None:
            self.random.restore()
        _utils.worker._worker_info = self.info
        try:
            yield
        finally:
            _utils.worker._worker_info = None
            self.random = Randomness()  # type: ignore[assignment]
            before.restore()

    def next_batch(self, iterator: Any) -> Any:
        if self.batches >= most_batches():
            self.capped = True
            raise StopIteration
        index = iterator._next_index()
        with self.worker():
            before = Randomness()
            batch = iterator._dataset_fetcher.fetch(index)
            draws = before.used()
        indices = index if isinstance(index, list | tuple) else [index]
        if self.is_map and all(isinstance(item, int | np.integer) for item in indices):
            self.indices += [int(item) for item in indices]
            self.base += [base_index(self.loader.dataset, int(item)) for item in indices]
        if self.batches < 3:
            self.digests.append(digest(batch))
            self.draws.append(draws)
        self.batches += 1
        if self not in pending:
            pending.append(self)
        return batch

    def finish(self, complete: bool = False) -> None:
        if self in _passes:
            _passes.remove(self)
            told = vars(self).items()
            facts = {k: v for k, v in told if k not in ("loader", "about", "random", "info")}
            complete = complete and not self.capped
            record.emit("pass", **{**facts, **self.about, "complete": complete})


def most_batches() -> int:
    return BATCH * state.world + 2


def base_index(dataset: Any, index: int) -> int:
    while isinstance(dataset, data.Subset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return index


def forward_begins(grads: bool, through: bool, mode: bool | None) -> bool:
    """Note what the batches fetched last are used for; return whether there were any."""
    if pending:
        latest[:] = pending
        pending.clear()
        for item in latest:
            item.evaluated += not grads
            item.through += through
            item.mode = mode if item.mode is None else item.mode  # type: ignore[assignment]
        return True
    return False


def backward_begins() -> None:
    for item in latest:
        item.trained += 1
        if item.number >= 2 and item.trained == 1:
            record.leave("cut", reason="the training was ended after two epochs")


def _wrap_length(kind: type) -> None:
    real = kind.__dict__.get("__len__")
    if real is not None and not hasattr(real, "_real"):
        length = functools.wraps(real)(lambda self: shorter(real(self)))
        length._real = real  # type: ignore[attr-defined]
        kind.__len__ = length  # type: ignore[attr-defined]


def _wrap_init(kind: Any, change: Any) -> None:
    real, signature = kind.__init__, inspect.signature(kind.__init__)

    @functools.wraps(real)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        bound = signature.bind(self, *args, **keywords)
        change(self, bound.arguments)
        real(*bound.args, **bound.kwargs)

    kind.__init__ = init


def _all_subclasses(kind: Any) -> Iterator[Any]:
    for child in kind.__subclasses__():
        yield child
        yield from _all_subclasses(child)


def _loader_arguments(self: Any, given: dict[str, Any]) -> None:
    sampler, size, whole = given.get("sampler"), given.get("batch_size", 1), None
    with whole_lengths(), contextlib.suppress(Exception):
        whole = len(sampler or given["dataset"]), size
    own: dict[str, Any] = {"key": " < ".join(record.frames()), "line": record.line()}
    self.__dict__["_about"] = own
    own |= {"workers": given.get("num_workers", 0), "whole": whole}
    own["sampler"] = type(sampler).__name__
    own["drop_last"] = given.get("drop_last", False) or getattr(sampler, "drop_last", False)
    given["batch_size"] = min(size, BATCH) if isinstance(size, int) else size
    given.update(num_workers=0, pin_memory=False, persistent_workers=False)
    for name in ("prefetch_factor", "multiprocessing_context", "timeout", "pin_memory_device"):
        given.pop(name, None)


def install() -> None:
    def init_subclass(cls: Any, **keywords: Any) -> None:
        super(data.Dataset, cls).__init_subclass__(**keywords)
        _wrap_length(cls)

    data.Dataset.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    _install_stand_ins()
    for kind in _all_subclasses(data.Dataset):
        _wrap_length(kind)
    split = data.random_split

    def random_split(*args: Any, **keywords: Any) -> Any:
        with whole_lengths():
            return split(*args, **keywords)

    data.random_split = data.dataset.random_split = random_split  # type: ignore[assignment]

    def bound(name: str, change: Any) -> Any:
        def changed(self: Any, given: dict[str, Any]) -> None:
            if isinstance(given.get(name), int):
                given[name] = change(given[name])

        return changed

    for sampler in (data.WeightedRandomSampler, data.RandomSampler):
        _wrap_init(sampler, bound("num_samples", shorter))
    _wrap_init(data.BatchSampler, bound("batch_size", lambda size: min(size, BATCH)))
    _wrap_init(data.DataLoader, _loader_arguments)
    length = data.DataLoader.__len__
    data.DataLoader.__len__ = lambda self: min(length(self), most_batches())  # type: ignore
    one = loaders._SingleProcessDataLoaderIter
    begin, following = one.__init__, one.__next__

    def begun(self: Any, loader: Any) -> None:
        begin(self, loader)
        self._pass = Pass(self, loader)

    def next_batch(self: Any) -> Any:
        try:
            return following(self)
        except StopIteration:
            self._pass.finish(complete=True)
            raise

    one.__init__, one.__next__ = begun, next_batch  # type: ignore[method-assign,assignment]
    one._next_data = lambda self: self._pass.next_batch(self)  # type: ignore
    set_epoch = data.DistributedSampler.set_epoch

    def noted(self: Any, epoch: int) -> None:
        record.emit("set_epoch")
        set_epoch(self, epoch)

    data.DistributedSampler.set_epoch = noted  # type: ignore[method-assign]

    def finish() -> None:
        for item in list(_passes):
            item.finish()

    state.at_the_end = finish


def _install_stand_ins() -> None:
    try:
        import torchvision
    except ImportError:
        return
    for names, about in SETS.items():
        for name in names.split():
            if real := getattr(torchvision.datasets, name, None):
                drawn = _stand_in(name, real, *about)
                setattr(torchvision.datasets, name, drawn)
                setattr(inspect.getmodule(real), name, drawn)
    torchvision.models._api.load_state_dict_from_url = _no_weights
    torch.hub.load_state_dict_from_url = _no_weights


def _stand_in(name: str, real: Any, size: int, channels: int, *lengths: int) -> Any:
    from PIL import Image

    signature, classes = inspect.signature(real.__init__), lengths[0]
    shape = (size, size, 3) if channels == 3 else (size, size)

    def init(self: Any, *args: Any, **keywords: Any) -> None:
        self.drawn = name != "ImageFolder"
        if not self.drawn:
            with contextlib.suppress(Exception):
                return real.__init__(self, *args, **keywords)
        given = signature.bind(self, *args, **keywords).arguments
        given = {**given, **given.get("kwargs", {})}
        record.left_out(f"the data set {name} (drawn images instead)")
        if given.get("download") and not state.is_parent:
            record.emit("download", name=name)
        split = str(given.get("split", "train" if given.get("train", True) else "test"))
        if "val" in str(given["root"]) and not self.drawn:
            split = "val"
        length = lengths[1 if split.startswith(("train", "extra", "unlab")) else 2]
        self.drawn, self.root, self.split, self.train = True, given["root"], split, split == "train"
        for key in ("transform", "target_transform", "transforms"):
            setattr(self, key, given.get(key))
        self.classes = [str(number) for number in range(classes)]
        self.targets = self.labels = [i % classes for i in range(length)]
        self.samples = self.imgs = [(f"{i}.png", label) for i, label in enumerate(self.targets)]
        self.data = np.zeros((length if size < 99 else 64, *shape), dtype=np.uint8)
        drawn = np.random.RandomState(0).randint(0, 256, (64, *shape), dtype=np.uint8)
        self.data[:64] = drawn
        if channels == 1:
            self.data, self.targets = torch.from_numpy(self.data), torch.tensor(self.targets)

    def length(self: Any) -> int:
        return len(self.targets) if self.drawn else real.__len__(self)

    def item(self: Any, index: int) -> Any:
        if not self.drawn:
            return real.__getitem__(self, index)
        array = np.asarray(self.data[index % len(self.data)])
        image, target = Image.fromarray(array), int(self.targets[index])
        if self.transforms is not None:
            return self.transforms(image, target)
        image = self.transform(image) if self.transform else image
        return image, self.target_transform(target) if self.target_transform else target

    by_name = property(lambda self: {name: number for number, name in enumerate(self.classes)})
    body = {"__init__": init, "__len__": length, "__getitem__": item, "__module__": real.__module__}
    if name != "ImageFolder":
        body["class_to_idx"] = by_name
    return type(name, (real,), {**body, "__repr__": lambda self: f"{name} (drawn)"})


class NoWeights(dict):
    """Stands for weights that a script would download."""


def _no_weights(*args: Any, **keywords: Any) -> NoWeights:
    record.left_out("pretrained weights (fresh ones instead)")
    return NoWeights()
