"""Data sets, the sampler that shares an epoch among processes, and the transform.

MNIST and its relatives are tensors. Each process maps their raw files into memory, so that any
number of ranks on a node share a single copy of the images. Any other data set of PyTorch is read
sample by sample.
"""

import functools
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from utils import signals
from utils.datasets import idx
from utils.datasets.prepare import prepare
from utils.datasets.sources import RAW_FILES, SOURCES, DataError
from utils.errors import UsageError

EVAL_BATCH_SIZE = 500  # fits a CPU's cache; the result does not depend on it
COMPARED_SAMPLES = 32  # of each set, between ranks, since each may take a file to be read
ROOM_ON_DEVICE = 10  # times the size of a set has to be free on a GPU that keeps it unasked
BATCH_TIMEOUT = 15.0  # seconds that a loader waits for a batch before it looks for a stop signal


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
    its place in the training. So it is the same with any number of processes and loader workers,
    and in a resumed run.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: list[int]) -> list[Any]:
        """Return samples by index, to which a place in the training is added as ``place * N``."""
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        samples = []
        for key in keys:
            seed = zlib.crc32(f"{self.seed}/{key}".encode())
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            samples.append(self.dataset[key % len(self)])
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        return samples


def place(
    sets: Any, device: torch.device, on_device: bool | None, num_workers: int, seed: int
) -> list[Any]:
    """Return what ``load_dataset`` returned as an ``ImageSet`` or a ``SampleSet`` each.

    Args:
        sets: two data sets, to train and to test.
        device: of this process.
        on_device: whether to keep the sets there. None: if they are small, on CUDA.
        num_workers: a loader worker cannot read what is on a device.
        seed: of random transforms.

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
        return [each if isinstance(each, ImageSet) else SampleSet(each, seed) for each in both]
    if on_device is None and device.type == "cuda" and not num_workers:
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


def tie_to_parent(worker_id: int) -> None:
    """Let a loader worker outlive a stop request, but not the training process, which answers it.

    ``scancel`` and Ctrl-C send a signal to every process. A worker that dies of the signal would
    turn the orderly stop of its parent into a crash.
    """
    for number in signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signals.die_with_parent(signal.SIGKILL)


def loader_options(dataset: Any, num_workers: int, device: torch.device) -> dict[str, Any]:
    """Return the ``DataLoader`` arguments that training and evaluation share."""
    on_host = isinstance(dataset, SampleSet) or dataset.images.device.type == "cpu"
    return {
        "num_workers": num_workers,
        "timeout": BATCH_TIMEOUT if num_workers else 0,
        "collate_fn": collate,
        "worker_init_fn": tie_to_parent,
        "persistent_workers": num_workers > 0,
        # Python 3.14 would start workers by a server, which would then be their parent.
        "multiprocessing_context": "fork" if num_workers and sys.platform == "linux" else None,
        # Only pinned memory can be copied to a GPU while the host goes on.
        "pin_memory": on_host and device.type == "cuda",
    }


def batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a loader, however long one takes.

    Raises:
        Stopped: a stop signal came, and no batch for ``BATCH_TIMEOUT`` seconds.
    """
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except RuntimeError as error:
            if not str(error).startswith("DataLoader timed out"):
                raise
            signals.check()


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


