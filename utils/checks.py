"""What is tried and compared before the first step, since it would fail late or not at all."""

import hashlib
import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import data
import models
from utils import distributed
from utils.datasets.sources import DataError
from utils.errors import UsageError, describe


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
    if not (len(train_set) and len(test_set)):
        raise DataError("--dataset has an empty set: it needs images to train and to test")
    _check_same(model, train_set, test_set)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise DataError("--model has no parameter to train: unfreeze some")
    model.eval()  # so that the images leave no trace in running statistics
    for dataset in (train_set, test_set):
        images, labels = data.read_batch(dataset, sorted({0, len(dataset) - 1}))
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
    kind = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if isinstance(outputs, Tensor) and targets.is_floating_point():
        if outputs.shape != targets.shape and outputs.numel() == targets.numel():
            raise DataError(
                f"--model returns {kind} for labels {list(targets.shape)}: give both the same"
                " shape, or the loss compares each image with every label"
            )
    elif isinstance(outputs, Tensor) and (outputs.ndim, labels.ndim) == (2, 1):
        strange = labels[(labels < 0) | (labels >= outputs.shape[1])]
        if len(strange):
            raise DataError(
                f"--dataset has the class {int(strange.max())}, and --model {outputs.shape[1]}"
                " logits, for classes from 0 on: give it one for each class"
            )
    try:
        models.loss_and_counts(outputs, targets)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"--model returns {kind} for {len(targets)} images, and loss_and_counts in models.py"
            f" fails with it ({describe(error)}): cross-entropy takes logits [B, C]"
        ) from error


def _note_frozen_statistics(model: nn.Module) -> None:
    """Say that a layer with frozen weights still changes. PyTorch freezes parameters alone."""
    norms = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    moving = [name for name, m in norms if m.training and m.affine and not m.weight.requires_grad]
    if moving and distributed.rank() == 0:
        print(
            f"the weights of {moving[0]} are frozen, but its running statistics still follow the"
            f" batches, as in {len(moving)} layers: docs/recipes.md says how to freeze them as well"
        )


def _check_same(model: nn.Module, train_set: Any, test_set: Any) -> None:
    """Compare what DDP does not, which looks at the parameters' sizes and strides only. Collective.

    Every rank compares itself with rank 0: the data, the names, shapes and dtypes of parameters and
    buffers, what is frozen, and the source of the model's classes.

    Args:
        model: before DDP wraps it.
        train_set, test_set: all samples, before the ranks share them out.

    Raises:
        UsageError: this rank differs. The job tells the other ranks, which wait at the end.
    """
    if distributed.world_size() == 1:
        return
    own = {f"training {what}": text for what, text in data.fingerprint(train_set).items()}
    own |= {f"test {what}": text for what, text in data.fingerprint(test_set).items()}
    own |= {name: _describe(parameter) for name, parameter in model.named_parameters()}
    own |= {f"the buffer {name}": _describe(buffer) for name, buffer in model.named_buffers()}
    own["model classes whose source has the hash"] = _source_hash(model)
    first = distributed.broadcast(own)
    # An empty text says nothing.
    differing = [name for name in first | own if len({own.get(name), first.get(name)} - {""}) > 1]
    if differing:
        name, rank = differing[0], distributed.rank()
        raise UsageError(
            f"rank {rank} has {name}: {own.get(name)}, rank 0 {first.get(name)}: start every rank"
            " with the same code and data (data often differ by the order of a Python set, or a"
            " random split without a seed)"
        )
    distributed.gather(0)


def _describe(tensor: Tensor) -> str:
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{frozen}"


def _source_hash(model: nn.Module) -> str:
    """Return a hash of the source of the model's own classes, as far as it can be read."""
    classes = {type(module) for module in model.modules()}
    with suppress(OSError, TypeError):  # a class that was written in a notebook has none
        own = [kind for kind in classes if not kind.__module__.startswith("torch.")]
        sources = "".join(sorted(map(inspect.getsource, own)))
        return hashlib.sha256(sources.encode()).hexdigest()[:16]
    return "unknown"
