"""Data sets as tensors, the sampler that shares an epoch among processes, and the transform.

Each process maps the prepared file of a data set into memory, so that any number of ranks on a node
share a single copy of the images.
"""

import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, TensorDataset

from utils.datasets.prepare import load_prepared, prepare
from utils.datasets.sources import SOURCES, DataError

EVAL_BATCH_SIZE = 500  # fits a CPU's cache; the result does not depend on it


class ImageSet(Dataset):
    """Images uint8 [N, H, W] or [N, C, H, W] with their labels, fetched by the batch.

    Labels are classes, int64 [N], or the numbers of a regression, float [N] or [N, D].

    ``DataLoader`` calls ``__getitems__`` with the indices of a whole batch where a data set has
    it: one indexing operation instead of a Python call for each image. Pass ``keep_batch`` as the
    loader's ``collate_fn``, since there is nothing left to collate.

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
        index = torch.tensor(indices, device=self.images.device)
        # On a CPU it copies whole images, where ``self.images[index]`` goes byte by byte.
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


def keep_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the batch as it is (a ``collate_fn`` that workers can pickle)."""
    return batch


def ignore_stop_signals(worker_id: int) -> None:
    """Let a loader worker outlive a stop request, which the training process answers.

    ``scancel`` and Ctrl-C signal every process; a worker that dies of it would turn the orderly
    stop of its parent into a crash.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def loader_options(dataset: ImageSet, num_workers: int, device: torch.device) -> dict[str, Any]:
    """Return the ``DataLoader`` arguments that training and evaluation share."""
    on_host = dataset.images.device.type == "cpu"
    return {
        "num_workers": num_workers,
        "collate_fn": keep_batch,
        "worker_init_fn": ignore_stop_signals,
        "persistent_workers": num_workers > 0,
        # Only pinned memory can be copied to a GPU while the host goes on.
        "pin_memory": on_host and device.type == "cuda",
    }


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

    Raises:
        DataError: the set has fewer samples than one global batch.
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
        if len(dataset) < global_batch_size:
            raise DataError(
                f"a global batch of {global_batch_size} is larger than the training set of"
                f" {len(dataset)}: lower --batch-size or --grad-accum-steps"
            )

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

    Images travel as bytes, a quarter of what they are as floats.

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
        self.shift = RandomShift(self.SHIFT) if augment else None

    def __call__(
        self, images: Tensor, labels: Tensor, train: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Turn images uint8 [B, H, W] or [B, C, H, W] into floats [B, C, H, W], normalised.

        Raises:
            DataError: a mean for each channel, and another number of channels.
        """
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        if train and self.shift is not None:
            images = self.shift(images)
        if images.ndim == 3:
            images = images.unsqueeze(1)
        if isinstance(self.mean, Tensor) and len(self.mean) != images.shape[1]:
            raise DataError(
                f"images of {images.shape[1]} channels, but mean and std of {len(self.mean)}:"
                " correct the line in SOURCES"
            )
        # The default dtype rather than float32, so that a test can compare runs in float64.
        pixels = images.to(torch.get_default_dtype())
        return pixels.sub_(self.mean).mul_(self.scale), labels


def _per_channel(value: float | tuple[float, ...], device: torch.device) -> Any:
    """Return a number as it is, and one for each channel as a tensor [C, 1, 1]."""
    return torch.tensor(value, device=device)[:, None, None] if isinstance(value, tuple) else value


class RandomShift:
    """Move each image by up to ``shift`` pixels each way, filling with 0.

    Draws from the default generator of the images' device.
    """

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self, images: Tensor) -> Tensor:
        """Return images [B, H, W] or [B, C, H, W], moved, all channels of an image alike."""
        margin = self.shift
        padded = F.pad(images, (margin,) * 4).contiguous()  # also where channels came last
        dy, dx = torch.randint(2 * margin + 1, (2, len(images)), device=images.device)
        # A moved image lies in one piece, from its first pixel to its last, with what pads its rows
        # in between: one copy for each image, a third of the time of indexing pixel by pixel.
        step, *inner = padded.stride()
        pitch = inner[-2]
        size = step - 2 * margin * (pitch + 1)
        first = torch.arange(0, len(images) * step, step, device=images.device)
        first.add_(dx).add_(dy, alpha=pitch)
        pieces = padded.flatten().unfold(0, size, 1).index_select(0, first)
        return pieces.as_strided(images.shape, (size, *inner))


def load_dataset(name: str, data_dir: str) -> tuple[ImageSet, ImageSet]:
    """Load training set and test set, preparing them where no process has yet.

    Safe to call from all processes of a job at once, on a disk of one node or on a shared one:
    whoever takes the file lock prepares, the others wait for it. No process group is needed.

    Args:
        name: a key of ``SOURCES``.
        data_dir: folder in torchvision's layout (``MNIST/raw/...``).

    Raises:
        DataError: the data is missing or damaged.
    """
    tensors = load_prepared(prepare(name, data_dir))
    return (
        ImageSet(tensors["train_images"], tensors["train_labels"]),
        ImageSet(tensors["test_images"], tensors["test_labels"]),
    )


def load_tensors(name: str, data_dir: str) -> tuple[TensorDataset, TensorDataset]:
    """Load training set and test set for a training loop without a transform.

    Args and errors: those of ``load_dataset``.

    Returns:
        Two sets of samples (image, label): float [C, H, W] with mean 0 and variance 1, int64 [].
    """
    transform = Transform(torch.device("cpu"), name)
    sets = load_dataset(name, data_dir)
    train_set, test_set = (TensorDataset(*transform(each.images, each.labels)) for each in sets)
    return train_set, test_set
