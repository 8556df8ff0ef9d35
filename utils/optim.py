"""Learning-rate scaling, the optimizer, and a schedule that any world size can resume."""

import math

import torch
from torch import nn

from utils.device import import_dynamo

WARMUP_START = 0.1  # of the peak at the first step
LONGEST_WARMUP = 0.3  # of the training, since a run of one epoch would otherwise be all warm-up
RULES = ("capped-linear", "linear", "sqrt", "none")
LARGEST_RATIO = 4  # of a rate to that of the reference batch, at which linear scaling is capped


def scale_lr(lr: float, rule: str, global_batch_size: int, reference: int) -> float:
    """Return the learning rate for a global batch, given the one for the reference batch.

    ``linear`` is the rule of Goyal et al. (https://arxiv.org/abs/1706.02677), which needs a
    warm-up. ``sqrt`` is the rule of Krizhevsky (https://arxiv.org/abs/1404.5997). ``capped-linear``
    is linear up to ``LARGEST_RATIO``. Beyond, an epoch of large batches has too few steps to
    recover from steps that are too long.
    """
    ratio = global_batch_size / reference
    factors = min(ratio, LARGEST_RATIO), ratio, math.sqrt(ratio), 1.0
    return lr * dict(zip(RULES, factors, strict=True))[rule]


def build_optimizer(
    model: nn.Module, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Build SGD. It uses Nesterov's momentum, which torch accepts only with a momentum above 0."""
    import_dynamo()
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=momentum > 0,
        fused=all(p.device.type in ("cpu", "cuda") for p in model.parameters()),
    )
    if momentum > 0:
        # The first step would make these buffers. But the fused SGD fails (torch 2.15) if a
        # parameter gets its first gradient later than others, as in a branch of the network that
        # was not taken before.
        for parameter in model.parameters():
            if parameter.requires_grad:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class Schedule:
    """Linear warm-up, then half a cosine to zero, as a function of samples seen.

    The schedulers of ``torch.optim.lr_scheduler`` count steps, whose number and size change with
    the world size. ``OneCycleLR`` refuses to continue if its ``total_steps`` changed. A pure
    function of the position has no state to save and to load.

    Args:
        optimizer: its learning rates are taken as the peak.
        epoch_size: samples in the training set.
        epochs: length of the training.
        warmup_epochs: length of the warm-up, bounded to ``LONGEST_WARMUP`` of the whole.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, epoch_size: int, epochs: float, warmup_epochs: float
    ) -> None:
        self.optimizer = optimizer
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.total_samples = epochs * epoch_size
        self.warmup_samples = min(warmup_epochs, LONGEST_WARMUP * epochs) * epoch_size

    def factor(self, samples_seen: int) -> float:
        """Return the learning rate of the step after ``samples_seen``, as a share of its peak."""
        if samples_seen < self.warmup_samples:
            return WARMUP_START + (1 - WARMUP_START) * samples_seen / self.warmup_samples
        left = (self.total_samples - samples_seen) / (self.total_samples - self.warmup_samples)
        return 0.5 - 0.5 * math.cos(math.pi * left)

    def set(self, samples_seen: int) -> None:
        """Set the learning rates for the optimizer step that starts after ``samples_seen``."""
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.factor(samples_seen)
