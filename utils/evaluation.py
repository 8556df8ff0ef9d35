"""Evaluate a model on this process's share of the test set."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

import data
import models
from utils.device import Precision
from utils.metrics import Metrics


@torch.no_grad()
def evaluate(
    raw_model: nn.Module,
    loader: Iterable[tuple[Tensor, Tensor]],
    transform: data.Transform,
    precision: Precision,
) -> Metrics:
    """Return the sums of what ``models.loss_and_counts`` counts over the loader's samples.

    The model is the unwrapped one, because a forward of DDP may be a collective. Each rank may have
    a different number of batches, or none.
    """
    raw_model.eval()
    metrics = Metrics(transform.device)
    for images, targets in data.batches(loader):
        images, targets = transform(images, targets)
        with precision.autocast():
            metrics.update(*models.loss_and_counts(raw_model(images), targets))
    return metrics
