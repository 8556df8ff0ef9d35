"""Short data sets, and passes over loaders: what each rank drew, and what it did with it.

A length is shortened where a data set tells it, not where a loop ends. So samplers share out a
short epoch by their own rules, and the script's loops end by themselves.
"""

import contextlib
import functools
import itertools
import math
import random
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import record
import torch
import torch.utils.data as data
from record import replaces, state
from torch import Tensor
from torch.utils.data._utils import worker as workers
from torch.utils.data.dataloader import _BaseDataLoaderIter

EPOCHS = (4, 12)  # after which a run ends: with smaller numbers, and with the script's own
BATCHES = 4  # of each rank in an epoch, if the script has no smaller ones
COMPARED = 6  # samples of a data set whose content is compared
READ = 100  # batches of a stream that are counted after its end here
NO_WORKERS = {"num_workers": 0, "timeout": 0, "multiprocessing_context": None}
NO_WORKERS |= {"prefetch_factor": None, "persistent_workers": False, "pin_memory": False}
GENERATORS: dict[str, tuple[Any, Any, Any, str]] = {  # get and set a state, and who seeds
    "torch": (torch.get_rng_state, torch.set_rng_state, torch, "manual_seed"),
    "random": (random.getstate, random.setstate, random, "seed"),
    "numpy": (np.random.get_state, np.random.set_state, np.random, "seed"),
}
SEED = (torch.random.default_generator.manual_seed, random.seed, np.random.seed)  # not noted below
whole_lengths = record.Nested()  # while data sets tell their real lengths
at_batch: dict[str, int] = {}  # torch's random state when the script got its last batch
latest: list["Pass"] = []  # the passes whose batches the last forward saw
_open: list["Pass"] = []
_contents: dict[int, tuple[Any, list[int]]] = {}  # a data set and its content, by its id
_known: defaultdict[str, dict[Any, int]] = defaultdict(dict)  # numbers of loaders, by lines
_unused: Counter[str] = Counter()  # loaders made since one of these lines was read, by lines
seeds: dict[str, tuple[str, Any]] = {}  # the line that seeded each generator last, and the seed
imported: set[str] = set()  # generators that an import seeds, as in each process that is spawned
_counts: Counter[str] = Counter()  # number of passes, by the key of the loader
_epochs: Counter[str] = Counter()  # number of passes that trained, by the key of the loader
_former: dict[str, "Pass"] = {}  # the training pass before, by the key of the loader


def shorter(length: int) -> int:
    """Return a length that divides by the number of ranks exactly if the given one does."""
    most = state.samples * state.world
    if length <= most or whole_lengths.depth:
        return length
    short = most - (-length % state.world)
    state.changed["data"] = f"a data set's length {length} to {short}"
    return short


