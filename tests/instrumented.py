"""Run a training script with float64 weights if asked to; print each rank's weights, and counts.

python tests/instrumented.py train_single.py --max-steps 50 ...
"""

import os
import runpy
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from data import ImageSet  # noqa: E402
from utils import pictures  # noqa: E402
from utils.logger import Logger  # noqa: E402
from utils.weights import weights_sha256  # noqa: E402

if os.environ.get("TEST_DTYPE") == "float64":
    torch.set_default_dtype(torch.float64)

complete, draw_confusion = Logger.complete, pictures.draw_confusion


def complete_and_tell(self: Logger, test_set: ImageSet) -> None:
    # One write, so that the lines of several ranks do not mix.
    os.write(1, f"rank {os.environ.get('RANK', 0)} holds {weights_sha256(self.model)}\n".encode())
    complete(self, test_set)


def draw_and_tell(matrix: torch.Tensor) -> object:
    os.write(1, f"confusion matrix {matrix.tolist()}\n".encode())
    return draw_confusion(matrix)


if __name__ == "__main__":
    pictures.draw_confusion = draw_and_tell  # type: ignore[assignment]
    Logger.complete = complete_and_tell  # type: ignore[method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
