"""Train MNIST with DistributedDataParallel: one process for each device, on any number of nodes.

    torchrun --standalone --nproc_per_node 2 train_ddp.py
    python train_ddp.py --nprocs 2
    python train_ddp.py

Read it next to train_single.py: `diff train_single.py train_ddp.py`.
"""

import argparse
import sys

from torch.utils.data import DataLoader

import data
import models
from utils import config, distributed, engine, optim, runtime, signals
from utils.checkpoint import Checkpointer, Progress, init_weights
from utils.logger import Logger
from utils.metrics import Metrics
from utils.run_dir import open_run

# DDP: flags, run directory and logs go by this name.
TECHNIQUE = "ddp"


def run(args: argparse.Namespace) -> int:
    """Train as ``args`` say and return the exit status."""
    train_set, test_set = data.load_dataset(args.dataset, args.data_dir)
    # DDP: every process meets the others first, then takes the device of its local rank.
    device, rank, world_size, backend = distributed.setup_process_group(
        args.backend,
        args.device,
        args.devices,
        args.threads,
        init_method=args.init_method,
        rdzv_timeout=args.rdzv_timeout,
        timeout=args.timeout,
        must_agree=config.shared(args, images=(len(train_set), len(test_set))),
    )
    runtime.setup_seed(args.seed, args.deterministic)

    if args.data_on_device:
        train_set, test_set = train_set.to(device), test_set.to(device)
    # DDP: --batch-size is what each process gets; the epoch is split first, packed later.
    global_batch_size = args.batch_size * args.grad_accum_steps * world_size
    train_sampler = data.EpochSampler(train_set, global_batch_size, world_size, rank, args.seed)
    options = data.loader_options(train_set, args.num_workers, device)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)
    # DDP: an unpadded share, so that every test image counts exactly once.
    test_share = range(rank, len(test_set), world_size)
    test_loader = DataLoader(test_set, data.EVAL_BATCH_SIZE, sampler=test_share, **options)
    prepare = data.Preparation(device, args.dataset, args.augment)

    raw_model = models.build_model(args.model).to(device)
    if args.init_weights:
        # DDP: one report will do.
        init_weights(raw_model, args.init_weights, tell=rank == 0)
    if args.compile:
        raw_model.compile()
    # DDP: broadcasts the weights of rank 0 now, and averages the gradients in every backward.
    if args.sync_bn:
        raw_model = distributed.use_sync_bn(raw_model, device)
    model = distributed.wrap(raw_model, device, prepare(*train_set[:2]), args.bucket_cap_mb)

    lr = optim.scale_lr(args.lr, args.lr_scaling, global_batch_size, config.DEFAULT_BATCH_SIZE)
    optimizer = optim.build_optimizer(raw_model, lr, args.momentum, args.weight_decay)
    schedule = optim.Schedule(optimizer, len(train_set), args.epochs, args.warmup_epochs)
    precision = runtime.Precision(device, args.amp)

    # DDP: rank 0 makes and locks the run directory; its answer, or its error, goes to all.
    run_dir = distributed.from_main(
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
        read=distributed.from_main,
        write=rank == 0,
    )
    progress = checkpointer.resume(Progress(len(train_set), global_batch_size), run_dir.resume)
    # DDP: all ranks leave at the same step, and one reports.
    stop = signals.StopRequest(agree=distributed.largest)
    logger = Logger(
        run_dir, TECHNIQUE, vars(args), raw_model, device, progress, lr, rank, world_size, backend
    )

    def after_step(metrics: Metrics) -> bool:
        """Report and save if it is time to; tell whether to leave the epoch here."""
        logger.log_step(metrics, schedule.lr)
        if stop.poll() or checkpointer.due(progress):
            # DDP: this rank's sums are those of its share.
            progress.train_sums = metrics.all_reduce().state()
            checkpointer.save(progress)
        return stop.signal is not None or progress.reached(args.epochs, args.max_steps)

    with logger:
        while not progress.reached(args.epochs, args.max_steps):
            train_sampler.set_epoch(progress.epoch, progress.samples)
            train_metrics = engine.train_one_epoch(
                model,
                logger.track(train_loader),
                prepare,
                optimizer,
                schedule,
                precision,
                progress,
                grad_accum_steps=args.grad_accum_steps,
                max_grad_norm=args.max_grad_norm,
                label_smoothing=args.label_smoothing,
                seed=args.seed,
                # DDP: other random numbers in each process, and micro-steps without a reduction.
                rank=rank,
                no_sync=model.no_sync,
                after_step=after_step,
            )
            if stop.signal:
                logger.stopped(stop.name)
                return 128 + stop.signal
            # DDP: add up the shares, and evaluate with the buffers that rank 0 saves.
            train_metrics = train_metrics.all_reduce()
            distributed.broadcast_buffers(raw_model)
            test_metrics = engine.evaluate(raw_model, test_loader, prepare, precision).all_reduce()
            logger.log_epoch(train_metrics, test_metrics, schedule.lr)
            progress.end_epoch(train_metrics.state(), test_metrics.state())
            checkpointer.save(progress)
        logger.show_answers(test_set)
        # DDP: one figure for each rank.
        logger.complete(distributed.gather(runtime.peak_memory(device)))
    return 0


def main() -> int:
    """Parse the command line, train, and return the exit status."""
    signals.install_handlers()
    args = config.parse_args(TECHNIQUE, __doc__)
    # DDP: find out how we were started, and destroy the process group on every way out.
    return distributed.launch(run, args)


if __name__ == "__main__":
    sys.exit(main())
