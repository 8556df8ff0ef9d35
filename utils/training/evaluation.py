"""Evaluate a model on this process's share of the test set."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import data
import models
from utils import signals
from utils.datasets.loader import batches
from utils.metrics import Metrics


@torch.no_grad()
def evaluate(
    raw_model: nn.Module,
    loader: Iterable[Any],
    transform: data.Transform,
    autocast: torch.autocast,
    loss_and_counts: Callable[..., Any] | None = None,
) -> Metrics:
    """Return the sums of what ``models.loss_and_counts``, or yours, counts of the samples.

    The model is the unwrapped one, because a forward of DDP may be a collective. Each rank may have
    a different number of batches, or none. A stop signal ends the evaluation on the rank that got
    it, and the sums say so: once they are added up, every rank knows.
    """
    raw_model.eval()
    loss_and_counts = loss_and_counts or models.loss_and_counts
    metrics = Metrics(transform.device)
    for batch in batches(loader):
        if signals.received():
            metrics.interrupt()
            break
        inputs, targets = transform(batch)
        with autocast:
            metrics.update(*loss_and_counts(raw_model(inputs), targets))
    return metrics