@replaces(data, data.dataset)
def random_split(real: Any, dataset: Any, lengths: Any, *args: Any, **keywords: Any) -> Any:
    """Split the whole set, so that each part has enough samples."""
    lengths, short = list(lengths), len(dataset)
    with whole_lengths:
        whole = len(dataset)
        if sum(lengths) == short and min(lengths) >= 0:  # parts of a short length
            lengths = [length * whole // short for length in lengths]
            lengths[0] += whole - sum(lengths)
        elif sum(lengths) == short:  # such as 55000 and what is left
            lengths[-1] += whole - short
        return real(dataset, lengths, *args, **keywords)


def _shorten(kind: Any) -> None:
    """Let the data sets of a class, and of those below it, tell short lengths."""
    if real := vars(kind).get("__len__"):
        kind.__len__ = functools.wraps(real)(lambda self: shorter(real(self)))
    for child in kind.__subclasses__():
        _shorten(child)


def _subclasses(cls: Any, **keywords: Any) -> None:
    super(data.Dataset, cls).__init_subclass__(**keywords)
    _shorten(cls)


data.Dataset.__init_subclass__ = classmethod(_subclasses)  # type: ignore[assignment]
_shorten(data.Dataset)


class Held(data.Dataset[Any]):
    """A list, or a data set of another package, with a short length."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return len(self.held)


@replaces(data.DistributedSampler, name="__init__")
def shared(real: Any, self: Any, dataset: Any, *args: Any, **keywords: Any) -> None:
    real(self, dataset if isinstance(dataset, data.Dataset) else Held(dataset), *args, **keywords)


@replaces(data.DistributedSampler)
def set_epoch(real: Any, self: Any, epoch: int) -> None:
    self._epochs_set = getattr(self, "_epochs_set", 0) + 1
    real(self, epoch)


def digest(value: Any) -> int:
    """Return a checksum of what data sets return. It is 0 for an unknown type."""
    if isinstance(value, Tensor):
        value = value.detach().float().numpy()
    is_known = isinstance(value, dict | list | tuple) or hasattr(value, "tobytes")
    if hasattr(value, "__dict__") and not is_known:
        value = vars(value)
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, list | tuple):
        # Python's generator has 625 integers. As one text they take a tenth of the time.
        are_integers = all(type(item) is int for item in value)
        value = str(value if are_integers else [digest(item) for item in value])
    if hasattr(value, "tobytes"):
        return zlib.crc32(value.tobytes())
    plain = isinstance(value, int | float | str | bytes | None)
    return zlib.crc32(repr(value).encode()) if plain else 0


def marks() -> dict[str, int]:
    """Return a checksum of the state of each random generator."""
    return {name: digest(get()) for name, (get, *_) in GENERATORS.items()}


def _note_seed(name: str, real: Any, *args: Any, **keywords: Any) -> Any:
    if line := next(record.frames(), ""):
        seeds[name] = line, args[0] if args else None
        record.tell("seeded")
    if any(record.is_import(frame) for frame in record.calls()):
        imported.add(name)
    at_batch.clear()
    for item in _open:  # a data set that seeds draws nothing from the state before
        item.before.pop(name, None)
    return real(*args, **keywords)


for _name, (*_, _owner, _seeding) in GENERATORS.items():
    replaces(_owner, name=_seeding)(functools.partial(_note_seed, _name))


def tell_draws(where: str, before: dict[str, int], key: str = "", worker: Any = None) -> None:
    """Tell from which states numbers were drawn since: equal states draw equal numbers.

    ``worker`` is what ``in_worker`` returns, if workers draw the samples.
    """
    states, noted = worker or (before, seeds)
    for name, after in marks().items():
        if after != before.get(name, after):
            line, own = noted.get(name, ("", None))
            facts = {"where": where, "name": name, "drawn_by": key}
            facts |= {"line": line} if line else {}
            record.tell("equal random numbers", same=(where, key, name, states[name]), **facts)
            if own is not None:  # a rank may have drawn more, but not each of many ranks
                facts["where"] += f", or would with more ranks: each is seeded with {own}"
                record.tell("equal random numbers", same=(where, key, name, "seed", own), **facts)


@contextlib.contextmanager
def as_worker(loader: Any, base_seed: int) -> Iterator[None]:
    """Let the script see itself in the only worker of a loader."""
    facts = {"id": 0, "num_workers": 1, "seed": base_seed, "dataset": loader.dataset}
    workers._worker_info = workers.WorkerInfo(**facts)
    try:
        yield
    finally:
        workers._worker_info = None


def in_worker(loader: Any, base_seed: int) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the states and the seeds of the generators in a loader's first worker."""
    kept, init = dict(seeds), loader._worker_init or int
    seeds.clear()
    if "torch" in kept:  # which gives workers their seeds
        seeds.update(dict.fromkeys(GENERATORS, kept["torch"]))
    with randomness_kept(), as_worker(loader, base_seed):
        for seed in SEED:
            seed(base_seed % 2**32)
        with contextlib.suppress(Exception):  # it may need more of a worker
            init(0)
        found = marks(), dict(seeds)
    seeds.clear()
    seeds.update(kept)
    return found


@contextlib.contextmanager
def randomness_kept() -> Iterator[None]:
    """Give the generators their states back at the end of a block."""
    states = [(put, get()) for get, put, *_ in GENERATORS.values()]
    try:
        yield
    finally:
        for put, kept in states:
            put(kept)


def content(dataset: Any) -> list[int]:
    """Return checksums of some samples under a fixed seed, or nothing if they differ each time."""
    held, found = _contents.get(id(dataset), (None, []))
    if held is None or held() is not dataset:
        looks: list[list[int]] = [[], []]
        # A data set that refuses an index ends the look.
        with randomness_kept(), contextlib.suppress(Exception):
            for look in looks:
                for part in range(COMPARED):
                    index = part * (len(dataset) - 1) // (COMPARED - 1)
                    for seed in SEED:
                        seed(0)
                    look.append(digest(dataset[index]))
        found = looks[0] if looks[0] == looks[1] else []
        _contents[id(dataset)] = _reference(dataset), found
    return found


def _reference(dataset: Any) -> Any:
    """Return what gives a data set while the script holds it: it may open its files only once."""
    try:
        return weakref.ref(dataset)
    except TypeError:  # a list has none
        return lambda: dataset


def origin(dataset: Any, index: int) -> tuple[Any, int]:
    """Return the whole set of which a set is a part, and the index of a sample in it."""
    while isinstance(dataset, data.Subset):
        index = int(dataset.indices[index])
        dataset = dataset.dataset
    return dataset, index


def sample_mark(dataset: Any, index: int) -> tuple[int, int]:
    """Return what tells a sample from others: a mark of the whole set, and the index in it."""
    whole, at = origin(dataset, index)
    return digest(content(whole) or _lists(whole)), at


def _lists(dataset: Any) -> list[int]:
    """Return checksums of the lists in a data set, such as paths, where its samples differ."""
    lists = [held for held in getattr(dataset, "__dict__", {}).values() if type(held) is list]
    return [digest(held) for held in lists if held and isinstance(held[0], str | dict | tuple)]


class Pass:
    """One iteration over a loader: what was drawn, and what was done with it."""

    def __init__(self, loader: Any) -> None:
        self.facts, self.dataset = loader._facts, loader.dataset
        self.key, self.begun = self.facts["key"], state.clock
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self.epoch = getattr(sampler, "epoch", 0)
        self.sampler = sampler
        self.epochs_set = 0  # how often the sampler's epoch was set before the end of this pass
        self.number = -1  # of this pass over the loader; the first forward sets it
        self.mode: bool | None = None  # whether the first model is in training mode
        self.is_fresh = self.trained = self.evaluated = self.complete = self.is_apart = False
        self.reads = self.count = self.fetched = 0  # batches, samples, samples of the last batch
        self.is_stream = isinstance(self.dataset, data.IterableDataset)
        is_sized = hasattr(self.dataset, "__len__") and not self.is_stream
        self.length = len(self.dataset) if is_sized else 0
        self.content = content(self.dataset) if self.length else []
        if len(set(self.content)) == 1 < self.length:
            self.length = 0  # it draws a sample, whatever the index is
        whole = origin(self.dataset, 0)[0] if self.length else []
        self.is_known = bool(self.length and (content(whole) or _lists(whole)))
        self.whole_length = len(whole) if self.length else 0
        self.indices: list[int] = []
        self.samples: list[Any] = []
        self.batches = math.inf  # of a stream, or of a sampler without a length
        with contextlib.suppress(Exception):
            self.batches = len(loader) if self.length else math.inf
        self.before: dict[str, int] = {}  # states of the generators before a batch was read
        self.rows = 0  # rows of the last forward: a script may take a part of a batch
        self.tested: dict[int, Any] = {}  # what is in each model that was evaluated, by its id

    def draw(self, index: Any) -> None:
        """Note the index of a batch, or of a sample where there are no batches."""
        indices = index if isinstance(index, list | tuple) else [index]
        if self.length and all(isinstance(item, int | np.integer) for item in indices):
            self.indices += map(int, indices)
            self.samples += [sample_mark(self.dataset, int(item)) for item in indices]
        elif self.length:  # such as several samples of one speaker
            self.samples += [(0, str(item)) for item in indices]
        self.reads += 1
        self.count += len(indices)
        self.fetched = len(indices)

    def finish(self) -> None:
        """Tell what was drawn, and what is wrong with it that this rank alone can see."""
        _open.remove(self)
        self.epochs_set = getattr(self.sampler, "_epochs_set", 0)
        self.dataset = self.sampler = None  # which the script may let go
        if self.number < 0:  # the script has only looked at the data
            return
        self.complete = self.complete or self.reads >= self.batches
        # A whole pass without a backward evaluates, also with gradients, which may be forces.
        self.evaluated = self.evaluated or (self.complete and not self.trained)
        if not self.trained and not self.evaluated and self.mode is not False:
            _counts[self.key] -= 1  # it has only looked at the model
            return
        names = ["begun", "number", "complete", "length", "whole_length", "is_known", "is_apart"]
        names += ["content", "indices", "samples"]
        facts = self.facts | {name: getattr(self, name) for name in names}
        facts["tested"] = list(self.tested.values())
        facts |= {"use": "training" if self.trained else "evaluation"}
        facts["epoch"] = _epochs[self.key] if self.trained else self.number + 1
        facts["divided"] = 0 < self.rows < self.fetched
        record.tell("pass", **facts)
        if not self.trained:
            # Over training data, it may compute BatchNorm's statistics again, on purpose.
            if self.mode and self.complete and not _epochs[self.key]:
                record.tell("evaluates in training mode", **facts)
            return
        former, order = _former.get(self.key), self.indices
        _former[self.key] = self
        if not former or former.epoch != self.epoch:  # a few samples have equal orders by chance
            return
        if former.epochs_set == 0 < self.epochs_set:  # a first set_epoch(0), which is right
            return
        if len(order) > 2 and former.indices[: len(order)] == order:
            facts["what"] = f"epoch {facts['epoch']} had the order of the one before: "
            facts["what"] += "set_epoch was not called, or too late, or with the same number"
            is_sorted = order == sorted(order) and len(order) > 5  # and not by chance
            record.tell("never shuffled" if is_sorted else "no set_epoch", **facts)


def forward_begins(grads: bool, mode: bool | None) -> bool:
    """Note what the batches read last are used for; return whether there were any."""
    fresh = [item for item in _open if item.is_fresh]
    latest[:] = fresh or latest
    for item in fresh:
        if item.number < 0:
            item.number = _counts[item.key]
            _counts[item.key] += 1
        item.mode = mode if item.mode is None else item.mode
        item.evaluated = item.evaluated or not grads
        item.is_fresh = False
    return bool(fresh)


def backward_begins(is_apart: bool) -> None:
    """Note that batches train a model, perhaps one beside the wrapped models."""
    for item in latest if state.groups else ():  # else this trains before there are ranks
        item.is_apart = is_apart
        if not item.trained:
            most = EPOCHS[not state.is_small]
            if _epochs[item.key] == most:
                what = f"what follows after {most} epochs: the check ended there"
                record.leave("cut", message=what)
            _epochs[item.key] += 1
        item.trained = True


def _share(sampler: Any, dataset: Any) -> int:
    """Return the number of samples in full, which a DistributedSampler computes when it is made."""
    if not isinstance(sampler, data.DistributedSampler):
        return len(sampler or dataset)
    whole = len(sampler.dataset)  # type: ignore[arg-type]
    return whole // sampler.num_replicas if sampler.drop_last else -(-whole // sampler.num_replicas)


def _batch_size(size: int, samples: int) -> int:
    """Return a size that leaves no last batch of one sample, which BatchNorm refuses."""
    sizes = (size, 3, 5, 7) if size > 1 else (size,)
    return next((each for each in sizes if samples % each != 1), size)


@replaces(data.DataLoader, name="__init__")
def loader(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    passed = record.by_name(real, self, *args, **keywords)
    dataset = passed["dataset"]
    sampler = passed.get("sampler")
    size = passed.get("batch_size", 1) if passed.get("batch_sampler") is None else None
    lines = list(record.frames())
    whole = share = short = 0
    with contextlib.suppress(Exception):  # a stream has no length
        short = len(sampler or dataset)
        with whole_lengths:
            whole = len(dataset)
            share = _share(sampler, dataset)
    # A loader is known by its line, that of the call around it and, where these make several, by
    # its data set or turn. Further out, ranks may come by other lines.
    made_at = " < ".join(lines[:2])
    known = _known[made_at]
    told = [value for value in getattr(dataset, "__dict__", {}).values() if type(value) is str]
    mark = (whole, _unused[made_at], *told)
    known.setdefault(mark, len(known))
    _unused[made_at] += 1
    key = f"{made_at} {known[mark]}"
    if size:
        bounded = min(size, state.samples // BATCHES)
        has_rest = not passed.get("drop_last") and share % size != 1
        passed["batch_size"] = _batch_size(bounded, short) if has_rest else bounded
        if passed["batch_size"] != size:
            state.changed["batch"] = f"a loader's batch {size} to {passed['batch_size']}"
        share -= share % size if passed.get("drop_last") else 0
    self._facts = facts = {
        "key": key,
        "made_at": made_at,
        "line": lines[0] if lines else "",
        "size": size or state.samples // BATCHES,
    }
    facts |= {"whole": whole, "used": share, "workers": passed.get("num_workers", 0)}
    self._worker_init = passed.get("worker_init_fn")
    facts["batches"] = -(-share // size) if size and whole else None
    real(**passed | {name: value for name, value in NO_WORKERS.items() if name in passed})


@replaces(_BaseDataLoaderIter, name="_next_index")
def next_index(real: Any, self: Any) -> Any:
    index = real(self)
    self._pass.draw(index)
    self._pass.before = marks()  # after a sampler has drawn
    return index


@replaces(data.DataLoader, name="__iter__")
def begin(real: Any, self: Any) -> Iterator[Any]:
    """Begin a pass over a loader at once, as the real one does."""
    iterator = real(self)
    iterator._pass = Pass(self)
    _unused[self._facts["made_at"]] = 0
    return batches(self, iterator)


def batches(self: Any, iterator: Any) -> Iterator[Any]:
    """Yield the batches of a loader, and note what was drawn."""
    item = iterator._pass
    facts = item.facts
    worker = in_worker(self, iterator._base_seed) if facts["workers"] else None
    _open.append(item)
    try:
        while True:
            is_long = item.is_stream and item.count > state.samples * state.world
            if is_long and state.is_small:
                record.tell("left out", what="the end of a stream: it was stopped after a while")
                with randomness_kept():  # count what is left, which may differ between the ranks
                    is_over = sum(1 for _ in itertools.islice(iterator, READ)) < READ
                item.facts = facts | {"batches": item.reads - 1 if is_over else None}
                break
            # Workers would draw from seeds of their own, which follow from the loader's one.
            with contextlib.ExitStack() as blocks:
                if facts["workers"]:
                    blocks.enter_context(randomness_kept())
                    blocks.enter_context(as_worker(self, iterator._base_seed))
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                tell_draws("for their samples", item.before, item.key, worker)
            item.is_fresh = True
            at_batch["torch"] = marks()["torch"]
            yield batch
        item.complete = True
    finally:
        item.finish()


def _finish() -> None:
    for item in list(_open):
        item.finish()


record.at_the_end.append(_finish)
