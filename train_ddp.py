"""Train MNIST with DistributedDataParallel: one process for each device, on any number of machines.

    torchrun --standalone --nproc_per_node 2 train_ddp.py
    python train_ddp.py --nprocs 2
    python train_ddp.py

On two machines with eight GPUs each, where $HOST0 is the address of the first, and $NODE is 0 on
the first and 1 on the second:

    torchrun --nnodes 2 --node_rank $NODE --master_addr $HOST0 --nproc_per_node 8 train_ddp.py

Read it next to train_single.py: `diff train_single.py train_ddp.py`.
"""

import argparse
import os
import sys
from datetime import timedelta

# DDP: gradients travel while the backward computes. The class for NCCL that torch 2.15 takes by
# default makes the backward wait for them, and 0 chooses the class before it. Remove this line when
# a later torch has changed that. A value that is set already stays.
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")

import utils.early  # noqa: F401  first, since torch reads these settings when it is imported

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import data
import models
from utils import optim
from utils.cluster.launch import launch
from utils.device import setup_device
from utils.training import config
from utils.training.evaluation import evaluate
from utils.training.first_pass import first_pass
from utils.training.run import Run


# DDP: every process calls this function. Before that, `launch` below has made sure that no process
# is missing, and has set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
def train(args: argparse.Namespace) -> int:
    """Train with the flags ``args``, and return the exit status."""
    # DDP: the processes are numbered: RANK counts over all machines, LOCAL_RANK on this machine.
    # Each process takes a device of its own, or the only device that it can see.
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    device = setup_device(args.device, args.devices, args.threads, args.deterministic, local_rank)
    torch.manual_seed(args.seed)
    train_set, test_set = data.load(args.dataset, args.data_dir, device, args.data_on_device)
    # DDP: the backend connects the processes, NCCL between GPUs and gloo between CPUs. From here on
    # they can call collectives. All of them have to make the same calls, in the same order.
    dist.init_process_group(
        backend=args.backend,
        timeout=timedelta(seconds=args.timeout),
        device_id=device if "nccl" in args.backend else None,
    )

    # DDP: --batch-size is the share of each process. A step uses the batches of all processes, and
    # the learning rate below follows the size of that global batch.
    global_batch_size = args.batch_size * args.grad_accum_steps * world_size
    # DDP: the sampler, a DistributedSampler, shuffles the epoch alike on all ranks, and then gives
    # each rank its share.
    sampler = data.EpochSampler(train_set, global_batch_size, world_size, rank, args.seed)
    options = data.loader_options(test_set, args.num_workers, device)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    # DDP: each rank takes an unpadded share of the test set, so every sample counts exactly once.
    share = range(rank, len(test_set), world_size)
    test_loader = DataLoader(test_set, args.eval_batch_size, sampler=share, **options)
    transform = data.Transform(device, train_set, args.augment)

    raw_model = models.build_model(args.model, args.init_weights).to(device)
    if args.compile:
        raw_model.compile()
    # DDP: with SyncBN, batch normalisation takes its statistics from the global batch. Without it,
    # each rank normalises by its own batch.
    if args.sync_bn:
        raw_model = nn.SyncBatchNorm.convert_sync_batchnorm(raw_model)
    # DDP: wrapping broadcasts rank 0's weights, so that all ranks start from the same.
    model = DistributedDataParallel(
        raw_model,
        device_ids=None if device.type == "cpu" else [device],
        gradient_as_bucket_view=True,  # needs no second copy of the gradients
        bucket_cap_mb=args.bucket_cap_mb,
        find_unused_parameters=args.find_unused_parameters,
    )
    # DDP: only evaluations read running statistics, so the broadcast before them is enough. If
    # forwards in training read buffers (a codebook, a queue), remove this line. Then DDP broadcasts
    # rank 0's buffers before each forward. It is an attribute, since the deprecated argument would
    # also leave out the broadcast at the start.
    model.broadcast_buffers = False
    dtype = torch.float16 if args.amp == "fp16" else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=args.amp != "off")
    # DDP: this is also a first backward, after which DDP groups the gradients into its final
    # buckets. So a resumed run computes the same sums, to the last bit, as an uninterrupted one.
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

    # DDP: rank 0 alone writes the folder, checkpoints and logs. All ranks load what rank 0 reads.
    # The ranks draw different random numbers, since Run seeds each step by --seed and the rank.
    with Run(args, device, sampler, raw_model, optimizer, scaler, rank=rank) as run:
        for epoch in run.epochs():  # from where a resume goes on
            sampler.set_epoch(epoch)
            model.train()
            for micro_step, batch in enumerate(run.batches(train_loader), start=1):
                is_last = micro_step % args.grad_accum_steps == 0
                # DDP: with accumulation, only the last backward of a step averages gradients. The
                # context model.no_sync() sets the same attribute.
                model.require_backward_grad_sync = is_last
                images, targets = transform(batch, train=True)
                with autocast:
                    # DDP: each rank computes its own batch, with its own copy of the model.
                    outputs = model(images)
                    loss, counted = models.loss_and_counts(outputs, targets, args.label_smoothing)
                # DDP: the backward averages the gradients over the ranks, bucket by bucket, while
                # it computes them. optimizer.step() sends nothing.
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
            # DDP: each rank evaluates the model that rank 0 saves, with rank 0's running
            # statistics. NCCL sends contiguous memory only.
            for each in raw_model.buffers():
                buffer = each.contiguous()
                dist.broadcast(buffer, src=0)
                each.copy_(buffer)
            test = evaluate(raw_model, test_loader, transform, autocast)
            # DDP: each rank has counted its own samples. Their sums are added up over the ranks, in
            # place and on the CPU, before anything is divided.
            for metrics in (run.metrics, test):
                dist.all_reduce(metrics.sums)
            run.end_epoch(test)
    # DDP: not in a `finally`. After an error on one rank, the others wait in a collective, and this
    # call could wait for them.
    dist.destroy_process_group()
    return run.exit_status


def main() -> int:
    """Parse the command line, train, and return the exit status."""
    # DDP: there are more flags. `launch` finds out how this process was started, meets the others,
    # and calls `train`.
    args = config.parse_args("ddp", __doc__)
    return launch(train, args)


if __name__ == "__main__":
    sys.exit(main())
