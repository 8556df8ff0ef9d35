"""The command line: flags in groups, checked before anything starts."""

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import models
from data import SOURCES
from utils import callables, errors, output, signals
from utils.optim import REFERENCE_BATCH, RULES

PATH = os.path.expanduser  # a shell leaves the ~ of --run-dir=~/x
SMALL = 1e-12  # in place of 0, which makes no sense
LARGE = 2**53  # beyond which a float does not hold every whole number
MODEL = callables.name_in(models.MODELS, "models.py", "my_network:MyNetwork")
DATASET = callables.name_in(SOURCES, "utils/datasets/sources.py", "my_data:load")
# Flags that may differ between hosts: hardware, folders, places, and what rank 0 alone reads.
OF_ONE_HOST = """device devices threads num_workers data_on_device data_dir run_dir resume progress
tensorboard log_every local_rank nprocs"""


class OneLineParser(argparse.ArgumentParser):
    """Say what is wrong in one line. Under torchrun N usages would bury it."""

    def error(self, message: str) -> NoReturn:
        if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
            errors.let_another_rank_report()  # the first of this machine
            self.exit(2)
        self.exit(2, f"{self.prog}: error: {errors.printable(message)} (--help lists the flags)\n")


def number(kind: Callable[[str], Any], low: float = 0, high: float = LARGE) -> Callable[[str], Any]:
    """Return an argparse type: a number from ``low`` to ``high``, both included."""
    name = "a whole number" if kind is int else "a number"

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text[:50]!r} is not {name} from {low} to {high:.12g}")

    return parse


def device_ids(text: str) -> list[int]:
    """Parse ``0,3`` into different logical device ids."""
    ids = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(set(ids)) == text.count(",") + 1:
        return ids
    raise argparse.ArgumentTypeError(f"{text!r} is not a list of different device ids such as 0,3")


COUNT, SIZE = number(int), number(int, low=1)
NON_NEGATIVE, POSITIVE = number(float), number(float, low=SMALL)
FRACTION = number(float, high=0.9999)
RANKS = number(int, low=1, high=2**20)
THREADS = number(int, low=1, high=4096)  # far beyond which OpenMP crashes
# Up to four months. PyTorch counts milliseconds, and has no room for more.
SECONDS = number(float, low=SMALL, high=1e7)