class EpochSampler(DistributedSampler):
    """Shuffle an epoch and give each replica its share, from any position on.

    An epoch is ``permutation[start:]`` cut to whole global batches, so there is neither padding
    nor a short batch, and every replica has the same number of them. Taken in turn
    (``rank::num_replicas``), the k-th batches of all replicas together are the k-th global batch,
    whatever the number of replicas. ``DistributedSampler`` itself can start only at 0, pads (or
    drops) by single samples, and cuts by replica, not by batch.

    Args:
        dataset: the training set, N samples.
        global_batch_size: samples that an optimizer step takes over all replicas.
        num_replicas: number of processes that share the epoch.
        rank: number of this process among them.
        seed: the order of an epoch depends on ``seed + epoch`` alone.
        weights: [N], not negative. With them N samples are drawn with replacement, each as often
            as its weight says, as by ``WeightedRandomSampler``.

    Raises:
        UsageError: another number of weights.
    """

    def __init__(
        self,
        dataset: ImageSet | SampleSet,
        global_batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        weights: Sequence[float] | Tensor | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.global_batch_size = global_batch_size
        self.start = 0
        self.weights = None if weights is None else torch.as_tensor(weights, dtype=torch.float64)
        if self.weights is not None and self.weights.shape != (len(dataset),):
            raise UsageError(f"{len(self.weights)} weights for {len(dataset)} samples")

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of its samples all replicas together have seen."""
        super().set_epoch(epoch)
        self.start = start

    def __len__(self) -> int:
        steps = (len(self.dataset) - self.start) // self.global_batch_size  # type: ignore[arg-type]
        return steps * self.global_batch_size // self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        count = len(self.dataset)  # type: ignore[arg-type]
        if self.weights is None:
            order = torch.randperm(count, generator=generator)
        else:
            order = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        if isinstance(self.dataset, SampleSet):  # which seeds each sample by its place
            order += count * (self.epoch * count + torch.arange(count))
        end = self.start + len(self) * self.num_replicas
        return iter(order[self.start : end][self.rank :: self.num_replicas].tolist())


class Transform:
    """Move a batch to the device, normalise it there, and shift it at random in training.

    Images are loaded and copied as bytes, which take a quarter of the memory of floats.

    Args:
        device: where the model computes.
        dataset: a key of ``SOURCES``, for mean and standard deviation.
        augment: whether to shift training images, by up to ``SHIFT`` pixels each way.
    """

    SHIFT = 1

    def __init__(self, device: torch.device, dataset: str, augment: bool = False) -> None:
        self.device = device
        # The default dtype rather than float32, so that a test can compare runs in float64.
        options: Any = {"dtype": torch.get_default_dtype(), "device": device}
        mean, std = (torch.tensor(value, **options) for value in SOURCES[dataset][1:3])
        self.offset, self.scale = -mean / std, 1 / (std * 255)  # [] or [C]
        self.grey_scale = None if self.scale.ndim else float(self.scale)
        self.augment = augment

    def __call__(
        self, images: Tensor, labels: Tensor, train: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Turn images uint8 [B, H, W] or [B, C, H, W] into floats [B, C, H, W], normalised.

        Images of another dtype are taken as they are.
        """
        # On mps a copy that does not block may read memory that has been freed meanwhile.
        copy: Any = {"device": self.device, "non_blocking": self.device.type == "cuda"}
        images, labels = images.to(**copy), labels.to(**copy)
        # Python's numbers are collated to float64.
        labels = labels.to(self.offset.dtype) if labels.is_floating_point() else labels
        if images.dtype != torch.uint8:
            return images, labels
        if train and self.augment:
            images = random_shift(images, self.SHIFT)
        if images.ndim == 3:
            images = images.unsqueeze(1)
        if self.grey_scale is None:
            pixels = images.to(self.scale.dtype).mul_(self.scale[:, None, None])
            pixels.add_(self.offset[:, None, None])
        else:  # one operation, since a GPU waits for the host to start each
            pixels = torch.add(self.offset, images, alpha=self.grey_scale)
        return pixels, labels


def random_shift(images: Tensor, margin: int) -> Tensor:
    """Return images [B, H, W] or [B, C, H, W], each moved by up to ``margin`` pixels each way.

    All channels of an image move alike, and uncovered pixels become 0. The shifts are drawn from
    the default generator of the images' device.
    """
    padded = F.pad(images, (margin,) * 4).contiguous()  # also where channels came last
    # A shifted image is one contiguous piece of the padded image, with padding between its rows. So
    # each image takes one copy, which needs a third of the time of indexing pixel by pixel.
    step, *inner = padded.stride()
    pitch = inner[-2]
    size = step - 2 * margin * (pitch + 1)
    starts = _piece_starts(len(images), step, pitch, margin, images.device)
    places = torch.randint(starts.shape[1], (len(images), 1), device=images.device)
    pieces = padded.flatten().unfold(0, size, 1).index_select(0, starts.gather(1, places)[:, 0])
    return pieces.as_strided(images.shape, (size, *inner))


@functools.lru_cache(maxsize=4)
def _piece_starts(count: int, step: int, pitch: int, margin: int, device: torch.device) -> Tensor:
    """Return where the piece of each shift, row by row, starts in each padded image [B, shifts]."""
    images, way = torch.arange(0, count * step, step), torch.arange(2 * margin + 1)
    return (images[:, None, None] + way[:, None] * pitch + way).flatten(1).to(device)


def load_dataset(name: str, data_dir: str) -> tuple[Any, Any]:
    """Load the training set and the test set, and prepare them if no process has yet.

    Your own may be any two map-style data sets of PyTorch, the same in every process.

    All processes of a job may call it at once, on a local disk or on a shared one. The process that
    takes the file lock prepares the data, and the others wait. No process group is needed.

    Args:
        name: a key of ``SOURCES``.
        data_dir: folder in torchvision's layout (``MNIST/raw/...``).

    Raises:
        DataError: the data is missing or damaged.
        Stopped: a stop signal came while this process waited.
    """
    folder = prepare(name, data_dir)
    images, labels, test_images, test_labels = (idx.read(folder / name) for name in RAW_FILES)
    return ImageSet(images, labels.long()), ImageSet(test_images, test_labels.long())


def load_tensors(name: str, data_dir: str) -> tuple[TensorDataset, TensorDataset]:
    """Load both sets for a loop without a transform.

    Args and errors: those of ``load_dataset``.

    Returns:
        Two sets of samples (image, label): float [C, H, W] with mean 0 and variance 1, int64 [].
    """
    transform = Transform(torch.device("cpu"), name)
    sets = load_dataset(name, data_dir)
    train_set, test_set = (TensorDataset(*transform(each.images, each.labels)) for each in sets)
    return train_set, test_set
