"""Run a training script that goes wrong in the place that DIES names.

DIES=evaluate python tests/dies.py train_single.py --max-steps 4 ...

evaluate: is killed when the evaluation begins; complete: when the summary is due; forward: raises
in the fifth forward; nan: computes a loss that is not a number from the fifth forward on; late:
rank 0 comes after the others.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import models  # noqa: E402
from utils import engine, logger  # noqa: E402

calls = 0


class Faulty(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        global calls
        calls += self.training
        if calls == 5 and os.environ["DIES"] == "forward":
            raise ArithmeticError("wrong on purpose")
        outputs = super().forward(images)
        return outputs * float("nan") if calls >= 5 and os.environ["DIES"] == "nan" else outputs


def die(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if os.environ["DIES"] == "evaluate":
        engine.evaluate = die  # type: ignore[assignment]
    elif os.environ["DIES"] == "complete":
        logger.Logger.complete = die  # type: ignore[method-assign]
    elif os.environ["DIES"] == "late":
        time.sleep(0.0 if int(os.environ["RANK"]) else 3.0)
    else:
        models.MODELS["linear"] = Faulty
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
