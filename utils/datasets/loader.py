"""Data sets as the scripts read them, and the loader that fetches their batches."""

import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from utils import distributed, signals
from utils.datasets.sources import DataError
from utils.errors import UsageError, describe

COMPARED_SAMPLES = 32  # of each set, between ranks, since each may take a file to be read
ROOM_ON_DEVICE = 10  # times the size of a set has to be free on a GPU that keeps it unasked
BATCH_TIMEOUT = 15.0  # seconds that a loader waits for a batch before it looks for a stop signal
TIMED_OUT = "DataLoader timed out"  # with which PyTorch's error then begins, that has no type
FIRST_LINE, NEXT_LINES = 60.0, 300.0  # seconds without a batch until a line, and between lines
LONGEST_WAIT = 600.0  # seconds, as --timeout's default


class ImageSet(TensorDataset):
    """Images [N, ...] with their labels [N, ...], both in memory, fetched by the batch.

    Images uint8 [N, H, W] or [N, C, H, W] are normalised on the device. Labels are classes, int64
    [N], or the numbers of a regression, float.

    If a data set has ``__getitems__``, ``DataLoader`` calls it with the indices of a whole batch.
    That is one indexing operation instead of a Python call for each image.

    Args:
        images, labels: tensors, or what ``torch.as_tensor`` takes, of one length.
        mean, std: of the training pixels, scaled to 0..1: a number, or one for each channel.
    """

    def __init__(self, images: Any, labels: Any, mean: Any = 0.0, std: Any = 1.0) -> None:
        super().__init__(torch.as_tensor(images), torch.as_tensor(labels))
        self.images, self.labels = self.tensors
        self.mean, self.std = mean, std

    def to(self, device: torch.device) -> "ImageSet":
        """Return the whole set on ``device``."""
        return ImageSet(self.images.to(device), self.labels.to(device), self.mean, self.std)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        # From pinned memory a GPU fetches the index by itself, and the host need not wait for it.
        index = torch.tensor(indices, pin_memory=self.images.is_cuda)
        index = index.to(self.images.device, non_blocking=True)
        # On a CPU this copies whole images. ``self.images[index]`` would go byte by byte.
        return self.images.index_select(0, index), self.labels.index_select(0, index)


class SampleSet(Dataset):
    """Any map-style data set of PyTorch, read sample by sample.

    What its transforms draw from torch, numpy and random depends only on the seed, the sample and
    its position in the training. So it is the same with any number of processes and loader workers,
    and in a resumed run. The seed is that of ``torch.manual_seed``, which was called before.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.seed = dataset, torch.initial_seed()
        self.collate = attribute_of(dataset, "collate_fn", _collate)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[int | tuple[int, int]]) -> Any:
        """Return a batch of samples, as the data set's own ``collate_fn`` or PyTorch's makes it.

        Args:
            keys: indices, or pairs (index, position in the training), as ``EpochSampler`` yields
                them. Without a position a sample is the same each time.

        Raises:
            DataError: PyTorch cannot put the samples into a batch.
        """
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        samples = []
        for key in keys:
            index, position = key if isinstance(key, tuple) else (key, None)
            seed = zlib.crc32(f"{self.seed}/{index}/{position}".encode())
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            samples.append(self.dataset[index])
        batch = self.collate(samples)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        return batch


def attribute_of(dataset: Any, name: str, default: Any) -> Any:
    """Return what a data set calls ``name``, also through a ``Subset`` of it, or the default."""
    while not hasattr(dataset, name) and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return getattr(dataset, name, default)


def _collate(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"the samples of --dataset make no batch ({str(error).splitlines()[0]}): let a"
            " transform make them tensors of one shape, or give the data set a collate_fn"
        ) from None


def place(sets: Any, device: torch.device, on_device: bool | None) -> list[Any]:
    """Return what ``load_dataset`` returned as an ``ImageSet`` or a ``SampleSet`` each.

    Args:
        sets: two data sets, to train and to test.
        device: of this process.
        on_device: whether to keep the sets there. None: if they are small, on CUDA.

    Raises:
        DataError: anything else than two map-style data sets.
        UsageError: the set to keep on the device is no ``ImageSet``.
    """
    both = list(sets) if isinstance(sets, tuple | list) else [sets]
    if [_is_map_style(each) for each in both] != [True, True]:
        raise DataError(
            f"--dataset returned {', '.join(type(x).__name__ for x in both)}: return two map-style"
            " Datasets (docs/recipes.md shows how to train an IterableDataset)"
        )
    if not all(map(len, both)):
        raise DataError("the training set or the test set is empty")
    if not all(isinstance(each, ImageSet) for each in both):
        if on_device:
            raise UsageError("--data-on-device needs the tensors of an ImageSet: drop it")
        return [each if isinstance(each, ImageSet) else SampleSet(each) for each in both]
    if on_device is None and device.type == "cuda":
        size = sum(part.nbytes for each in both for part in each.tensors)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / torch.cuda.device_count()
        on_device = torch.cuda.mem_get_info(device)[0] > ROOM_ON_DEVICE * size * max(1, ranks)
    return [each.to(device) for each in both] if on_device else both


def _is_map_style(dataset: Any) -> bool:
    """Return whether it has samples by index. Those of Hugging Face are no Datasets of PyTorch."""
    is_data = not isinstance(dataset, IterableDataset | Tensor | np.ndarray | tuple | dict | str)
    return is_data and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def collate(batch: Any) -> Any:
    """Return a batch, which the data set has made of its samples already.

    A loader worker puts it into shared memory here. Otherwise PyTorch does that in another thread
    of the worker. An error in that thread reaches nobody, and the training process waits for the
    batch for ever.
    """
    return batch if get_worker_info() is None else _map_parts(_share, batch)


def _share(part: Any) -> Any:
    return part.share_memory_() if isinstance(part, Tensor) else part


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all that its dicts, lists and tuples hold on ``device``, if it can be.

    Besides tensors these are objects with a ``to`` of their own, such as a ``PackedSequence``.
    """
    # On mps a copy that does not block may read memory that has been freed meanwhile.
    non_blocking = device.type == "cuda"
    return _map_parts(lambda part: part.to(device, non_blocking=non_blocking), batch)


