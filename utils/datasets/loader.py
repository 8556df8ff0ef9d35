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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
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
    """

    def __init__(self, images: Any, labels: Any) -> None:
        super().__init__(torch.as_tensor(images), torch.as_tensor(labels))
        self.images, self.labels = self.tensors

    def to(self, device: torch.device) -> "ImageSet":
        """Return the whole set on ``device``."""
        return ImageSet(self.images.to(device), self.labels.to(device))

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

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[int | tuple[int, int]]) -> list[Any]:
        """Return samples.

        Args:
            keys: indices, or pairs (index, position in the training), as ``EpochSampler`` yields
                them. Without a position a sample is the same each time.
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
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        return samples


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
    usable = [isinstance(x, Dataset) and not isinstance(x, IterableDataset) for x in both]
    if usable != [True, True]:
        raise DataError(
            f"load_dataset in data.py returned {', '.join(type(x).__name__ for x in both)}: return"
            " two map-style Datasets (docs/recipes.md shows how to train an IterableDataset)"
        )
    if not all(isinstance(each, ImageSet) for each in both):
        if on_device:
            raise UsageError("--data-on-device needs the tensors of an ImageSet: drop it")
        return [each if isinstance(each, ImageSet) else SampleSet(each) for each in both]
    if on_device is None and device.type == "cuda":
        size = sum(part.nbytes for each in both for part in each.tensors)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / torch.cuda.device_count()
        on_device = torch.cuda.mem_get_info(device)[0] > ROOM_ON_DEVICE * size * max(1, ranks)
    return [each.to(device) for each in both] if on_device else both


def collate(batch: Any) -> Any:
    """Make a batch (images, labels) of samples. An ``ImageSet`` gives a whole batch already.

    A loader worker also puts it into shared memory here. Otherwise PyTorch does that in another
    thread of the worker. An error in that thread reaches nobody, and the training process waits for
    the batch for ever.
    """
    if isinstance(batch, list):
        batch = default_collate(batch)
    if get_worker_info() is not None:
        return [part.share_memory_() for part in batch]
    return batch


def read_batch(dataset: ImageSet | SampleSet, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Read the images and labels with these indices, as a loader would.

    Raises:
        DataError: a sample is no pair, or PyTorch cannot put the samples into a batch.
    """
    samples = dataset.__getitems__(list(indices))
    try:
        images, labels = collate(samples)
        return images.flatten(0, 0), labels.flatten(0, 0)  # views, of tensors alone
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"the samples of --dataset make no batch ({str(error).splitlines()[0]}): return pairs"
            " (image, label), and let a transform make all images tensors of one shape"
        ) from None


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch of any form on a device. What is no tensor stays as it is."""
    # On mps a copy that does not block may read memory that has been freed meanwhile.
    blocking = device.type != "cuda"
    return tree_map(
        lambda x: x.to(device, non_blocking=not blocking) if isinstance(x, Tensor) else x, batch
    )


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


def batches(loader: Iterable[Any], timeout: float = LONGEST_WAIT) -> Iterator[Any]:
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
                    f"{_name_set(loader)} ended after {given} of {expected} batches: a"
                    " StopIteration in it ends the loop of a DataLoader; give each next() a"
                    " default, as in next(found, None)"
                ) from None
            return
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
            f"{_name_set(loader)} cannot be sent to a loader worker ({describe(error)}), which"
            f" Python starts by {method}: open files and connections in __getitem__, define"
            " functions and classes in a module, or pass --num-workers 0"
        ) from None


def _name_set(loader: Any) -> str:
    dataset = loader.dataset
    dataset = dataset.dataset if isinstance(dataset, SampleSet) else dataset
    return f"the data set {type(dataset).__name__}"


def _describe_wait(loader: Any, seconds: float) -> str:
    workers = [str(worker.pid) for worker in multiprocessing.active_children()]
    return (
        f"rank {distributed.rank()} has waited {seconds:.0f} s for a batch of {_name_set(loader)}:"
        " usually a disk hangs, or a worker waits for a lock, a pool or a connection that was made"
        " before it was forked (make these in the worker). This shows where it is: py-spy dump"
        f" --pid {workers[0] if workers else os.getpid()}"
    )


def fingerprint(dataset: ImageSet | SampleSet) -> str:
    """Return a text that is equal on two ranks if they have the same data.

    It covers length, shapes, dtypes, labels, and some images in their order. Images whose second
    look differs are left out, since then the data set has a generator of its own.
    """
    indices = range(0, len(dataset), max(1, len(dataset) // COMPARED_SAMPLES))
    images, labels = read_batch(dataset, indices)
    is_repeatable = torch.equal(images, read_batch(dataset, indices)[0])
    text = f"{len(dataset)} samples"
    # All labels, if they are in memory.
    for part in (images, getattr(dataset, "labels", labels)):
        text += f", {str(part.dtype).removeprefix('torch.')} {list(part.shape[1:])}"
        if part is not images or is_repeatable:
            content = part.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            text += f", checksum {zlib.crc32(content):08x}"
    return text