def build_parser(technique: str, description: str | None) -> argparse.ArgumentParser:
    """Build the parser of a script: the common flags, and those of its technique."""
    parser = OneLineParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --local-rank must not be taken for --local-ra..., nor typos guessed
    )
    add = parser.add_argument_group("data").add_argument
    names = f"{', '.join(SOURCES)}, or your own, such as my_data:load (default: mnist)"
    add("--dataset", type=DATASET, default="mnist", metavar="NAME", help=names)
    add("--data-dir", type=PATH, default="data", help="in torchvision's layout (MNIST/raw)")
    add("--num-workers", type=COUNT, default=0, help="loader workers of each process")
    add("--augment", action=argparse.BooleanOptionalAction, default=True, help="random shift")
    add("--data-on-device", action=argparse.BooleanOptionalAction, help="default: if it is small")
    # The result does not depend on it. 500 images fit a CPU's cache.
    add("--eval-batch-size", type=SIZE, default=500, help="of an evaluation, per device")

    add = parser.add_argument_group("training").add_argument
    names = f"{', '.join(models.MODELS)}, or your own, such as my_network:MyNetwork"
    add("--model", type=MODEL, default="convnet", metavar="NAME", help=names)
    add("--epochs", type=POSITIVE, default=1, help="length of the run, 0.5 is half an epoch")
    add("--max-steps", type=SIZE, help="end after this many optimizer steps")
    add("--batch-size", type=SIZE, default=REFERENCE_BATCH, help="per device and micro-step")
    add("--lr", type=POSITIVE, default=0.1, help=f"peak, at a global batch of {REFERENCE_BATCH}")
    add("--lr-scaling", choices=RULES, default=RULES[0], help="how the rate follows the batch")
    add("--momentum", type=FRACTION, default=0.9)
    add("--weight-decay", type=NON_NEGATIVE, default=5e-4)
    add("--label-smoothing", type=FRACTION, default=0.05)
    add("--warmup-epochs", type=NON_NEGATIVE, default=1.0)
    add("--grad-accum-steps", type=SIZE, default=1, help="micro-steps per step")
    add("--max-grad-norm", type=NON_NEGATIVE, default=1.0, help="clip the gradient, 0: off")

    add = parser.add_argument_group("hardware").add_argument
    add("--device", choices=["auto", "cpu", "cuda", "mps", "xpu"], default="auto")
    add("--devices", type=device_ids, help="logical ids, after CUDA_VISIBLE_DEVICES: 0,3")
    add("--threads", type=THREADS, help="per process (default: OMP_NUM_THREADS, or a fair share)")
    add("--amp", choices=["off", "bf16", "fp16"], default="off")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--seed", type=number(int, high=2**32 - 1), default=0)
    add("--deterministic", action="store_true", help="refuse irreproducible operations")

    add = parser.add_argument_group("run").add_argument
    add("--run-dir", type=PATH, help="default: a new folder below runs/")
    add("--resume", action="store_true", help="continue in --run-dir (default: the latest)")
    add("--init-weights", type=PATH, metavar="FILE", help="start from a checkpoint's weights")
    add("--save-every-steps", type=SIZE, help="also save within epochs")
    add("--profile", action="store_true", help="trace some steps of the first epoch")
    add("--log-every", type=SIZE, default=50, help="steps between entries")
    add("--no-tensorboard", dest="tensorboard", action="store_false")
    add("--no-progress", dest="progress", action="store_false")

    if technique == "dp":
        add = parser.add_argument_group("DataParallel").add_argument
        add("--output-device", type=COUNT, help="GPU that gathers the outputs (default: the first)")
        add("--replicas", type=number(int, 1, 256), help="CPU threads, not GPUs (default: 2)")

    if technique == "ddp":
        add = parser.add_argument_group("DistributedDataParallel").add_argument
        add("--backend", choices=["auto", "nccl", "gloo", "mpi"], default="auto")
        add("--local-rank", "--local_rank", type=COUNT, help=argparse.SUPPRESS)
        add("--nprocs", type=RANKS, help="start this many processes, without a launcher")
        add("--rdzv-timeout", type=SECONDS, default=120.0, help="seconds to wait for all ranks")
        add("--timeout", type=SECONDS, default=600.0, help="seconds that a collective may take")
        add("--sync-bn", action="store_true", help="batch statistics over all ranks")
        add("--bucket-cap-mb", type=POSITIVE, help="of gradients (default: PyTorch's, 1 then 25)")
        add("--find-unused-parameters", action="store_true", help="if a forward leaves some unused")
    return parser


def parse_args(
    technique: str, description: str | None, argv: list[str] | None = None
) -> argparse.Namespace:
    """Parse and check the command line. On an error print one line and exit with status 2.

    Stop signals are noted from here on, and output that nobody reads does not end the script.

    Args:
        technique: ``single``, ``dp`` or ``ddp``. It decides which flags there are.
        description: the docstring of the script.
        argv: the arguments, or None for those of this process.
    """
    output.protect()
    signals.install_handlers()
    parser = build_parser(technique, description)
    args = parser.parse_args(argv)
    args.technique = technique
    if problem := find_conflict(args):
        parser.error(problem)
    if args.num_workers:
        args.data_on_device = False  # where a loader worker could not read it
    return args


def shared(args: argparse.Namespace) -> dict[str, Any]:
    """Return what every process of a job has to have the same: all but ``OF_ONE_HOST``."""
    # Hosts may have the file of weights under other names.
    flags = vars(args) | {"init_weights": bool(args.init_weights)}
    return {name: value for name, value in flags.items() if name not in OF_ONE_HOST.split()}


def find_conflict(args: argparse.Namespace) -> str | None:
    """Return why these arguments cannot be used together, or None."""
    processes = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    if args.technique != "ddp" and processes != "1":
        return f"this script is one process, and torchrun started {processes}: use train_ddp.py"
    if "" in (args.init_weights, args.run_dir, args.data_dir):
        return "--init-weights, --run-dir or --data-dir is empty: is a variable not set?"
    if args.resume and args.init_weights:
        return "--init-weights begins a run, and --resume continues one: drop one of them"
    if args.technique == "single" and args.devices is not None and len(args.devices) > 1:
        return "train_single.py uses one device: name one in --devices, or use train_ddp.py"
    if args.data_on_device and args.num_workers:
        return "--data-on-device leaves nothing for loader processes to do: drop --num-workers"
    if args.compile and hasattr(args, "replicas"):
        return "--compile has no effect on DataParallel's copies of the model: use DDP, or drop it"
    return None
