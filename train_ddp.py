"""Train MNIST with DistributedDataParallel: one process for each device, on any number of nodes.

    torchrun --standalone --nproc_per_node 2 train_ddp.py
    python train_ddp.py --nprocs 2
    python train_ddp.py

On two machines, of which the first has the address $HOST0, with $NODE 0 on it and 1 on the other:

    torchrun --nnodes 2 --node_rank $NODE --master_addr $HOST0 --nproc_per_node 2 train_ddp.py

Read it next to train_single.py: `diff train_single.py train_ddp.py`.
"""

import argparse
import os
import sys
from datetime import timedelta

import utils.early  # noqa: F401  first: it makes settings that torch reads when it is imported

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import data
import models
from utils import config, distributed, engine, optim, output, signals
from utils.checkpoint import Checkpointer
from utils.cluster.launch import Job, launch
from utils.device import Precision, select_devices, setup_device, setup_seed
from utils.logger import Logger
from utils.metrics import Metrics
from utils.progress import Progress
from utils.run_dir import open_run
from utils.weights import load_weights

# DDP: flags, run directory and logs go by this name.
TECHNIQUE = "ddp"


# DDP: one of several processes, which `launch` below has brought together.
def run(args: argparse.Namespace, job: Job) -> int:
    """Train as ``args`` say and return the exit status."""
    train_set, test_set = data.load_dataset(args.dataset, args.data_dir, signals.sleep)
    # DDP: the launcher has numbered the processes: RANK among all, LOCAL_RANK on this machine. Each
    # takes a device of its own (or the only one that it was given to see).
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    devices = select_devices(args.device, args.devices)
    device = devices[int(os.environ["LOCAL_RANK"]) % len(devices)]
    setup_device(device, args.threads, job.ranks_sharing_cores)
    # DDP: from here on collectives can be called: of NCCL between GPUs, of gloo between CPUs.
    backend = distributed.choose_backend(args.backend, device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=job.rendezvous(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=args.timeout),
        device_id=device if backend == "nccl" else None,
    )
    setup_seed(args.seed, args.deterministic)

    if args.data_on_device:
        train_set, test_set = train_set.to(device), test_set.to(device)
    # DDP: --batch-size is what each process gets. The sampler, a DistributedSampler, splits the
    # epoch before the loaders pack it: one batch of each rank make one batch of a single process.
    global_batch_size = args.batch_size * args.grad_accum_steps * world_size
    sampler = data.EpochSampler(train_set, global_batch_size, world_size, rank, args.seed)
    options = data.loader_options(train_set, args.num_workers, device)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    # DDP: an unpadded shard, so that every test sample counts exactly once.
    test_shard = range(rank, len(test_set), world_size)
    test_loader = DataLoader(test_set, data.EVAL_BATCH_SIZE, sampler=test_shard, **options)
    transform = data.Transform(device, args.dataset, args.augment)

    raw_model = models.build_model(args.model).to(device)
    init_report = None
    if args.init_weights:
        init_report = load_weights(raw_model, args.init_weights)
    if args.compile:
        raw_model.compile()
    # DDP: wrapping broadcasts the weights of rank 0, so that all start from the same; from then on
    # every backward averages the gradients over the ranks. optimizer.step() sends nothing.
    if args.sync_bn:
        raw_model = nn.SyncBatchNorm.convert_sync_batchnorm(raw_model)
    distributed.check_same(raw_model, images=[len(train_set), len(test_set)])
    model = DistributedDataParallel(
        raw_model,
        device_ids=None if device.type == "cpu" else [device],
        gradient_as_bucket_view=True,  # one copy of the gradients less
        bucket_cap_mb=args.bucket_cap_mb,
        find_unused_parameters=args.find_unused_parameters,
    )
    # Not sooner, or the wrapping would not send the buffers; once before each evaluation will do.
    model.broadcast_buffers = False
    # DDP: after its first backward DDP groups the gradients anew, and sums of three or more ranks
    # then differ in their last bit. One backward that changes nothing lets a run that is resumed
    # later add up as this one does. With a batch like any other, a compiled model compiles once.
    distributed.warm_up(model, transform(*train_set[: args.batch_size], train=True)[0])

    lr = optim.scale_lr(args.lr, args.lr_scaling, global_batch_size, config.DEFAULT_BATCH_SIZE)
    optimizer = optim.build_optimizer(raw_model, lr, args.momentum, args.weight_decay)
    schedule = optim.Schedule(optimizer, len(train_set), args.epochs, args.warmup_epochs)
    precision = Precision(device, args.amp)

    # DDP: rank 0 makes and locks the run directory; its answer, or its error, goes to all.
    run_dir = distributed.call_on_rank_0(
        open_run, args.run_dir, TECHNIQUE, args.resume, args.epochs, args.max_steps
    )
    checkpointer = Checkpointer(
        run_dir.path / "checkpoints",
        raw_model,
        optimizer,
        precision.scaler,
        identity={"model": args.model, "dataset": args.dataset, "seed": args.seed},
        keep=args.keep,
        every=args.save_every_steps,
        # DDP: all load what rank 0 reads, one writes.
        read=distributed.call_on_rank_0,
        write=rank == 0,
    )
    progress = Progress(len(train_set), global_batch_size, args.epochs, args.max_steps)
    checkpointer.resume(progress, run_dir.resume)
    # DDP: all ranks leave at the same step.
    stop = signals.StopRequest(agree=distributed.AgreedMax())
    logger = Logger(
        run_dir,
        raw_model,
        device,
        progress,
        config.facts(args),
        config.flags(args),
        lr=lr,
        # DDP: one process reports, for all of them, and names the rank that is lost.
        rank=rank,
        world_size=world_size,
        backend=backend,
        explain=job.explain,
        gather=distributed.gather,
        init_report=init_report,
        log_every=args.log_every,
        profile=args.profile,
        show_bar=args.progress,
        tensorboard=args.tensorboard,
    )

    def after_step(metrics: Metrics) -> bool:
        """Report and save if it is time to; tell whether to leave the epoch here."""
        logger.log_step(metrics, schedule.lr)
        if stop.poll() or checkpointer.due(progress):
            # DDP: this rank's sums are those of its shard.
            progress.train_sums = metrics.sum_over_ranks().state()
            checkpointer.save(progress)
        return stop.signal is not None

    with logger:
        while not progress.is_finished:
            sampler.set_epoch(progress.epoch, progress.epoch_samples)
            train_metrics = engine.train_one_epoch(
                model,
                logger.track(train_loader),
                transform,
                optimizer,
                schedule,
                precision,
                progress,
                grad_accum_steps=args.grad_accum_steps,
                max_grad_norm=args.max_grad_norm,
                label_smoothing=args.label_smoothing,
                seed=args.seed,
                after_step=after_step,
                # DDP: other random numbers in each process; no reduction in the backwards of a step
                # before its last.
                rank=rank,
                no_sync=model.no_sync,
            )
            if stop.signal:
                logger.stopped(stop.name)
                return 128 + stop.signal
            # DDP: evaluate what rank 0 saves, its buffers (running statistics) included.
            distributed.broadcast_buffers(raw_model)
            test_metrics, predictions = engine.evaluate(
                raw_model, test_loader, transform, precision
            )
            # DDP: put the shards together: sums of loss, correct and count, which are divided last.
            train_metrics = train_metrics.sum_over_ranks()
            test_metrics = test_metrics.sum_over_ranks()
            predictions = distributed.gather_shards(predictions, len(test_set))
            logger.log_epoch(train_metrics, test_metrics, predictions, schedule.lr)
            progress.end_epoch(train_metrics.state(), test_metrics.state())
            checkpointer.save(progress)
        logger.complete(test_set)
    return 0


def main() -> int:
    """Parse the command line, train, and return the exit status."""
    output.protect()
    signals.install_handlers()
    args = config.parse_args(TECHNIQUE, __doc__)
    # DDP: finds out how this process was started, waits for the others, calls `run`, and destroys
    # the process group on every way out.
    return launch(run, args)


if __name__ == "__main__":
    sys.exit(main())
