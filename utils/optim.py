"""Learning-rate scaling, the optimizer, and a schedule that any world size can resume."""

import math

import torch
from torch import nn

WARMUP_START = 0.1  # share of the peak at the first step
LONGEST_WARMUP = 0.3  # share of the training; a single epoch of warm-up would leave nothing of one


def scale_lr(lr: float, rule: str, global_batch_size: int, reference: int) -> float:
    """Return the learning rate for a global batch, given the one for the reference batch.

    ``linear`` is the rule of Goyal et al. (https://arxiv.org/abs/1706.02677), to be used with
    warm-up; ``sqrt`` that of Krizhevsky (https://arxiv.org/abs/1404.5997).
    """
    ratio = global_batch_size / reference
    return lr * {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def build_optimizer(
    model: nn.Module, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Build SGD, with Nesterov's momentum where there is any (which torch has only then)."""
    return torch.optim.SGD(
        model.parameters(),
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=momentum > 0,
        fused=all(p.device.type in ("cpu", "cuda") for p in model.parameters()),
    )


class Schedule:
    """Linear warm-up, then half a cosine to zero, as a function of images seen.

    Not one of ``torch.optim.lr_scheduler``: those count steps, whose number and size change with
    the world size, and ``OneCycleLR`` refuses to go on when its ``total_steps`` changed. A pure
    function of the position has nothing to store and nothing to restore.

    Args:
        optimizer: its learning rates are taken as the peak.
        epoch_size: samples in the training set.
        epochs: length of the training.
        warmup_epochs: length of the warm-up, bounded to ``LONGEST_WARMUP`` of the whole.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        epoch_size: int,
        epochs: int,
        warmup_epochs: float,
    ) -> None:
        self.optimizer = optimizer
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.total_images = epochs * epoch_size
        self.warmup_images = min(warmup_epochs, LONGEST_WARMUP * epochs) * epoch_size

    def factor(self, images: int) -> float:
        """Return the share of the peak, 0 to 1, for the step that starts after ``images``."""
        if images < self.warmup_images:
            return WARMUP_START + (1 - WARMUP_START) * images / self.warmup_images
        left = (self.total_images - images) / (self.total_images - self.warmup_images)
        return 0.5 - 0.5 * math.cos(math.pi * left)

    def set(self, images: int) -> None:
        """Set the learning rates for the optimizer step that starts after ``images``."""
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.factor(images)

    @property
    def lr(self) -> float:
        """The learning rate of the latest step."""
        return self.optimizer.param_groups[0]["lr"]
