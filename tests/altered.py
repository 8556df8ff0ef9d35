"""Run a script of this project, in which something is as ALTER says.

    ALTER=SIGSTOP ALTER_RANK=1 ALTER_AT=7 torchrun ... tests/altered.py train_ddp.py --max-steps 9

SIGKILL and other signals, raise, leave, nan, late, hang: what goes wrong in the rank ALTER_RANK, or
0, at ALTER_AT: after so many steps, or before ``start``, ``data`` (is loaded), ``group`` (is made),
``loss`` (is computed), ``loss 9`` (for the ninth time), ``evaluate`` or ``results`` (are written).
wait: the rank goes on when a signal has come to it. A signal of its own comes ALTER_DELAY seconds
later, and within the next step. ALTER_FLAG is a file that is made at that moment, and each other
rank makes one with its number; with ALTER_ONCE nothing goes wrong where the file is. The rank
ALTER_BUSY computes for six seconds then.

watched: under pretended GPUs each rank prints how often it waited for one between two steps, as in
20:45, and which of them it has opened.

stuck: after five batches the rank's loader worker gives no more.

frozen, buffer, code, batches: the rank has another model, or other data. empty: no other rank than
rank 0 finds a checkpoint. clock: a step takes a second, the first ones a hundred. float64, float32:
weights are of that type, and each rank prints their checksum, its last seed and the outputs' type.
exact: a minimal script without batch normalisation, and in float64. TASKS: data and a network of a
user's own, as the README has a user edit the project.
"""

import ctypes
import importlib
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import swa_utils  # noqa: E402

import data  # noqa: E402
import models  # noqa: E402
from utils.datasets import loader  # noqa: E402
from utils.datasets.sources import SOURCES, Source  # noqa: E402
from utils.training import checkpoint, evaluation, run, summary, timing  # noqa: E402
from utils.weights import weights_sha256  # noqa: E402

HOW, AT = os.environ.get("ALTER", ""), os.environ.get("ALTER_AT", "")
# Two numbers for each image; a layer that every second step leaves out, or that only rank 0 uses; a
# gradient that becomes infinite on rank 1; more to save than weights.
TASKS = ("regression", "depth", "uneven", "overflow", "state")
steps, losses, dtype, waits, timers = 0, 0, None, [], []


# What goes wrong


def is_chosen(variable="ALTER_RANK"):
    """Return whether this is the rank; asked once the ranks have met, and RANK is set."""
    return os.environ.get("RANK", "0") == os.environ.get(variable, "0")


def have_come(flag):
    """Return whether all other ranks have come to ALTER_AT."""
    others = {*range(int(os.environ["WORLD_SIZE"]))} - {int(os.environ["RANK"])}
    return all(flag.with_suffix(f".{rank}").exists() for rank in others)


def go_wrong(when):
    if when != AT:
        return
    if "ALTER_BUSY" in os.environ and is_chosen("ALTER_BUSY"):
        time.sleep(6)
    flag = Path(os.environ.get("ALTER_FLAG", os.devnull))
    if not is_chosen():
        if "ALTER_FLAG" in os.environ:
            flag.with_suffix(f".{os.environ['RANK']}").touch()
        return
    while when in ("data", "group") and not have_come(flag):
        time.sleep(0.01)  # others may still ask rank 0's store whether all are there
    if "ALTER_ONCE" in os.environ and flag.exists():
        return
    if HOW == "wait":
        noted, note = os.pipe()
        os.set_blocking(note, False)
        signal.set_wakeup_fd(note)
    flag.write_text(str(os.getpid()))
    if HOW == "wait":
        os.read(noted, 1)
    if HOW == "late":
        time.sleep(3.0)
    if HOW == "raise":
        raise ArithmeticError("wrong on purpose")
    if HOW == "leave":
        os._exit(0)
    if HOW == "nan":
        nn.functional.cross_entropy = lambda *a, **k: cross_entropy(*a, **k) * float("nan")
    if HOW.startswith("SIG"):
        number, seconds = getattr(signal, HOW), float(os.environ.get("ALTER_DELAY", 0))
        if not seconds:
            return os.kill(os.getpid(), number)
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), number)))
        timers[0].start()
    if HOW == "hang":  # in C, as in a collective: Python calls no handler
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)


def after_step(self):
    global steps
    steps += 1
    for timer in timers:
        timer.join()
    for average in self.extra.values():
        average.update_parameters(self.model)
    go_wrong(str(steps))
    end_step(self)
    if HOW == "watched" and str(steps) in AT.split(":"):
        gpus = ctypes.CDLL(None)  # the pretended ones: LD_PRELOAD has loaded them
        waits.append(sum(gpus.pretend_count(kind) for kind in range(4)))  # the four ways to wait
        if len(waits) == 2:
            opened = [number for number in range(2) if gpus.pretend_context(number)]
            tell(f"rank {self.rank} waited {waits[1] - waits[0]} times, on GPUs {opened}")


def tell(text):
    os.write(1, f"{text}\n".encode())  # one write, so that the lines of several ranks do not mix


def before(when, function):
    """Return ``function``, before each call of which something may go wrong."""

    def call(*args, **kwargs):
        go_wrong(when)
        return function(*args, **kwargs)

    return call


def compute_loss(*args, **kwargs):
    global losses
    losses += 1
    go_wrong("loss")
    go_wrong(f"loss {losses}")
    return cross_entropy(*args, **kwargs)


