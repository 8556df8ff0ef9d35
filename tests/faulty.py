"""train_ddp.py, of which one rank goes wrong at a step: FAULT=how, FAULT_RANK, FAULT_STEP.

FAULT=stall FAULT_RANK=1 FAULT_STEP=3 torchrun ... tests/faulty.py --max-steps 9
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

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
        if how == "nan":
            torch.nn.functional.cross_entropy = lambda *a, **k: torch.tensor(float("nan"))
    return poll(self)


StopRequest.poll = fault  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(train_ddp.main())
