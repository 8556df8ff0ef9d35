"""Train MNIST with nn.DataParallel: one process, with a thread for each device.

    python train_dp.py
    python train_dp.py --devices 0,1 --output-device 1
    python train_dp.py --device cpu --replicas 2

Read it next to train_single.py: `diff train_single.py train_dp.py`.
"""

import argparse
import sys

import utils.early  # noqa: F401  first, since torch reads these settings when it is imported

import torch
from torch import nn
from torch.utils.data import DataLoader

import data
import models
from utils import optim
from utils.data_parallel import CPUDataParallel, keep_autocast_dtype, replica_devices
from utils.device import setup_device
from utils.errors import guard
from utils.training import config
from utils.training.evaluation import evaluate
from utils.training.first_pass import first_pass
from utils.training.run import Run


def train(args: argparse.Namespace) -> int:
    """Train with the flags ``args``, and return the exit status."""
    device = setup_device(args.device, args.devices, args.threads, args.deterministic)
    # DP: one process uses several devices. The model lives on the first one.
    devices = replica_devices(args.device, args.devices, args.replicas, args.output_device)
    torch.manual_seed(args.seed)
    train_set, test_set = data.load(args.dataset, args.data_dir, device, args.data_on_device)

    # DP: --batch-size is the share of each device.
    global_batch_size = args.batch_size * len(devices) * args.grad_accum_steps
    sampler = data.EpochSampler(train_set, global_batch_size, seed=args.seed)
    options = data.loader_options(test_set, args.num_workers, device)
    # DP: the loader packs one batch for all devices, and each forward splits it.
    train_loader = DataLoader(train_set, args.batch_size * len(devices), sampler=sampler, **options)
    test_loader = DataLoader(test_set, args.eval_batch_size, **options)
    transform = data.Transform(device, train_set, args.augment)

    raw_model = models.build_model(args.model, args.init_weights).to(device)
    if args.compile:
        raw_model.compile()
    # DP: wrapping copies nothing yet. On a CPU nn.DataParallel would only call the model. So a CPU
    # gets a stand-in, which runs the same algorithm on threads.
    if device.type != "cpu":
        model = nn.DataParallel(raw_model, device_ids=devices, output_device=args.output_device)
    else:
        model = CPUDataParallel(raw_model, len(devices))
    dtype = torch.float16 if args.amp == "fp16" else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=args.amp != "off")
    # DP: autocast belongs to a thread, and PyTorch's threads for the copies would forget bf16.
    keep_autocast_dtype(raw_model, device.type, dtype)
    first_pass(model, train_loader, test_loader, transform, autocast)

    lr = optim.scale_lr(args.lr, args.lr_scaling, global_batch_size)
    optimizer = torch.optim.SGD(
        raw_model.parameters(),
        lr=lr,
        momentum=args.momentum,
        weight_decay=args.weight_decay,
        nesterov=args.momentum > 0,
        fused=True,  # one kernel for all parameters
    )
    schedule = optim.Schedule(optimizer, len(train_set), args.epochs, args.warmup_epochs)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")

    with Run(args, device, sampler, raw_model, optimizer, scaler) as run:
        for epoch in run.epochs():  # from where a resume goes on
            sampler.set_epoch(epoch)
            model.train()
            for micro_step, batch in enumerate(run.batches(train_loader), start=1):
                is_last = micro_step % args.grad_accum_steps == 0
                images, targets = transform(batch, train=True)
                with autocast:
                    # DP: every forward splits the batch, copies the model to every device, runs the
                    # copies in threads, and gathers their outputs on one device.
                    outputs = model(images)
                    loss, counted = models.loss_and_counts(outputs, targets, args.label_smoothing)
                # DP: the backward sums the gradients of all copies on the first device. The loss is
                # the mean over the gathered batch, so the sum is the gradient of the whole batch.
                scaler.scale(loss / args.grad_accum_steps).backward()
                run.metrics.update(loss, counted)
                if is_last:
                    if args.max_grad_norm:
                        scaler.unscale_(optimizer)  # or the norm would be that of scaled gradients
                        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    schedule.set(run.samples_seen)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    run.end_step()
            test = evaluate(raw_model, test_loader, transform, autocast)
            run.end_epoch(test)
    return run.exit_status


def main() -> int:
    """Parse the command line, train, and return the exit status."""
    # DP: with the flags --replicas and --output-device.
    args = config.parse_args("dp", __doc__)
    return guard(train, args)


if __name__ == "__main__":
    sys.exit(main())
