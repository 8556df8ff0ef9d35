"""The batch loop, the same for one device, DP and DDP. It knows nothing of processes."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data import Preparation
from utils.checkpoint import Progress
from utils.metrics import Metrics
from utils.optim import Schedule
from utils.profiling import mark
from utils.runtime import Precision, seed_step

Batches = Iterable[tuple[Tensor, Tensor]]
CHECK_STEPS = 50  # between looks at the loss on a GPU, each of which waits for it


class NonFiniteLoss(Exception):
    """The training diverged; the weights of this step were not saved."""

    exit_status = 1


def train_one_epoch(
    model: nn.Module,
    loader: Batches,
    prepare: Preparation,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    precision: Precision,
    progress: Progress,
    *,
    grad_accum_steps: int = 1,
    max_grad_norm: float | None = None,
    label_smoothing: float = 0.0,
    seed: int = 0,
    rank: int = 0,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
    after_step: Callable[[Metrics], bool] = lambda metrics: False,
) -> Metrics:
    """Train from where ``progress`` stands to the end of the epoch, and keep it up to date.

    Args:
        model: perhaps wrapped by DP or DDP.
        loader: batches of this process, each of ``grad_accum_steps`` of them an optimizer step.
        rank: chooses the random numbers of this process.
        no_sync: context for the micro-steps before the last of a step, in which DDP keeps its
            gradients to itself.
        after_step: called after each optimizer step; the epoch ends here if it returns True.

    Returns:
        The sums of this process, with those that ``progress`` brought along added on rank 0.
    """
    model.train()
    device = prepare.device
    scaler = precision.scaler
    # What was seen before a resume is counted once: by rank 0.
    metrics = Metrics(device, progress.train_sums if rank == 0 else None)
    for micro_step, (images, labels) in enumerate(loader):
        is_last = (micro_step + 1) % grad_accum_steps == 0
        if micro_step % grad_accum_steps == 0:
            seed_step(device, seed, rank, progress.images)
        with mark("prepare"):
            images, labels = prepare(images, labels, train=True)
        # DDP's reduction is set up by the forward and done by the backward: no_sync needs both.
        with nullcontext() if is_last else no_sync():
            with mark("forward"), precision.autocast():
                logits = model(images)
                labels = labels.to(logits.device)  # where DataParallel gathers its outputs
                loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
            if device.type == "cpu" or progress.global_step % CHECK_STEPS == 0:
                _check_finite(loss.item(), progress.global_step + 1, rank)
            with mark("backward"):
                scaler.scale(loss / grad_accum_steps).backward()
        metrics.update(logits, labels, loss)
        if not is_last:
            continue
        if max_grad_norm is not None:
            with mark("clip_grad_norm"):
                scaler.unscale_(optimizer)  # the norm is that of the gradient, not of its multiple
                nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        schedule.set(progress.images)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        progress.step()
        if after_step(metrics):
            break
    return metrics


def _check_finite(loss: float, step: int, rank: int) -> None:
    if not math.isfinite(loss):
        raise NonFiniteLoss(
            f"the loss is {loss} at step {step} on rank {rank}: go on from the last checkpoint"
            " with a lower --lr, a longer --warmup-epochs or --max-grad-norm"
        )


@torch.inference_mode()
def evaluate(
    raw_model: nn.Module, loader: Batches, prepare: Preparation, precision: Precision
) -> Metrics:
    """Return the sums over the loader's samples, this process's share of the test set.

    Takes the unwrapped model: each rank may hold a different number of batches (or none), and a
    forward of DDP may be a collective.
    """
    raw_model.eval()
    metrics = Metrics(prepare.device)
    for images, labels in loader:
        images, labels = prepare(images, labels)
        with precision.autocast():
            metrics.update(raw_model(images), labels)
    return metrics
