"""Train by a bare PyTorch loop, without a framework, to see what the scripts' comfort costs.

    python scripts/tools/bare.py --max-steps 200 --threads 1

The loop does forward, backward and step over batches that lie ready on the device, nothing else. It
accepts the flags of train_single.py. Only those about model, data set, batch, device and precision
have an effect.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import utils.early  # noqa: F401  first, so that threads wait as in the scripts

import torch

import data
import models
from utils import config, optim
from utils.device import Precision, peak_memory, select_devices, setup_device, synchronize
from utils.errors import UsageError, guard
from utils.files import write_json
from utils.throughput import WARMUP_STEPS

BATCHES = 50  # that lie ready, and are used again and again


def run(args: argparse.Namespace) -> int:
    device = select_devices(args.device, args.devices)[0]
    setup_device(device, args.threads)
    torch.manual_seed(args.seed)
    train_set, _ = data.load_dataset(args.dataset, args.data_dir)
    size, steps = args.batch_size, args.max_steps or len(train_set) // args.batch_size
    if steps <= WARMUP_STEPS or len(train_set) < size:
        raise UsageError(f"{steps} steps are too few to be timed")
    batches = [
        data.Transform(device, args.dataset)(*train_set[begin : begin + size])
        for begin in range(0, min(BATCHES, len(train_set) // size) * size, size)
    ]
    model = models.build_model(args.model).to(device).train()
    optimizer = optim.build_optimizer(model, args.lr, args.momentum, args.weight_decay)
    precision = Precision(device, args.amp)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
    begin = 0.0
    for step in range(steps):
        if step == WARMUP_STEPS:
            synchronize(device)
            begin = time.perf_counter()
        images, labels = batches[step % len(batches)]
        with precision.autocast():
            loss, _ = models.loss_and_correct(model(images), labels, args.label_smoothing)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    synchronize(device)
    speed = (steps - WARMUP_STEPS) * size / (time.perf_counter() - begin)
    print(f"{speed:,.0f} images/s")
    if args.run_dir:
        Path(args.run_dir).mkdir(parents=True, exist_ok=True)
        found = {"train_images_per_second": speed, "peak_memory_bytes": [peak_memory(device)]}
        write_json(Path(args.run_dir, "summary.json"), found)
    return 0


if __name__ == "__main__":
    sys.exit(guard(run, config.parse_args("single", __doc__)))
