"""Passes over loaders: which samples each rank drew, and what it did with them."""

import contextlib
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import draws
import numpy as np
import record
import torch
import torch.utils.data as data
from devices import is_drawn
from lengths import BATCH, SAMPLES, whole_lengths
from record import replaces, state

COMPARED = 6  # samples whose content is compared
NO_WORKERS = {"num_workers": 0, "timeout": 0, "multiprocessing_context": None}
NO_WORKERS |= {"prefetch_factor": None, "persistent_workers": False, "pin_memory": False}
END = object()  # of a stream
latest: list["Pass"] = []  # what the last forward saw
_datasets: defaultdict[str, dict[int, Any]] = defaultdict(dict)  # by the lines of their loaders
_contents: dict[int, list[int] | None] = {}  # by the data set
_noisy: set[int] = set()  # data sets of random numbers
_counts: Counter[Any] = Counter()  # of passes, by the loader
_former: dict[Any, "Pass"] = {}  # the training pass before, by the loader
_open: list["Pass"] = []
_evaluated = Counter[str]()  # evaluations in evaluation mode


def content(dataset: Any) -> list[int] | None:
    """Return checksums of some samples under a fixed seed, or None if they differ at each look."""
    if id(dataset) not in _contents:
        looks: list[list[int]] = [[], []]
        # An index that it does not take ends the look.
        with draws.randomness_kept(), contextlib.suppress(Exception):
            for look in looks:
                for part in range(COMPARED):
                    index = part * (len(dataset) - 1) // (COMPARED - 1)
                    torch.random.default_generator.manual_seed(index)
                    random.seed(index)
                    np.random.seed(index)
                    sample = dataset[index]
                    look.append(draws.digest(sample))
                    if any(map(is_drawn, draws.tensors_of(sample))):
                        _noisy.add(id(dataset))
        _contents[id(dataset)] = looks[0] if looks[0] and looks[0] == looks[1] else None
    return _contents[id(dataset)]


def sample_mark(dataset: Any, index: int) -> tuple[Any, int]:
    """Return what tells a sample from others: a mark of the whole set, and the index in it."""
    while isinstance(dataset, data.Subset):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    seen = content(dataset)
    return seen and draws.digest(seen), index


class Pass:
    """One iteration over a loader: what was drawn, and what was done with it."""

    def __init__(self, loader: Any, seed: int) -> None:
        self.loader, self.facts, self.seed = loader, loader._facts, seed
        self.key, self.begun = self.facts["key"], state.clock
        self.number = -1  # follows with the first forward
        self.mode: bool | None = None  # of the model in that forward
        self.modes: set[bool | None] = set()  # of the models that it trains, in their forwards
        self.is_fresh = self.trained = self.evaluated = self.complete = self.divided = False
        self.count = self.fetched = 0
        self.drawn: Any = None  # what tells the last batch from another one
        self.is_stream = isinstance(loader.dataset, data.IterableDataset)
        self.length = 0 if self.is_stream else len(loader.dataset)
        self.content = content(loader.dataset) if self.length else None
        self.noise = id(loader.dataset) in _noisy
        self.indices: list[int] = []
        self.samples: list[Any] = []
        self.inputs: list[int] = []  # checksums of what went into forwards
        self.stream = iter(loader.dataset) if self.is_stream else None
        self.evaluations = _evaluated["all"]

    def _read(self, index: Any) -> Any:
        """Return the batch of an index, as the loader's own iterator would."""
        dataset, is_batch = self.loader.dataset, self.loader.batch_sampler is not None
        if self.stream is not None:
            items = list(itertools.islice(self.stream, len(index) if is_batch else 1))
            is_short = is_batch and self.loader.drop_last and len(items) < len(index)
            if not items or is_short:
                return END
            items = items if is_batch else items[0]
        elif not is_batch:
            items = dataset[index]
        elif getattr(dataset, "__getitems__", None):
            items = dataset.__getitems__(index)
        else:
            items = [dataset[number] for number in index]
        return self.loader.collate_fn(items)

    def fetch(self, index: Any) -> Any:
        """Return a batch. Workers would draw from seeds of their own, which follow from one."""
        workers, before = self.facts["workers"], draws.marks()
        with draws.randomness_kept() if workers else contextlib.nullcontext():
            batch = self._read(index)
            if not (workers and self.loader.worker_init_fn):
                draws.tell_draws("for their samples", before, self.seed if workers else None)
        indices = index if isinstance(index, list | tuple) else [index]
        self.drawn = None if self.length else draws.digest(batch)
        if self.length and all(isinstance(item, int | np.integer) for item in indices):
            marks = [sample_mark(self.loader.dataset, int(item)) for item in indices]
            self.drawn = self.content and (*marks, *self.content)
            self.indices += map(int, indices)
            self.samples += marks
        self.count += len(indices)
        self.fetched = len(indices)
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
        private = ("loader", "stream", "facts", "modes")
        facts = {name: value for name, value in vars(self).items() if name not in private}
        facts = {**self.facts, **facts, "use": use, "epoch": self.number + 1}
        record.tell("pass", **facts)
        if not self.trained:
            _evaluated["all"] += self.mode is False
            if self.mode and self.complete:
                record.tell("evaluates in training mode", **facts)
            if self.facts["left"] and self.complete:
                record.tell("leaves samples out", **facts)
            elif self.facts["pads"]:
                record.tell("padded evaluation", **facts)
            return
        former, order = _former.get(self.key), self.indices
        _former[self.key] = self
        if self.modes == {False}:
            # After an evaluation it was forgotten. Else it may be meant.
            forgotten = former and True in former.modes and self.evaluations > former.evaluations
            level = "WRONG" if forgotten else "WARN"
            record.tell("trains in evaluation mode", level=level, **facts)
        if former and len(order) > 3 and former.indices == order != sorted(order):
            record.tell("no set_epoch", **facts)


