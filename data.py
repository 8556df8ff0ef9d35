"""Data sets, the sampler that shares an epoch among processes, and the transform.

MNIST and its relatives are tensors. Each process maps their raw files into memory, so that any
number of ranks on a node share a single copy of the images. Any other data set of PyTorch is read
sample by sample.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DistributedSampler, TensorDataset

from utils.datasets import idx
from utils.datasets.loader import ImageSet, SampleSet, loader_options, place
from utils.datasets.prepare import prepare
from utils.datasets.sources import RAW_FILES, SOURCES
from utils.errors import UsageError

__all__ = [
    "SOURCES",
    "EpochSampler",
    "ImageSet",
    "SampleSet",
    "Transform",
    "load_dataset",
    "load_tensors",
    "loader_options",
    "place",
]

EVAL_BATCH_SIZE = 500  # fits a CPU's cache; the result does not depend on it


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
