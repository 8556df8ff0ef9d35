"""What is tried and compared before the first step, since it would fail late or not at all."""

import inspect
import zlib
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import data
import models
from utils import distributed
from utils.datasets.loader import fingerprint, read_batch
from utils.datasets.sources import DataError
from utils.device import Precision
from utils.errors import UsageError, describe

IGNORED = -100  # cross_entropy skips this class


@torch.no_grad()
def check_fits(model: nn.Module, transform: data.Transform, train_set: Any, test_set: Any) -> None:
    """Try a new model and the loss on some images of each set. Collective.

    Before that, ranks with other data or code are found, which would train without an error.

    A mismatch that is found here is one line. In a step on a GPU, a class without a logit is an
    assert in a kernel, which names nothing.

    Args:
        model: on the device of ``transform``, not wrapped.
        train_set, test_set: as ``data.place`` returns them.

    Raises:
        DataError: the model, or the mean in ``SOURCES``, does not fit the images, or the loss does
            not fit what the model returns.
    """
    if distributed.world_size() > 1:
        _check_same(model, {"training data": train_set, "test data": test_set})
    model.eval()  # so that the images leave no trace in running statistics
    for dataset in (train_set, test_set):
        images, labels = read_batch(dataset, sorted({0, len(dataset) - 1}))
        try:
            images, targets = transform(images, labels)
            outputs = model.forward(images)  # ``model(images)`` would compile for a few images
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"--model cannot take the images of --dataset, {list(images.shape[1:])} ({error}):"
                " choose another --model, or change its layers (or mean and std in SOURCES)"
            ) from None
        _check_loss(outputs, targets, getattr(dataset, "labels", labels))
    model.train()
    _note_frozen_statistics(model)


def _check_loss(outputs: Any, targets: Tensor, labels: Tensor) -> None:
    """Try the loss on the outputs for some images, whose shape and classes it may not compare."""
    problem, is_tensor = "", isinstance(outputs, Tensor)
    kind = list(outputs.shape) if is_tensor else type(outputs).__name__
    if is_tensor and targets.is_floating_point():
        if outputs.shape != targets.shape and outputs.numel() == targets.numel():
            problem = f"--model returns {kind} for labels {list(targets.shape)}"
    elif is_tensor and (outputs.ndim, labels.ndim) == (2, 1):
        outside = labels[((labels < 0) & (labels != IGNORED)) | (labels >= outputs.shape[1])]
        if len(outside):
            problem = f"--dataset has the class {int(outside[0])}, and --model {kind[1]} logits"
    try:
        if not problem:
            models.loss_and_counts(outputs, targets)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"loss_and_counts in models.py fails with {kind} of --model ({describe(error)})"
    if problem:
        raise DataError(f"{problem}: change one of them")


def _note_frozen_statistics(model: nn.Module) -> None:
    """Say that a layer with frozen weights still changes. PyTorch freezes parameters alone."""
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    moving = [name for name, m in norms if m.training and m.affine and not m.weight.requires_grad]
    if moving and distributed.rank() == 0:
        print(f"the running statistics of the frozen {moving[0]} still move: see docs/recipes.md")


def _check_same(model: nn.Module, sets: dict[str, Any]) -> None:
    """Compare what DDP does not, which looks at the parameters' sizes and strides only. Collective.

    Every rank compares itself with rank 0: the data, the names, shapes and dtypes of parameters and
    buffers, what is frozen, and the source of the model's classes.

    Args:
        model: before DDP wraps it.
        sets: all samples, before the ranks share them out, by name.

    Raises:
        UsageError: this rank differs. The job tells the other ranks, which wait at the end.
    """
    own = {name: fingerprint(dataset) for name, dataset in sets.items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        trained = ", trained" if tensor.requires_grad else ""
        own[name] = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{trained}"
    for kind in {type(module) for module in model.modules()}:
        with suppress(OSError, TypeError):  # a class that was written in a notebook has no source
            if not kind.__module__.startswith("torch."):
                source = inspect.getsource(kind).encode()
                own[f"the class {kind.__name__} with the hash"] = f"{zlib.crc32(source):08x}"
    first = distributed.broadcast(own)
    for name in first | own:
        if own.get(name) != first.get(name):
            raise UsageError(
                f"rank {distributed.rank()} has {name}: {own.get(name)}, rank 0 {first.get(name)}:"
                " start every rank with the same code and data (data often differ by the order of a"
                " Python set, or a random split without a seed)"
            )
    distributed.gather(0)


def warm_up(
    model: DistributedDataParallel,
    loader: DataLoader,
    transform: data.Transform,
    precision: Precision,
) -> None:
    """Let DDP make its final buckets, in a step that changes nothing. Collective.

    DDP groups the gradients into new buckets after its first backward. Sums of three or more ranks
    then differ in their last bit. After this step a fresh run and a resumed one are bit-identical.

    Args:
        loader: of the training. Its first batch is used, since a compiled model would compile again
            for another size.
        precision: that of the training, for the same reason.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    dataset: Any = loader.dataset
    batch = read_batch(dataset, range(min(len(dataset), loader.batch_size or 1)))
    images, targets = transform(*batch, train=True)
    with precision.autocast():
        loss, _ = models.loss_and_counts(model(images), targets)
    loss.backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