def build_other(*args):
    model = build_model(*args)
    if is_chosen() and HOW == "frozen":
        next(model.parameters()).requires_grad = False
    if is_chosen() and HOW == "buffer":
        model.register_buffer("queue", torch.zeros(3))
    if is_chosen() and HOW == "code":
        OtherConvNet.__name__ = "ConvNet"  # as where two hosts have two versions of a file
        model.__class__ = OtherConvNet
    return model


def load_other(*args):
    go_wrong("data")
    train, test = load_own() if HOW in TASKS else load_dataset(*args)
    if is_chosen() and HOW == "batches":
        train = data.ImageSet(train.images[:-500], train.labels[:-500])
    return train, test


def stick(batch):
    given.append(loader.get_worker_info())
    if is_chosen() and sum(map(bool, given)) > 5:
        time.sleep(600)
    return collate(batch)


class OtherConvNet(models.ConvNet):
    """One line of its source differs."""


def note_dtype(outputs, *more):
    global dtype
    dtype = outputs.dtype
    return loss_and_counts(outputs, *more)


def show_and_leave(self, *error):
    facts = f"{weights_sha256(self.model)} {torch.initial_seed()} {dtype}"
    tell(f"rank {self.rank} holds {facts}")
    return leave(self, *error)


def read_newest(self):
    return read_own(self) if os.environ["RANK"] == "0" else None


# What a user brings


def load_own():
    """Make images with a bright spot. Its column is the label, or its place are the two numbers."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(60, (3000, 28, 28), generator=generator, dtype=torch.uint8)
    places = torch.randint(10, (3000, 2), generator=generator)
    for image, (column, row) in zip(images, places.tolist(), strict=True):
        image[2 * row + 3 : 2 * row + 6, 2 * column + 3 : 2 * column + 6] = 255
    labels = places / 10 if HOW == "regression" else places[:, 0]
    return data.ImageSet(images[:2400], labels[:2400]), data.ImageSet(images[2400:], labels[2400:])


class Branched(nn.Module):
    """Leaves out a layer in some training steps."""

    def __init__(self):
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(784, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.steps = 0

    def forward(self, images):
        x, rank = self.stem(images.flatten(1)).relu(), os.environ["RANK"]
        is_left_out = {"depth": self.steps % 2, "uneven": self.steps > 1 and rank != "0"}
        if not (self.training and is_left_out.get(HOW)):
            x = x + self.branch(x).relu()
        if (HOW, self.steps, rank) == ("overflow", 2, "1"):
            x.register_hook(lambda grad: grad + float("inf"))
        self.steps += self.training
        return self.head(x)


class State(nn.Linear):
    """Keeps in a buffer what this rank has seen."""

    def __init__(self):
        super().__init__(784, 10)
        self.register_buffer("queue", torch.zeros(10))

    def forward(self, images):
        outputs = super().forward(images.flatten(1))
        if self.training:
            self.queue = outputs.detach().mean(0)
        return outputs


def two_groups(parameters, lr, weight_decay, **others):
    weight, bias = parameters
    decayed = {"params": [weight], "weight_decay": weight_decay}
    return torch.optim.AdamW([{"params": [bias], "lr": lr / 2}, decayed], lr / 10)


def with_average(self, *args, **kwargs):
    make_run(self, *args, **kwargs)
    self.extra = {
        "ema": swa_utils.AveragedModel(self.model, avg_fn=lambda a, b, n: 0.9 * a + b / 10)
    }


def build_own():
    if HOW == "regression":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 2))
    return State() if HOW == "state" else Branched()


def regression(outputs, targets, label_smoothing=0.0):
    targets = targets.to(outputs.device)
    error = (outputs.detach() - targets).abs().mean(1)
    return nn.functional.mse_loss(outputs, targets), {"count": len(targets), "error": error}


# Below, and not in an ``if``: a rank that ``spawn`` starts imports this file.
cross_entropy, end_step, leave = nn.functional.cross_entropy, run.Run.end_step, run.Run.__exit__
build_model, load_dataset = models.build_model, data.load_dataset
loss_and_counts, read_own = models.loss_and_counts, checkpoint.Checkpointer._read_newest
models.build_model, data.load_dataset = build_other, load_other
run.Run.end_step = after_step
nn.functional.cross_entropy = compute_loss
torch.distributed.init_process_group = before("group", torch.distributed.init_process_group)
evaluation.evaluate = before("evaluate", evaluation.evaluate)
summary.weights_sha256 = before("results", summary.weights_sha256)
if HOW in ("float64", "float32"):
    run.Run.__exit__, models.loss_and_counts = show_and_leave, note_dtype
if HOW == "stuck":
    collate, given, loader.collate, loader.BATCH_TIMEOUT = loader.collate, [], stick, 0.5
if HOW == "empty":
    checkpoint.Checkpointer._read_newest = read_newest
if HOW == "clock":
    clock = {"perf_counter": lambda: steps + 99.0 * min(steps, 5)}
    timing.time = SimpleNamespace(**vars(time) | clock)
if HOW in ("float64", "exact"):
    torch.set_default_dtype(torch.float64)
if HOW == "exact":
    models.MODELS["convnet"] = models.mlp
if HOW in TASKS:
    SOURCES["mine"] = Source("Mine", 0.13, 0.13)
    models.MODELS["mine"] = build_own
if HOW == "state":
    torch.optim.SGD = two_groups
    make_run, run.Run.__init__ = run.Run.__init__, with_average
if HOW == "regression":
    models.loss_and_counts = regression

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    go_wrong("start")
    if "/" in sys.argv[0]:
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    else:
        sys.exit(importlib.import_module(sys.argv[0].removesuffix(".py")).main())
