"""Run a training script that goes wrong in the place that DIES names.

DIES=evaluate python tests/dies.py train_single.py --max-steps 4 ...

evaluate: is killed when the evaluation begins; summary: when the summary is due; forward: raises in
the fifth forward; nan: computes a loss that is not a number from the fifth forward on; test: only
in the evaluation; late: rank 0 comes after the others.
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
from utils import evaluation  # noqa: E402
from utils.run import Run  # noqa: E402

HOW = os.environ["DIES"]
calls = 0


class Faulty(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))

    def forward(self, images):
        global calls
        calls += self.training
        if calls == 5 and HOW == "forward":
            raise ArithmeticError("wrong on purpose")
        is_wrong = (HOW == "nan" and calls >= 5) or (HOW == "test" and not self.training)
        return super().forward(images) * (float("nan") if is_wrong else 1.0)


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    models.MODELS["linear"] = Faulty
    if HOW == "evaluate":
        evaluation.evaluate = die
    if HOW == "summary":
        Run._finish = die
    if HOW == "late":
        time.sleep(0.0 if int(os.environ["RANK"]) else 3.0)
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
