"""Data sets, the sampler that shares an epoch among processes, and the transform.

MNIST and its relatives are tensors. Each process maps their raw files into memory, so that any
number of ranks on a node share a single copy of the images. Any other data set of PyTorch is read
sample by sample.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DistributedSampler, TensorDataset

from utils import callables
from utils.datasets import idx
from utils.datasets.loader import (
    ImageSet,
    SampleSet,
    attribute_of,
    loader_options,
    place,
    to_device,
)
from utils.datasets.prepare import prepare
from utils.datasets.sources import RAW_FILES, SOURCES
from utils.errors import UsageError

__all__ = [
    "SOURCES",
    "EpochSampler",
    "ImageSet",
    "SampleSet",
    "Transform",
    "load",
    "load_dataset",
    "load_tensors",
    "loader_options",
]


def load_dataset(name: str, data_dir: str) -> tuple[Any, Any]:
    """Load the training set and the test set, and prepare them if no process has yet.

    Your own may be any two map-style data sets of PyTorch, the same in every process. Where they
    have images as bytes, attributes ``mean`` and ``std`` of the training set normalise them.

    All processes of a job may call it at once, on a local disk or on a shared one. The process that
    takes the file lock prepares the data, and the others wait. No process group is needed.

    Args:
        name: a key of ``SOURCES``, or ``module:callable``, such as ``my_data:load``. The callable
            gets ``data_dir``, and its module is looked for in the current folder, too.
        data_dir: folder in torchvision's layout (``MNIST/raw/...``).

    Raises:
        DataError: the data is missing or damaged.
        UsageError: there is no such callable.
        Stopped: a stop signal came while this process waited.
    """
    if callables.is_own(name):
        return callables.call("--dataset", name, data_dir)
    folder, source = prepare(name, data_dir), SOURCES[name]
    images, labels, test_images, test_labels = (idx.read(folder / name) for name in RAW_FILES)
    train_set = ImageSet(images, labels.long(), source.mean, source.std)
    return train_set, ImageSet(test_images, test_labels.long(), source.mean, source.std)


def load(
    name: str, data_dir: str, device: torch.device, on_device: bool | None = None
) -> list[Any]:
    """Load both sets as the scripts read them: an ``ImageSet``, or a ``SampleSet`` of any other.

    Args:
        name, data_dir: as for ``load_dataset``.
        device: of this process.
        on_device: whether to keep the sets there. None: if they are small, on CUDA.

    Raises:
        DataError: as ``load_dataset``, or it returns anything else than two map-style data sets.
        UsageError: the set to keep on the device is no ``ImageSet``.
    """
    return place(load_dataset(name, data_dir), device, on_device)


class EpochSampler(DistributedSampler):
    """Shuffle an epoch and give each replica its share, from any position on.

    An epoch is ``permutation[start:]`` cut to whole global batches, so there is neither padding
    nor a short batch, and every replica has the same number of them. Taken in turn
    (``rank::num_replicas``), the k-th batches of all replicas together are the k-th global batch,
    whatever the number of replicas. ``DistributedSampler`` itself can start only at 0, pads (or
    drops) by single samples, and cuts by replica, not by batch. ``ElasticDistributedSampler``, in
    torch/distributed/elastic/utils/data/elastic_distributed_sampler.py, can start elsewhere. But it
    leaves out the first samples of the *data set*, not of the epoch's order. So it would repeat
    some samples of the epoch and never reach others.

    Args:
        dataset: the training set, N samples.
        global_batch_size: samples that an optimizer step takes over all replicas.
        num_replicas: number of processes that share the epoch.
        rank: number of this process among them.
        seed: the order of an epoch depends on ``seed + epoch`` alone.
        weights: [N], not negative. With them N samples are drawn with replacement, each as often
            as its weight says, as by ``WeightedRandomSampler``.

    Raises:
        UsageError: the set has fewer samples than a step takes, or another number of weights.
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
        if global_batch_size > len(dataset):
            raise UsageError(
                f"a global batch of {global_batch_size} is larger than the training set"
                f" ({len(dataset)} samples): lower --batch-size or --grad-accum-steps"
            )
        self.global_batch_size = global_batch_size
        self.start = 0  # samples of the epoch that all replicas together have seen: Run sets it
        self.weights = None if weights is None else torch.as_tensor(weights, dtype=torch.float64)
        if self.weights is not None and self.weights.shape != (len(dataset),):
            raise UsageError(f"{len(self.weights)} weights for {len(dataset)} samples")

    def __len__(self) -> int:
        steps = (len(self.dataset) - self.start) // self.global_batch_size  # type: ignore[arg-type]
        return steps * self.global_batch_size // self.num_replicas

    def __iter__(self) -> Iterator[Any]:
        """Yield indices, or pairs (index, position in the training) for a ``SampleSet``."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        count = len(self.dataset)  # type: ignore[arg-type]
        if self.weights is None:
            order = torch.randperm(count, generator=generator)
        else:
            order = torch.multinomial(self.weights, count, replacement=True, generator=generator)
        end = self.start + len(self) * self.num_replicas
        indices = order[self.start : end][self.rank :: self.num_replicas].tolist()
        if not isinstance(self.dataset, SampleSet):
            return iter(indices)
        # A SampleSet seeds each sample by its position, which counts the samples of all replicas.
        first = self.epoch * count + self.start + self.rank
        return zip(indices, itertools.count(first, self.num_replicas))


class Transform:
    """Move a batch to the device, normalise it there, and shift it at random in training.

    Images are loaded and copied as bytes, which take a quarter of the memory of floats.

    Args:
        device: where the model computes.
        dataset: the training set. Its ``mean`` and ``std`` are those of its pixels, scaled to 0..1:
            a number each, or one for each channel. A set without them has 0 and 1. An entry of
            ``SOURCES`` has them, too.
        augment: whether to shift training images, by up to ``SHIFT`` pixels each way.
    """

    SHIFT = 1

    def __init__(self, device: torch.device, dataset: Any, augment: bool = False) -> None:
        self.device = device
        # The default dtype rather than float32, so that a test can compare runs in float64.
        options: Any = {"dtype": torch.get_default_dtype(), "device": device}
        mean = torch.as_tensor(attribute_of(dataset, "mean", 0.0), **options)
        std = torch.as_tensor(attribute_of(dataset, "std", 1.0), **options)
        self.offset, self.scale = -mean / std, 1 / (std * 255)  # [] or [C]
        self.grey_scale = None if self.scale.ndim else float(self.scale)
        self.augment = augment

    def __call__(self, batch: Any, train: bool = False) -> tuple[Any, Any]:
        """Return what the model takes of a batch, and what the loss compares it with.

        Args:
            batch: as the loader yields it. Of a pair (images, labels), images uint8 [B, H, W] or
                [B, C, H, W] become floats [B, C, H, W], normalised, and images of another dtype are
                taken as they are. Any other batch, such as a dict of tensors, goes to the model and
                to the loss as a whole.
            train: whether to shift the images.
        """
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            batch = to_device(batch, self.device)
            return batch, batch
        images, labels = batch
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
    height, width = images.shape[-2:]
    # A view of each padded image at each of its shifts, [B, (C,) shifts, shifts, H, W].
    windows = F.pad(images, (margin,) * 4).unfold(-2, height, 1).unfold(-2, width, 1)
    each = torch.arange(len(images), device=images.device)
    down, right = torch.randint(2 * margin + 1, (2, len(images)), device=images.device)
    return windows[each, ..., down, right, :, :]


def load_tensors(name: str, data_dir: str) -> tuple[TensorDataset, TensorDataset]:
    """Load both sets for a loop without a transform.

    Args and errors: those of ``load_dataset``.

    Returns:
        Two sets of samples (image, label): float [C, H, W] with mean 0 and variance 1, int64 [].
    """
    sets = load_dataset(name, data_dir)
    transform = Transform(torch.device("cpu"), sets[0])
    train_set, test_set = (TensorDataset(*transform((each.images, each.labels))) for each in sets)
    return train_set, test_set
