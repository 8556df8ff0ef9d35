"""Data sets as tensors, the sampler that shares an epoch among processes, and the transform.

Each process maps the raw files of a data set into memory, so that any number of ranks on a node
share a single copy of the images.
"""

import math
import os
import shutil
import signal
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler, TensorDataset, get_worker_info

from utils import signals
from utils.datasets import idx
from utils.datasets.prepare import prepare
from utils.datasets.sources import RAW_FILES, SOURCES, DataError
from utils.errors import NO_SHARED_MEMORY, UsageError

EVAL_BATCH_SIZE = 500  # fits a CPU's cache; the result does not depend on it
PREFETCH = 2  # batches that each loader worker prepares ahead, PyTorch's default
SHARED_MEMORY = "/dev/shm"  # where Linux has it
FINGERPRINT_IMAGES = 300  # at least that many are compared between ranks
BATCH_TIMEOUT = 10.0  # seconds that a loader waits for a batch before it looks for a stop signal


class ImageSet(Dataset):
    """Images uint8 [N, H, W] or [N, C, H, W] with their labels, fetched by the batch.

    Labels are classes, int64 [N], or the numbers of a regression, float [N] or [N, D].

    If a data set has ``__getitems__``, ``DataLoader`` calls it with the indices of a whole batch.
    That is one indexing operation instead of a Python call for each image. Pass ``keep_batch`` as
    the loader's ``collate_fn``, since nothing is left to collate.

    Raises:
        DataError: images or labels of another kind.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        _check_kind(images, labels)
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device) -> "ImageSet":
        """Return the whole set on ``device``."""
        return ImageSet(self.images.to(device), self.labels.to(device))

    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        # From pinned memory a GPU fetches the index by itself, and the host need not wait for it.
        index = torch.tensor(indices, pin_memory=self.images.is_cuda)
        index = index.to(self.images.device, non_blocking=True)
        # On a CPU this copies whole images. ``self.images[index]`` would go byte by byte.
        return self.images.index_select(0, index), self.labels.index_select(0, index)


def _check_kind(images: Any, labels: Any) -> None:
    for name, given in (("images", images), ("labels", labels)):
        if not isinstance(given, Tensor):
            raise DataError(f"{name} are a {type(given).__name__}: make them a tensor")
    if images.dtype != torch.uint8 or images.ndim not in (3, 4):
        raise DataError(
            f"images are {images.dtype} {list(images.shape)}: they have to be torch.uint8"
            " [N, H, W] or [N, C, H, W]"
        )
    if images.ndim == 4 and images.shape[3] <= 4 < images.shape[1]:
        raise DataError(
            f"images are {list(images.shape)}, channels last: make them [N, C, H, W] by"
            " images.permute(0, 3, 1, 2).contiguous()"
        )
    is_class = labels.dtype == torch.int64 and labels.ndim == 1
    is_number = labels.is_floating_point() and labels.ndim in (1, 2)
    if not (is_class or is_number) or len(labels) != len(images):
        raise DataError(
            f"labels are {labels.dtype} {list(labels.shape)} for {len(images)} images: they have to"
            " be torch.int64 [N], or float [N] or [N, D] for a regression"
        )
    if is_class and len(labels) and labels.min() < 0:
        raise DataError(f"labels hold the class {int(labels.min())}: classes count from 0")


def keep_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the batch as it is, but in shared memory if this is a loader worker.

    Otherwise PyTorch puts it there from another thread of the worker. An error in that thread
    reaches nobody, and the training process waits for the batch for ever.
    """
    if get_worker_info() is not None:
        return batch[0].share_memory_(), batch[1].share_memory_()
    return batch


def ignore_stop_signals(worker_id: int) -> None:
    """Let a loader worker outlive a stop request, which the training process answers.

    ``scancel`` and Ctrl-C send a signal to every process. A worker that dies of the signal would
    turn the orderly stop of its parent into a crash.
    """
    for number in signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def loader_options(dataset: ImageSet, num_workers: int, device: torch.device) -> dict[str, Any]:
    """Return the ``DataLoader`` arguments that training and evaluation share.

    Args:
        dataset: the test set, whose batches are the larger ones.

    Raises:
        UsageError: /dev/shm has no room for the evaluation's batches, which the workers of all
            processes of this machine prepare ahead.
    """
    on_host = dataset.images.device.type == "cpu"
    # A worker would notice it too, but in the evaluation only after an epoch.
    workers = num_workers * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    images = min(workers * PREFETCH * EVAL_BATCH_SIZE, len(dataset))
    free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else math.inf
    if workers and free < images * dataset.images[:1].nbytes:
        raise UsageError(NO_SHARED_MEMORY)
    return {
        "num_workers": num_workers,
        "timeout": BATCH_TIMEOUT if num_workers else 0,
        "collate_fn": keep_batch,
        "worker_init_fn": ignore_stop_signals,
        "persistent_workers": num_workers > 0,
        # Only pinned memory can be copied to a GPU while the host goes on.
        "pin_memory": on_host and device.type == "cuda",
    }


