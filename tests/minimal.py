"""Start the minimal scripts, and read what they print."""

import re
import sys

from tests.processes import ALTERED, ROOT, STANDALONE, run

FOLDER = ROOT / "scripts" / "minimal"
SCRIPTS = ("single", "dp", "ddp", "ddp_complete")
TIMEOUT = 150.0
RESULT = re.compile(r"^epoch (\d+): loss (\d+\.\d+), (\d+\.\d+)% of (\d+)$", re.MULTILINE)


def train(script, ranks, folder, *flags, **variables):
    """Train in ``folder``, where it leaves its checkpoint."""
    folder.mkdir(exist_ok=True)
    launcher = [sys.executable] if script in ("single", "dp") else [*STANDALONE, ranks]
    words = [ALTERED, f"scripts/minimal/{script}.py", "--dataset", "synthetic", *flags]
    return run(*launcher, *words, cwd=folder, timeout=TIMEOUT, **variables)


def result(ended, count=500):
    """Return loss and accuracy in per cent, of the last epoch."""
    assert ended.returncode == 0, ended.text
    _, loss, accuracy, found = RESULT.findall(ended.stdout)[-1]
    assert int(found) == count
    return float(loss), float(accuracy)