def _map_parts(function: Callable[[Any], Any], batch: Any) -> Any:
    if hasattr(batch, "to"):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: _map_parts(function, part) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_map_parts(function, part) for part in batch]
        is_named = hasattr(batch, "_fields")
        return type(batch)(*parts) if is_named else type(batch)(parts)
    return batch


def read_batch(dataset: ImageSet | SampleSet, indices: Sequence[int]) -> Any:
    """Read the samples with these indices as a batch, as a loader would.

    Raises:
        DataError: PyTorch cannot put the samples into a batch, or there is no such sample.
    """
    try:
        return dataset.__getitems__(list(indices))
    except StopIteration:
        raise DataError(
            f"{_name_set(dataset)} raises StopIteration for a sample: give each next() a default,"
            " as in next(found, None)"
        ) from None


def tie_to_parent(worker_id: int) -> None:
    """Let a loader worker outlive a stop request, but not the training process, which answers it.

    ``scancel`` and Ctrl-C send a signal to every process. A worker that dies of the signal would
    turn the orderly stop of its parent into a crash.
    """
    for number in signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_training, daemon=True).start()


def _end_with_training() -> None:
    # Not with the process that the kernel calls the parent: where Python starts workers by a
    # server, as it does on Linux since 3.14, that is the server, which lives as long as a worker.
    training = multiprocessing.parent_process()
    if training is not None:
        training.join()
        os._exit(1)


def loader_options(dataset: Any, num_workers: int, device: torch.device) -> dict[str, Any]:
    """Return the ``DataLoader`` arguments that training and evaluation share."""
    on_host = isinstance(dataset, SampleSet) or dataset.images.device.type == "cpu"
    return {
        "num_workers": num_workers,
        "timeout": BATCH_TIMEOUT if num_workers else 0,
        "collate_fn": collate,
        "worker_init_fn": tie_to_parent,
        "persistent_workers": num_workers > 0,
        # Only pinned memory can be copied to a GPU while the host goes on.
        "pin_memory": on_host and device.type == "cuda",
    }


