"""train_ddp.py, of which one rank goes wrong at a step: FAULT=how, FAULT_RANK, FAULT_STEP.

FAULT=stall FAULT_RANK=1 FAULT_STEP=3 torchrun ... tests/faulty.py --max-steps 9
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import data
import models
import train_ddp
from utils.signals import StopRequest

poll, calls = StopRequest.poll, 0


def fault(self: StopRequest) -> bool:
    global calls
    calls += 1
    if os.environ["RANK"] == os.environ["FAULT_RANK"] and calls == int(os.environ["FAULT_STEP"]):
        how = os.environ["FAULT"]
        if how == "raise":
            raise ArithmeticError("wrong on purpose")
        if how == "leave":
            os._exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stall":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "collective":
            torch.distributed.all_reduce(torch.zeros(3, dtype=torch.int64))
        if how == "nan":
            torch.nn.functional.cross_entropy = lambda *a, **k: torch.tensor(float("nan"))
    return poll(self)


StopRequest.poll = fault  # type: ignore[method-assign]

build_model, load_dataset = models.build_model, data.load_dataset


def build_other(name: str) -> torch.nn.Module:
    model = build_model(name)
    if os.environ["FAULT"] == "frozen":
        next(model.parameters()).requires_grad = False
    return model.double() if os.environ["FAULT"] == "dtype" else model


def load_other(name: str, folder: str) -> tuple[data.ImageSet, data.ImageSet]:
    train, test = load_dataset(name, folder)
    if os.environ["FAULT"] == "batches":
        train = data.ImageSet(train.images[:-500], train.labels[:-500])
    return train, test


if os.environ["FAULT_RANK"] == os.environ.get("RANK"):
    models.build_model, data.load_dataset = build_other, load_other

if __name__ == "__main__":
    sys.exit(train_ddp.main())
