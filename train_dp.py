"""Train MNIST with nn.DataParallel: one process, a thread for each device.

    python train_dp.py
    python train_dp.py --devices 0,1 --output-device 1
    python train_dp.py --device cpu --replicas 2

Read it next to train_single.py: `diff train_single.py train_dp.py`.
"""

import argparse
import sys

import utils.early  # noqa: F401  first: it makes settings that torch reads when it is imported

from torch import nn
from torch.utils.data import DataLoader

import data
import models
from utils import config, engine, optim, output, signals
from utils.checkpoint import Checkpointer
from utils.data_parallel import CPUDataParallel, select_devices
from utils.device import Precision, setup_device, setup_seed
from utils.errors import guard
from utils.logger import Logger
from utils.metrics import Metrics
from utils.progress import Progress
from utils.run_dir import open_run
from utils.weights import load_weights

# DP: flags, run directory and logs go by this name.
TECHNIQUE = "dp"


def run(args: argparse.Namespace) -> int:
    """Train as ``args`` say and return the exit status."""
    train_set, test_set = data.load_dataset(args.dataset, args.data_dir, signals.sleep)
    # DP: several devices, on the first of which the model lives.
    device, devices = select_devices(args.device, args.devices, args.replicas, args.output_device)
    setup_device(device, args.threads)
    setup_seed(args.seed, args.deterministic)

    if args.data_on_device:
        train_set, test_set = train_set.to(device), test_set.to(device)
    # DP: --batch-size is what each device gets.
    global_batch_size = args.batch_size * len(devices) * args.grad_accum_steps
    sampler = data.EpochSampler(train_set, global_batch_size, seed=args.seed)
    options = data.loader_options(train_set, args.num_workers, device)
    # DP: the loader packs one batch for all devices, and each forward splits it.
    train_loader = DataLoader(train_set, args.batch_size * len(devices), sampler=sampler, **options)
    test_loader = DataLoader(test_set, data.EVAL_BATCH_SIZE, **options)
    transform = data.Transform(device, args.dataset, args.augment)

    raw_model = models.build_model(args.model).to(device)
    init_report = None
    if args.init_weights:
        init_report = load_weights(raw_model, args.init_weights)
    if args.compile:
        raw_model.compile()
    # DP: each forward splits the batch, copies the model to every device, runs the copies in
    # threads and gathers their outputs on one device; the backward sums their gradients there.
    model: nn.DataParallel = CPUDataParallel(raw_model, len(devices))
    if device.type != "cpu":  # where nn.DataParallel would only call the model: hence the stand-in
        model = nn.DataParallel(raw_model, device_ids=devices, output_device=args.output_device)

    lr = optim.scale_lr(args.lr, args.lr_scaling, global_batch_size, config.DEFAULT_BATCH_SIZE)
    optimizer = optim.build_optimizer(raw_model, lr, args.momentum, args.weight_decay)
    schedule = optim.Schedule(optimizer, len(train_set), args.epochs, args.warmup_epochs)
    precision = Precision(device, args.amp)

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
    progress = Progress(len(train_set), global_batch_size, args.epochs, args.max_steps)
    checkpointer.resume(progress, run_dir.resume)
    stop = signals.StopRequest()
    logger = Logger(
        run_dir,
        raw_model,
        device,
        progress,
        config.facts(args),
        config.flags(args),
        lr=lr,
        # DP: all in one process.
        num_devices=len(devices),
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
            progress.train_sums = metrics.state()
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
            )
            if stop.signal:
                logger.stopped(stop.name)
                return 128 + stop.signal
            test_metrics, predictions = engine.evaluate(
                raw_model, test_loader, transform, precision
            )
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
    return guard(run, args)


if __name__ == "__main__":
    sys.exit(main())
