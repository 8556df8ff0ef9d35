"""Train MNIST on one device.

    python train_single.py
    python train_single.py --epochs 5 --amp bf16

The baseline: read train_dp.py and train_ddp.py next to it, as diffs.
"""

import argparse
import sys

from torch.utils.data import DataLoader

import data
import models
from utils import config, engine, optim, runtime, signals
from utils.checkpoint import Checkpointer, Progress, init_weights
from utils.logger import Logger
from utils.metrics import Metrics
from utils.run_dir import open_run

TECHNIQUE = "single"


def run(args: argparse.Namespace) -> int:
    """Train as ``args`` say and return the exit status."""
    train_set, test_set = data.load_dataset(args.dataset, args.data_dir)
    device = runtime.select_devices(args.device, args.devices)[0]
    runtime.setup_device(device, args.threads)
    runtime.setup_seed(args.seed, args.deterministic)

    if args.data_on_device:
        train_set, test_set = train_set.to(device), test_set.to(device)
    global_batch_size = args.batch_size * args.grad_accum_steps
    train_sampler = data.EpochSampler(train_set, global_batch_size, seed=args.seed)
    options = data.loader_options(train_set, args.num_workers, device)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **options)
    test_loader = DataLoader(test_set, data.EVAL_BATCH_SIZE, **options)
    prepare = data.Preparation(device, args.dataset, args.augment)

    raw_model = models.build_model(args.model).to(device)
    if args.init_weights:
        init_weights(raw_model, args.init_weights)
    if args.compile:
        raw_model.compile()
    model = raw_model

    lr = optim.scale_lr(args.lr, args.lr_scaling, global_batch_size, config.DEFAULT_BATCH_SIZE)
    optimizer = optim.build_optimizer(raw_model, lr, args.momentum, args.weight_decay)
    schedule = optim.Schedule(optimizer, len(train_set), args.epochs, args.warmup_epochs)
    precision = runtime.Precision(device, args.amp)

    run_dir = open_run(args.run_dir, TECHNIQUE, args.resume, args.epochs, args.max_steps)
    checkpointer = Checkpointer(
        run_dir.path / "checkpoints",
        raw_model,
        optimizer,
        precision.scaler,
        identity={"model": args.model, "dataset": args.dataset, "seed": args.seed},
        keep=args.keep,
        every=args.save_every_steps,
    )
    progress = checkpointer.resume(Progress(len(train_set), global_batch_size), run_dir.resume)
    stop = signals.StopRequest()
    logger = Logger(run_dir, TECHNIQUE, vars(args), raw_model, device, progress, lr)

    def after_step(metrics: Metrics) -> bool:
        """Report and save if it is time to; tell whether to leave the epoch here."""
        logger.log_step(metrics, schedule.lr)
        if stop.poll() or checkpointer.due(progress):
            progress.train_sums = metrics.state()
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
                after_step=after_step,
            )
            if stop.signal:
                logger.stopped(stop.name)
                return 128 + stop.signal
            test_metrics = engine.evaluate(raw_model, test_loader, prepare, precision)
            logger.log_epoch(train_metrics, test_metrics, schedule.lr)
            progress.end_epoch(train_metrics.state(), test_metrics.state())
            checkpointer.save(progress)
        logger.show_answers(test_set)
        logger.complete([runtime.peak_memory(device)])
    return 0


def main() -> int:
    """Parse the command line, train, and return the exit status."""
    signals.install_handlers()
    args = config.parse_args(TECHNIQUE, __doc__)
    return runtime.guard(run, args)


if __name__ == "__main__":
    sys.exit(main())
