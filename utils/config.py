"""The command line: flags in groups, checked before anything starts."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import models
from data import SOURCES

DEFAULT_BATCH_SIZE = 96


class UsageError(Exception):
    """Arguments that cannot be used together or here; the message says what to change."""

    exit_status = 2


class OneLineParser(argparse.ArgumentParser):
    """Say what is wrong in one line: under torchrun N usages would bury it."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            self.exit(2)  # the first rank of this machine says it
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")


def number(
    kind: Callable[[str], Any], least: float | None = None, above: float | None = None
) -> Callable[[str], Any]:
    """Return an argparse type: a finite number, at least ``least`` and greater than ``above``."""
    name = "a whole number" if kind is int else "a number"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}") from None
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not finite")
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        if above is not None and value <= above:
            raise argparse.ArgumentTypeError(f"{text} is not greater than {above}")
        return value

    return parse


def device_ids(text: str) -> list[int]:
    """Parse ``0,3`` into distinct logical device ids."""
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of device ids such as 0,3"
        ) from None
    if min(ids) < 0 or len(set(ids)) < len(ids):
        raise argparse.ArgumentTypeError(f"{text!r} has a negative id, or one id twice")
    return ids


COUNT, SIZE = number(int, least=0), number(int, least=1)
SHARE, POSITIVE = number(float, least=0), number(float, above=0)


def build_parser(technique: str, description: str | None) -> argparse.ArgumentParser:
    """Build the parser of ``train_<technique>.py``: the common flags and that script's own."""
    parser = OneLineParser(
        prog=f"train_{technique}.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --local-rank must not be taken for --local-ra..., nor typos guessed
    )
    _add_common(parser)
    if technique == "dp":
        _add_dp(parser)
    if technique == "ddp":
        _add_ddp(parser)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--dataset", choices=list(SOURCES), default="mnist")
    group.add_argument("--data-dir", default="data", help="in torchvision's layout (MNIST/raw)")
    group.add_argument("--num-workers", type=COUNT, default=0, help="loader processes, per process")
    group.add_argument(
        "--augment",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="random shift of the training images",
    )
    group.add_argument("--data-on-device", action="store_true", help="keep the set on the GPU")

    group = parser.add_argument_group("training")
    group.add_argument("--model", choices=list(models.MODELS), default="convnet")
    group.add_argument("--epochs", type=SIZE, default=1)
    group.add_argument("--max-steps", type=SIZE, help="end after this many optimizer steps")
    group.add_argument(
        "--batch-size", type=SIZE, default=DEFAULT_BATCH_SIZE, help="per device and micro-step"
    )
    group.add_argument(
        "--lr", type=POSITIVE, default=0.1, help=f"peak, at a global batch of {DEFAULT_BATCH_SIZE}"
    )
    group.add_argument(
        "--lr-scaling",
        choices=["none", "linear", "sqrt"],
        default="linear",
        help="how the learning rate follows the global batch",
    )
    group.add_argument("--momentum", type=number(float, least=0), default=0.9)
    group.add_argument("--weight-decay", type=SHARE, default=5e-4)
    group.add_argument("--label-smoothing", type=SHARE, default=0.05)
    group.add_argument("--warmup-epochs", type=SHARE, default=1.0)
    group.add_argument("--grad-accum-steps", type=SIZE, default=1, help="micro-steps per step")
    group.add_argument("--max-grad-norm", type=POSITIVE, help="clip the gradient's norm to this")

    group = parser.add_argument_group("hardware")
    group.add_argument("--device", choices=["auto", "cpu", "cuda", "mps", "xpu"], default="auto")
    group.add_argument(
        "--devices", type=device_ids, help="logical ids, after CUDA_VISIBLE_DEVICES: 0,3"
    )
    group.add_argument("--threads", type=SIZE, help="per process (default: cores / processes)")
    group.add_argument("--amp", choices=["off", "bf16", "fp16"], default="off")
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    group.add_argument("--seed", type=COUNT, default=0)
    group.add_argument("--deterministic", action="store_true", help="refuse unstable kernels")

    group = parser.add_argument_group("run")
    group.add_argument("--run-dir", help="default: a new folder below runs/")
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --run-dir (default: this script's latest)",
    )
    group.add_argument("--init-weights", metavar="FILE", help="start from a checkpoint's weights")
    group.add_argument("--save-every-steps", type=SIZE, help="also save within epochs")
    group.add_argument("--keep", type=SIZE, default=2, help="how many checkpoints to keep")
    group.add_argument("--profile", action="store_true", help="trace some steps of the first epoch")
    group.add_argument("--log-every", type=SIZE, default=50, help="steps")
    group.add_argument("--no-tensorboard", dest="tensorboard", action="store_false")
    group.add_argument("--no-progress", dest="progress", action="store_false")


