"""train_ddp.py, of which one rank goes wrong: FAULT=how, FAULT_RANK, FAULT_STEP.

FAULT=stall FAULT_RANK=1 FAULT_STEP=3 torchrun ... tests/faulty.py --max-steps 9

FAULT_STEP is a step, or ``data`` (before the data is loaded), ``group`` (before the process group
is made) or ``results`` (before they are written). FAULT_FLAG is a file that is made at that moment;
with FAULT_ONCE nothing goes wrong where the file is.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import data
import models
import train_ddp
from utils import run

calls, cross_entropy = 0, torch.nn.functional.cross_entropy


def is_faulty():
    """Return whether this is the rank; asked once the ranks have met, and RANK is set."""
    return os.environ["RANK"] == os.environ["FAULT_RANK"]


def go_wrong(when):
    if not is_faulty() or when != os.environ["FAULT_STEP"]:
        return
    how = os.environ["FAULT"]
    if when == "data":
        time.sleep(1.0)  # others may still ask rank 0's store whether all are there
    if "FAULT_FLAG" in os.environ:
        flag = Path(os.environ["FAULT_FLAG"])
        if "FAULT_ONCE" in os.environ and flag.exists():
            return
        flag.write_text(str(os.getpid()))
    if how == "raise":
        raise ArithmeticError("wrong on purpose")
    if how in ("leave", "leave while one computes"):
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stall":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "nan":
        torch.nn.functional.cross_entropy = lambda *a, **k: cross_entropy(*a, **k) * float("nan")


def step(self):
    global calls
    calls += 1
    go_wrong(str(calls))
    if (os.environ["FAULT"], os.environ["RANK"]) == ("leave while one computes", "2"):
        time.sleep(6 if str(calls) == os.environ["FAULT_STEP"] else 0)
    end_step(self)


def join(*args, **kwargs):
    go_wrong("group")
    init_process_group(*args, **kwargs)


def summarise(model):
    go_wrong("results")
    return weights_sha256(model)


end_step, run.Run.end_step = run.Run.end_step, step
init_process_group, torch.distributed.init_process_group = (
    torch.distributed.init_process_group,
    join,
)
weights_sha256, run.weights_sha256 = run.weights_sha256, summarise
build_model, load_dataset = models.build_model, data.load_dataset


def build_other(name):
    model = build_model(name)
    if is_faulty() and os.environ["FAULT"] == "frozen":
        next(model.parameters()).requires_grad = False
    return model


def load_other(*args):
    go_wrong("data")
    train, test = load_dataset(*args)
    if is_faulty() and os.environ["FAULT"] == "batches":
        train = data.ImageSet(train.images[:-500], train.labels[:-500])
    return train, test


models.build_model, data.load_dataset = build_other, load_other

if __name__ == "__main__":
    sys.exit(train_ddp.main())
