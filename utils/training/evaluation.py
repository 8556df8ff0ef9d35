"""Evaluate a model on this process's share of the test set."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import data
import models
from utils.datasets.loader import batches
from utils.device import Precision
from utils.metrics import Metrics


@torch.no_grad()
def evaluate(
    raw_model: nn.Module, loader: Iterable[Any], transform: data.Transform, precision: Precision
) -> Metrics:
    """Return the sums of what ``models.loss_and_counts`` counts over the loader's samples.

    The model is the unwrapped one, because a forward of DDP may be a collective. Each rank may have
    a different number of batches, or none.
    """
    raw_model.eval()
    metrics = Metrics(transform.device)
    for images, targets in batches(loader):
        images, targets = transform(images, targets)
        with precision.autocast():
            metrics.update(*models.loss_and_counts(raw_model(images), targets))
    return metrics
