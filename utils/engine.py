"""The batch loop, the same for one device, DP and DDP. It knows nothing of processes."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from data import Transform
from models import loss_and_correct
from utils.device import Precision, seed_step
from utils.errors import UserError
from utils.metrics import Metrics
from utils.optim import Schedule
from utils.progress import Progress

Batches = Iterable[tuple[Tensor, Tensor]]
CHECK_STEPS = 50  # between looks at the loss on a GPU, each of which waits for it


class NonFiniteLoss(UserError):
    """The training diverged; the weights of this step were not saved."""


def train_one_epoch(
    model: nn.Module,
    loader: Batches,
    transform: Transform,
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
        loader: batches of this process; every ``grad_accum_steps`` of them make an optimizer step.
        rank: chooses the random numbers of this process.
        no_sync: context for the micro-steps before the last of a step, in which DDP keeps its
            gradients to itself.
        after_step: called after each optimizer step; the epoch ends here if it returns True.

    Returns:
        The sums of this process, with those that ``progress`` brought along added on rank 0.

    Raises:
        NonFiniteLoss: the training diverged.
    """
    model.train()
    device = transform.device
    scaler = precision.scaler
    # What was seen before a resume is counted once: by rank 0.
    metrics = Metrics(device, progress.train_sums if rank == 0 else None)
    # Where only an evaluation is owed, the log gets the latest step's rate.
    if not progress.has_step_left:
        schedule.set(max(0, progress.samples_seen - progress.global_batch_size))
    for micro_step, (images, targets) in enumerate(loader):
        is_last = (micro_step + 1) % grad_accum_steps == 0
        if micro_step % grad_accum_steps == 0:
            if not progress.has_step_left:
                break
            seed_step(device, seed, rank, progress.samples_seen)
        images, targets = transform(images, targets, train=True)
        # DDP's reduction is set up by the forward and done by the backward: no_sync needs both.
        with nullcontext() if is_last else no_sync():
            with record_function("forward"), precision.autocast():  # its name in a profile
                outputs = model(images)
                targets = targets.to(outputs.device)  # where DataParallel gathers its outputs
                loss, correct = loss_and_correct(outputs, targets, label_smoothing)
            if device.type == "cpu" or progress.global_step % CHECK_STEPS == 0:
                _check_finite(loss.item(), progress.global_step + 1, rank)
            scaler.scale(loss / grad_accum_steps).backward()
        metrics.update(loss, correct)
        if not is_last:
            continue
        if max_grad_norm:
            scaler.unscale_(optimizer)  # the norm is that of the gradient, not of its multiple
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        schedule.set(progress.samples_seen)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        progress.step()
        if after_step(metrics):
            break
    if metrics.count:
        _check_finite(metrics.loss, progress.global_step, rank)
    return metrics


def _check_finite(loss: float, step: int, rank: int) -> None:
    if not math.isfinite(loss):
        raise NonFiniteLoss(
            f"the loss is {loss} at step {step} on rank {rank}: go on from the last checkpoint"
            " with a lower --lr, a longer --warmup-epochs or --max-grad-norm"
        )


@torch.inference_mode()
def evaluate(
    raw_model: nn.Module, loader: Batches, transform: Transform, precision: Precision
) -> tuple[Metrics, Tensor]:
    """Evaluate the model on this process's share of the test set.

    Takes the unwrapped model: each rank may hold a different number of batches (or none), and a
    forward of DDP may be a collective.

    Returns:
        The sums over the loader's samples, and what was predicted for each of them, in their order:
        float64 [N, 2] on the CPU, the class and its probability (zeros where the model's outputs
        are no logits [B, C]).
    """
    raw_model.eval()
    metrics = Metrics(transform.device)
    predictions = [torch.zeros(0, 2, dtype=torch.float64)]
    for images, targets in loader:
        images, targets = transform(images, targets)
        with precision.autocast():
            outputs = raw_model(images)
            metrics.update(*loss_and_correct(outputs, targets))
        if outputs.ndim == 2:
            # In float64, in which no two logits round to one probability.
            confidences, classes = outputs.cpu().double().softmax(1).max(1)
            predictions.append(torch.stack([classes.double(), confidences], 1))
        else:
            predictions.append(predictions[0].new_zeros(len(outputs), 2))
    return metrics, torch.cat(predictions)
