"""Learning-rate scaling, and a schedule that any world size can resume."""

import math

import torch
from torch.optim import SGD

REFERENCE_BATCH = 96  # images, for which --lr is meant
WARMUP_START = 0.1  # of the peak at the first step
LONGEST_WARMUP = 0.3  # of the training, since a run of one epoch would otherwise be all warm-up
RULES = ("capped-linear", "linear", "sqrt", "none")
LARGEST_RATIO = 4  # of a rate to that of the reference batch, at which linear scaling is capped


def scale_lr(lr: float, rule: str, global_batch_size: int) -> float:
    """Return the learning rate for a global batch, given the one for ``REFERENCE_BATCH``.

    ``linear`` is the rule of Goyal et al. (https://arxiv.org/abs/1706.02677), which needs a
    warm-up. ``sqrt`` is the rule of Krizhevsky (https://arxiv.org/abs/1404.5997). ``capped-linear``
    is linear up to ``LARGEST_RATIO``. Beyond, an epoch of large batches has too few steps to
    recover from steps that are too long.
    """
    ratio = global_batch_size / REFERENCE_BATCH
    factors = {
        "capped-linear": min(ratio, LARGEST_RATIO),
        "linear": ratio,
        "sqrt": math.sqrt(ratio),
        "none": 1.0,
    }
    return lr * factors[rule]


def fill_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter of SGD the momentum of 0 that its first step would begin with.

    The fused SGD (torch 2.15) fails if a parameter gets its first gradient later than the others,
    as in a branch of the model that was not taken before.
    """
    for group in optimizer.param_groups:
        if isinstance(optimizer, SGD) and group["momentum"]:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    state = optimizer.state[parameter]
                    state.setdefault("momentum_buffer", torch.zeros_like(parameter))


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
