"""One pass before the first step, which changes nothing.

It finds what would fail late or not at all, and does what would make the first step slow.
"""

import inspect
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader

import data
import models
from utils import distributed
from utils.datasets.loader import fingerprint, read_batch
from utils.datasets.sources import DataError
from utils.device import synchronize
from utils.errors import UsageError, describe, explain

# Of an error that the GPU or its libraries report. It says nothing about the shape of the images.
OF_DEVICE = ("CUDA", "cuda", "CUDNN", "CUBLAS", "HIP", "NCCL")


def first_pass(
    model: nn.Module,
    train_loader: DataLoader,
    test_loader: DataLoader,
    transform: data.Transform,
    autocast: torch.autocast,
    loss_and_counts: Callable[..., Any] | None = None,
) -> None:
    """Check that model, data and loss fit, and run a forward and a backward. Collective.

    What does not fit is one line. In a step on a GPU, a class without a logit is an assert in a
    kernel, which names nothing. Ranks with other data or another model are found as well, since
    they would train without an error.

    The forward and the backward load what the first step would load: kernels, and the algorithms
    that cuDNN tries. Afterwards parameters, buffers, gradients and generators are as they were. The
    samplers have not moved, and no loader worker has been started.

    DDP also makes its final buckets. It groups the gradients once more after its first backward, in
    the order in which they came. Sums over three or more ranks then differ in their last bit. After
    this pass a fresh run and a resumed one compute the same bits.

    Args:
        model: on the device of ``transform``, wrapped or not.
        train_loader, test_loader: of the data sets that ``data.load`` returns.
        autocast: of the training, since a compiled model would compile again for another dtype.
        loss_and_counts: yours, or that of ``models``.

    Raises:
        DataError: the model, or the mean of the data, does not fit the images, or the loss does not
            fit what the model returns.
        UsageError: this rank has other data or another model than rank 0, or nothing is trained.
    """
    loss_and_counts = loss_and_counts or models.loss_and_counts
    raw_model: nn.Module = model
    if isinstance(model, DataParallel | DistributedDataParallel):
        raw_model = model.module
    if not any(parameter.requires_grad for parameter in raw_model.parameters()):
        raise UsageError("--model has no parameter to train: all are frozen, or there is none")
    sets: dict[str, Any] = {"training": train_loader.dataset, "test": test_loader.dataset}
    if distributed.world_size() > 1:
        _check_same(raw_model, sets)
    for name, dataset in sets.items():
        if not len(dataset):
            raise DataError(f"the {name} set of --dataset is empty")
        _check_fits(raw_model, transform, dataset, loss_and_counts)
    model.train()
    _note_frozen_statistics(raw_model)

    buffers = [buffer.clone() for buffer in model.buffers()]
    with _kept_generators(transform.device):
        # A whole batch, since a compiled model would compile again for another size.
        dataset = sets["training"]
        batch = read_batch(dataset, range(min(len(dataset), train_loader.batch_size or 1)))
        inputs, targets = transform(batch, train=True)
        with autocast:
            loss, _ = loss_and_counts(model(inputs), targets)
        loss.backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    synchronize(transform.device)


@contextmanager
def _kept_generators(device: torch.device) -> Iterator[None]:
    """Leave the generators of random, numpy and torch as they are now."""
    own, numpy = random.getstate(), np.random.get_state()
    has_states = device.type in ("cuda", "xpu")
    gpus = range(torch.accelerator.device_count()) if has_states else ()
    try:
        with torch.random.fork_rng(gpus, device_type=device.type if has_states else "cuda"):
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpy)


@torch.no_grad()
def _check_fits(
    model: nn.Module,
    transform: data.Transform,
    dataset: Any,
    loss_and_counts: Callable[..., Any],
) -> None:
    """Try the model and the loss on two samples, where it leaves no trace."""
    model.eval()  # so that the images leave none in running statistics
    batch = read_batch(dataset, sorted({0, len(dataset) - 1}))
    try:
        inputs, targets = transform(batch)
        outputs = model.forward(inputs)  # ``model(inputs)`` would compile for a few images
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if explain(error) is not error or any(word in str(error) for word in OF_DEVICE):
            raise
        images = batch[0] if isinstance(batch, list | tuple) else batch
        form = list(images.shape[1:]) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(
            f"--model cannot take the images of --dataset, {form} ({describe(error)}): choose"
            " another --model, or change its layers (or mean and std of --dataset)"
        ) from None
    if isinstance(targets, Tensor):
        _check_loss(outputs, targets, getattr(dataset, "labels", targets), loss_and_counts)


def _check_loss(
    outputs: Any, targets: Tensor, labels: Tensor, loss_and_counts: Callable[..., Any]
) -> None:
    """Try the loss on the outputs for some images, whose shape and classes it may not compare."""
    problem, is_tensor = "", isinstance(outputs, Tensor)
    kind = list(outputs.shape) if is_tensor else type(outputs).__name__
    if is_tensor and targets.is_floating_point():
        if outputs.shape != targets.shape and outputs.numel() == targets.numel():
            problem = f"--model returns {kind} for labels {list(targets.shape)}"
    elif is_tensor and (outputs.ndim, labels.ndim) == (2, 1):
        outside = labels[((labels < 0) & (labels != models.IGNORED)) | (labels >= outputs.shape[1])]
        if len(outside):
            problem = f"--dataset has the class {int(outside[0])}, and --model {kind[1]} logits"
    try:
        if not problem:
            loss_and_counts(outputs, targets)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"loss_and_counts fails with {kind} of --model ({describe(error)})"
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
        model: without DDP's wrapper.
        sets: all samples, before the ranks share them out, by name.

    Raises:
        UsageError: this rank differs. The job tells the other ranks, which wait at the end.
    """
    own = {f"{name} data": fingerprint(dataset) for name, dataset in sets.items()}
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