def batches(loader: Any, timeout: float = LONGEST_WAIT) -> Iterator[Any]:
    """Yield the batches of a loader. Where workers read, say it when one does not come.

    Args:
        loader: a ``DataLoader``. Any other iterable is taken as it is.
        timeout: seconds to wait for a batch of workers at most. In a job of several ranks it should
            be the limit of a collective, in which the others wait for this rank meanwhile. If all
            ranks wait here, nothing else ends them.

    Raises:
        DataError: no batch came, or the loader ended before its last batch.
        Stopped: a stop signal came, and no batch for ``BATCH_TIMEOUT`` seconds.
    """
    expected = len(loader) if isinstance(loader, DataLoader) else 0
    iterator, given = _begin(loader), 0
    begin, next_line = time.monotonic(), FIRST_LINE
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            if given < expected:
                raise DataError(
                    f"{_name_set(loader.dataset)} ended after {given} of {expected} batches: a"
                    " StopIteration in it ends the loop of a DataLoader; give each next() a"
                    " default, as in next(found, None)"
                ) from None
            return
        except DataError as error:  # a worker's comes with its traceback, before this line
            raise DataError(error.args[0].splitlines()[-1].rpartition("DataError: ")[2]) from None
        except RuntimeError as error:
            if not str(error).startswith(TIMED_OUT):
                raise
            signals.check()
            waited = time.monotonic() - begin
            problem = _describe_wait(loader, waited)
            if waited >= timeout:
                raise DataError(f"{problem}; it waits no longer") from None
            if waited >= next_line:
                print(problem, file=sys.stderr, flush=True)
                next_line = waited + NEXT_LINES
            continue
        given += 1
        yield batch
        begin, next_line = time.monotonic(), FIRST_LINE


def _begin(loader: Any) -> Iterator[Any]:
    try:
        with warnings.catch_warnings():  # PyTorch's says the same in three lines
            warnings.filterwarnings("ignore", "Got pickle error")
            return iter(loader)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        if "pickle" not in str(error) and "local object" not in str(error):
            raise
        method = multiprocessing.get_start_method()
        raise DataError(
            f"{_name_set(loader.dataset)} cannot be sent to a loader worker ({describe(error)}),"
            f" which Python starts by {method}: open files and connections in __getitem__, define"
            " functions and classes in a module, or pass --num-workers 0"
        ) from None


def _name_set(dataset: Any) -> str:
    dataset = dataset.dataset if isinstance(dataset, SampleSet) else dataset
    return f"the data set {type(dataset).__name__}"


def _describe_wait(loader: Any, seconds: float) -> str:
    workers = [str(worker.pid) for worker in multiprocessing.active_children()]
    who, name = f"rank {distributed.rank()}", _name_set(loader.dataset)
    return (
        f"{who} has waited {seconds:.0f} s for a batch of {name}:"
        " usually a disk hangs, or a worker waits for a lock, a pool or a connection that was made"
        " before it was forked (make these in the worker). This shows where it is: py-spy dump"
        f" --pid {workers[0] if workers else os.getpid()}"
    )


def fingerprint(dataset: ImageSet | SampleSet) -> str:
    """Return a text that is equal on two ranks if they have the same data.

    It covers length, shapes, dtypes, labels, and some samples in their order. What differs at a
    second look is left out, since then the data set has a generator of its own.
    """
    indices = range(0, len(dataset), max(1, len(dataset) // COMPARED_SAMPLES))
    parts, again = (_parts(read_batch(dataset, indices)) for _ in range(2))
    if isinstance(dataset, ImageSet):
        parts[1] = again[1] = dataset.labels  # all of them, since they are in memory
    texts = [f"{len(dataset)} samples"]
    for part, second in zip(parts, again, strict=True):
        if not isinstance(part, Tensor):
            is_plain = isinstance(part, str | bytes | int | float) and part == second
            texts.append(repr(part) if is_plain else type(part).__name__)
            continue
        texts.append(str(part.dtype).removeprefix("torch."))
        if part.shape == second.shape:
            texts[-1] += f" {list(part.shape[1:])}"
        if torch.equal(part, second):
            content = part.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            texts.append(f"checksum {zlib.crc32(content):08x}")
    return ", ".join(texts)


def _parts(batch: Any) -> list[Any]:
    """Return what the dicts, lists and tuples of a batch hold, in one list."""
    if isinstance(batch, Mapping):
        batch = [*batch.keys(), *batch.values()]
    if isinstance(batch, list | tuple):
        return [part for each in batch for part in _parts(each)]
    return [batch]
