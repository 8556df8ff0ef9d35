"""What summary.json says of a run."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from utils import distributed
from utils.metrics import Metrics
from utils.training.progress import Progress
from utils.training.timing import Throughput, seconds_since_start
from utils.weights import weights_sha256

RECORDED = ("technique", "dataset", "model", "batch_size", "seed", "amp")  # flags


def collect_facts(
    args: argparse.Namespace,
    device: torch.device,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
) -> dict[str, Any]:
    """Return what is known before the first step. Its arguments are those of ``Run``."""
    batch = progress.global_batch_size
    return {
        "script": Path(sys.argv[0]).name,
        **{name: getattr(args, name) for name in RECORDED},
        "parameters": sum(p.numel() for p in model.parameters()),
        "world_size": distributed.world_size(),
        "num_devices": batch // (args.batch_size * args.grad_accum_steps),
        "device": device.type,
        "backend": distributed.backend(device),
        "threads": torch.get_num_threads(),
        "global_batch_size": batch,
        "lr": optimizer.param_groups[0]["lr"],
        "torch_version": str(torch.__version__),
        "resumed_from": progress.global_step or None,
    }


def collect_results(
    progress: Progress, throughput: Throughput, memory: list[int], model: nn.Module
) -> dict[str, Any]:
    """Return what is known after the last step.

    Args:
        memory: peak bytes of each rank.
    """
    results: dict[str, Any] = {"epochs": progress.epoch, "global_step": progress.global_step}
    for part, sums in progress.evaluated.items():
        results |= Metrics(torch.device("cpu"), sums).report(part)
    return results | {
        "train_images_per_second": throughput.images_per_second(),
        "timed_steps": throughput.timed_steps,  # of this process, the first and the last
        "startup_seconds": throughput.startup_seconds,
        "train_seconds": throughput.train_seconds,
        "total_seconds": seconds_since_start(),
        "peak_memory_bytes": memory,
        "weights_sha256": weights_sha256(model),
    }