def forward_begins(grads: bool, mode: bool | None) -> bool:
    """Note what the batches fetched last are used for; return whether there were any."""
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


def is_under_way() -> bool:
    """Whether a loader has given a batch, and may give more."""
    return any(item.count for item in _open)


def note_inputs(tensors: list[torch.Tensor]) -> None:
    """Note what goes into a forward that is trained: it may be a part of what was fetched."""
    rows = [tensor.shape[0] for tensor in tensors if tensor.dim()]
    for item in latest if rows and is_under_way() else ():
        item.divided = item.divided or rows[0] < item.fetched
        item.inputs.append(draws.digest(tensors))


def backward_begins() -> None:
    for item in latest:
        if item.number >= 2 and not item.trained:
            record.leave("cut", message="the training was ended after two epochs")
        item.trained = True
        if item.drawn and item.number == 0:
            facts = {"level": "WARN", "what": "two ranks train on the same batch"}
            same = (item.drawn, item.inputs[-1:] if item.divided else [])
            record.tell("equal shares", same=same, line=item.facts["line"], **facts)


@replaces(data.DataLoader, name="__init__")
def loader(real: Any, self: Any, *args: Any, **keywords: Any) -> None:
    passed = record.by_name(real, self, *args, **keywords)
    dataset, sampler, size = passed["dataset"], passed.get("sampler"), passed.get("batch_size", 1)
    # A loader is known by its lines and, where a loop makes several, by the number of its data set.
    lines = list(record.frames())
    known = _datasets[" < ".join(lines)]
    known[id(dataset)] = dataset
    facts: dict[str, Any] = {"key": (*lines, list(known).index(id(dataset))), "line": lines[0]}
    facts |= {"workers": passed.get("num_workers", 0), "batches": None, "left": 0}
    facts["pads"] = type(sampler) is data.DistributedSampler and not sampler.drop_last
    if size and passed.get("batch_sampler") is None:
        passed["batch_size"] = min(size, BATCH)
        with whole_lengths, contextlib.suppress(Exception):  # a stream has no length
            whole, drops = len(sampler or dataset), passed.get("drop_last", False)
            facts["batches"] = whole // size if drops else -(-whole // size)
            facts |= {"whole": whole, "left": drops and whole % size}
    self._facts = facts
    real(**passed | {name: value for name, value in NO_WORKERS.items() if name in passed})


def _epoch(loader: Any) -> int:
    """Return the samples after which an endless loader begins again, or 0 if it has to stop."""
    if isinstance(loader.dataset, data.IterableDataset):
        return 0
    try:
        length = len(loader.sampler)
    except (TypeError, NotImplementedError):
        return SAMPLES * state.world
    return length if length <= SAMPLES * state.world + BATCH else 0


@replaces(data.DataLoader, name="__iter__")
def batches(real: Any, self: Any) -> Iterator[Any]:
    """Yield the batches of a loader, as its own iterator would."""
    # Its own iterator draws this number, from which the seeds of workers follow.
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
    epoch, most = _epoch(self), SAMPLES * state.world + BATCH
    item = Pass(self, seed)
    _open.append(item)
    try:
        for index in self.sampler if self.batch_sampler is None else self.batch_sampler:
            if item.count >= epoch > 0:  # an endless one
                item.complete = True
                _open.remove(item)
                item.finish()
                item = Pass(self, seed)
                _open.append(item)
            elif not epoch and item.count > most:
                what = "the end of an epoch: a loader was stopped after a while"
                record.tell("left out", what=what)
                break
            batch = item.fetch(index)
            if batch is END:
                break
            yield batch
        item.complete = True
    finally:
        _open.remove(item)
        item.finish()


def _finish() -> None:
    for item in _open:
        item.finish()


record.at_the_end.append(_finish)
