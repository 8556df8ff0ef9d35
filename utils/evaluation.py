"""Evaluate a model on this process's share of the test set."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

import data
from models import loss_and_correct
from utils.device import Precision
from utils.metrics import Metrics


@torch.inference_mode()
def evaluate(
    raw_model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    transform: data.Transform,
    precision: Precision,
) -> Metrics:
    """Return loss, correct predictions and count of the loader's samples, as sums.

    The model is the unwrapped one, because a forward of DDP may be a collective. Each rank may have
    a different number of batches, or none.
    """
    raw_model.eval()
    metrics = Metrics(transform.device)
    for images, targets in data.batches(loader):
        images, targets = transform(images, targets)
        with precision.autocast():
            metrics.update(*loss_and_correct(raw_model(images), targets))
    return metrics