def _add_dp(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("DataParallel")
    group.add_argument("--output-device", type=COUNT, help="gathers outputs (default: the first)")
    group.add_argument("--replicas", type=SIZE, help="CPU threads in the place of GPUs: 2")


def _add_ddp(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("DistributedDataParallel")
    group.add_argument("--backend", choices=["auto", "nccl", "gloo", "mpi"], default="auto")
    group.add_argument(
        "--init-method", default="env://", help="env://, tcp://host:port or file:///path"
    )
    group.add_argument("--rank", type=COUNT, help="of this process, where no launcher gives it")
    group.add_argument("--world-size", type=SIZE, help="goes with --rank")
    group.add_argument("--local-rank", "--local_rank", type=COUNT, help=argparse.SUPPRESS)
    group.add_argument("--nprocs", type=SIZE, help="start so many processes, without a launcher")
    group.add_argument("--nnodes", type=SIZE, default=1, help="goes with --nprocs")
    group.add_argument("--node-rank", type=COUNT, default=0, help="goes with --nprocs")
    group.add_argument(
        "--rdzv-timeout", type=POSITIVE, default=120.0, help="wait for all ranks, seconds"
    )
    group.add_argument("--timeout", type=POSITIVE, default=600.0, help="of a collective, seconds")
    group.add_argument("--sync-bn", action="store_true", help="batch statistics over all ranks")
    group.add_argument("--bucket-cap-mb", type=POSITIVE, default=25.0, help="gradient bucket")


def parse_args(
    technique: str, description: str | None, argv: list[str] | None = None
) -> argparse.Namespace:
    """Parse and check the command line; on an error print one line and exit with status 2."""
    parser = build_parser(technique, description)
    args = parser.parse_args(argv)
    args.technique = technique
    args.argv = sys.argv[1:] if argv is None else list(argv)
    problem = find_conflict(args)
    if problem:
        parser.error(problem)
    return args


def shared(args: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Return what every process of a job has to have the same, ``more`` included."""
    names = (
        "dataset model batch_size grad_accum_steps epochs max_steps lr seed amp sync_bn compile"
        " save_every_steps bucket_cap_mb lr_scaling momentum weight_decay label_smoothing"
        " warmup_epochs max_grad_norm augment"
    )
    return {name: getattr(args, name) for name in names.split()} | more


def find_conflict(args: argparse.Namespace) -> str | None:
    """Return why these arguments cannot be used together, or None."""
    if not 0 <= args.momentum < 1:
        return f"--momentum {args.momentum} is not in [0, 1)"
    if args.label_smoothing >= 1:
        return f"--label-smoothing {args.label_smoothing} is not in [0, 1)"
    if args.seed >= 2**32:
        return f"--seed {args.seed} is not below 2**32"
    if args.devices is not None and args.device == "cpu":
        return "--devices names GPUs and cannot go with --device cpu"
    if args.technique == "single" and args.devices is not None and len(args.devices) > 1:
        return "train_single.py uses one device: name one in --devices, or use train_ddp.py"
    if args.data_on_device and args.num_workers:
        return "--data-on-device leaves nothing for loader processes to do: drop --num-workers"
    if args.compile and hasattr(args, "replicas"):
        return "--compile has no effect on DataParallel's copies of the model: use DDP, or drop it"
    if args.resume and args.init_weights:
        return "--resume brings its own weights: drop --init-weights"
    return _find_ddp_conflict(args) if hasattr(args, "init_method") else None


def _find_ddp_conflict(args: argparse.Namespace) -> str | None:
    if (args.rank is None) != (args.world_size is None):
        return "--rank and --world-size go together"
    if args.rank is not None and args.rank >= args.world_size:
        return f"--rank {args.rank} is not below --world-size {args.world_size}: ranks start at 0"
    if args.node_rank >= args.nnodes:
        return f"--node-rank {args.node_rank} is not below --nnodes {args.nnodes}: nodes start at 0"
    if args.nprocs is None and args.nnodes > 1:
        return "--nnodes and --node-rank go with --nprocs; torchrun has its own"
    if args.nprocs is not None and args.rank is not None:
        return "--nprocs numbers its processes itself: drop --rank and --world-size"
    if not re.fullmatch(r"env://|tcp://[^/]+:\d+|file:///.+", args.init_method):
        return f"--init-method {args.init_method} is not env://, tcp://host:port or file:///path"
    port = args.init_method.rpartition(":")[2]
    if args.init_method.startswith("tcp:") and not 0 < int(port) < 65_536:
        return f"--init-method {args.init_method}: {port} is not a port (1 to 65535)"
    return None
