"""Run a training script with float64 weights if asked to, and print the weights of each rank.

python tests/instrumented.py train_single.py --max-steps 50 ...
"""

import os
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from utils.run import Run  # noqa: E402
from utils.weights import weights_sha256  # noqa: E402

if os.environ.get("TEST_DTYPE") == "float64":
    torch.set_default_dtype(torch.float64)
leave = Run.__exit__


def tell_and_leave(self, *error):
    # One write, so that the lines of several ranks do not mix.
    os.write(1, f"rank {os.environ.get('RANK', 0)} holds {weights_sha256(self.model)}\n".encode())
    return leave(self, *error)


if __name__ == "__main__":
    Run.__exit__ = tell_and_leave
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