def batches(loader: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
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


def fingerprint(dataset: ImageSet) -> str:
    """Return a text that is equal on two ranks if they have the same data. It takes milliseconds.

    The text covers length, shapes, dtypes, all labels and some hundred images, in their order.
    """
    images, labels = dataset.images, dataset.labels
    some = images[:: max(1, len(images) // FINGERPRINT_IMAGES)]
    checksum = 0
    for part in (labels, some):
        checksum = zlib.crc32(part.cpu().contiguous().view(torch.uint8).numpy().data, checksum)
    kinds = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (images, labels)]
    return f"images {kinds[0]}, labels {kinds[1]}, checksum {checksum:08x}"


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
        seed: the permutation of an epoch depends on ``seed + epoch`` alone.
    """

    def __init__(
        self,
        dataset: ImageSet,
        global_batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.global_batch_size = global_batch_size
        self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of its samples all replicas together have seen."""
        super().set_epoch(epoch)
        self.start = start

    def __len__(self) -> int:
        steps = (len(self.dataset) - self.start) // self.global_batch_size  # type: ignore[arg-type]
        return steps * self.global_batch_size // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        permutation = torch.randperm(len(self.dataset), generator=generator)  # type: ignore[arg-type]
        end = self.start + len(self) * self.num_replicas
        return iter(permutation[self.start : end][self.rank :: self.num_replicas].tolist())


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
        self.mean = _per_channel(SOURCES[dataset].mean, device) * 255
        self.scale = 1 / (_per_channel(SOURCES[dataset].std, device) * 255)
        self.augment = augment

    def __call__(
        self, images: Tensor, labels: Tensor, train: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Turn images uint8 [B, H, W] or [B, C, H, W] into floats [B, C, H, W], normalised."""
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        if train and self.augment:
            images = random_shift(images, self.SHIFT)
        if images.ndim == 3:
            images = images.unsqueeze(1)
        # The default dtype rather than float32, so that a test can compare runs in float64.
        pixels = images.to(torch.get_default_dtype())
        return pixels.sub_(self.mean).mul_(self.scale), labels


@torch.no_grad()
def check_fits(model: nn.Module, transform: Transform, *sets: ImageSet) -> None:
    """Try a new model on an image of each set, and compare its logits with the labels.

    A mismatch that is found here is one line. In a step on a GPU, a class without a logit is an
    assert in a kernel, which names nothing.

    Args:
        model: on the device of ``transform``, not wrapped.

    Raises:
        DataError: the model, or the mean in ``SOURCES``, does not fit the images, or a class has
            no logit.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise DataError("--model has no parameter to train: unfreeze some")
    model.eval()  # so that the image leaves no trace in running statistics
    for dataset in sets:
        if not len(dataset):
            raise DataError("--dataset has an empty set: it needs images to train and to test")
        try:
            images, labels = transform(*dataset[:1])
            outputs = model.forward(images)  # ``model(images)`` would compile for a single image
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"--model cannot take the images of --dataset, {list(dataset.images.shape[1:])}"
                f" ({error}): choose another --model, or change its layers (or mean and std in"
                " SOURCES)"
            ) from None
        if labels.dtype != torch.int64:
            continue
        if not isinstance(outputs, Tensor) or (outputs.ndim, len(outputs)) != (2, 1):
            shape = getattr(outputs, "shape", type(outputs).__name__)
            raise DataError(
                f"--model returns {shape} for one image: it has to return logits [1, C]"
            )
        if dataset.labels.max() >= outputs.shape[-1]:
            raise DataError(
                f"--dataset has the class {int(dataset.labels.max())}, and --model"
                f" {outputs.shape[-1]} logits, for classes from 0 on: give it one for each class"
            )
    model.train()


def _per_channel(value: float | tuple[float, ...], device: torch.device) -> Any:
    """Return a number as it is, and one for each channel as a tensor [C, 1, 1]."""
    return torch.tensor(value, device=device)[:, None, None] if isinstance(value, tuple) else value


def random_shift(images: Tensor, margin: int) -> Tensor:
    """Return images [B, H, W] or [B, C, H, W], each moved by up to ``margin`` pixels each way.

    All channels of an image move alike, and uncovered pixels become 0. The shifts are drawn from
    the default generator of the images' device.
    """
    padded = F.pad(images, (margin,) * 4).contiguous()  # also where channels came last
    dy, dx = torch.randint(2 * margin + 1, (2, len(images)), device=images.device)
    # A shifted image is one contiguous piece of the padded image, with padding between its rows. So
    # each image takes one copy, which needs a third of the time of indexing pixel by pixel.
    step, *inner = padded.stride()
    pitch = inner[-2]
    size = step - 2 * margin * (pitch + 1)
    first = torch.arange(0, len(images) * step, step, device=images.device)
    first.add_(dx).add_(dy, alpha=pitch)
    pieces = padded.flatten().unfold(0, size, 1).index_select(0, first)
    return pieces.as_strided(images.shape, (size, *inner))


def load_dataset(name: str, data_dir: str) -> tuple[ImageSet, ImageSet]:
    """Load the training set and the test set, and prepare them if no process has yet.

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
