"""Run a script of this project, in which something is as ALTER says.

    ALTER=SIGSTOP ALTER_RANK=1 ALTER_AT=7 torchrun ... tests/altered.py train_ddp.py --max-steps 9

What ALTER may be stands in tests/alterations, in a module for each kind.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.alterations import differences, faults, figures  # noqa: E402

# Not below, in the ``if``: a rank that ``spawn`` starts imports this file.
for kind in (faults, differences, figures):
    kind.install(os.environ.get("ALTER", ""))

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    faults.go_wrong("start")
    if "/" in sys.argv[0]:
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    else:
        sys.exit(importlib.import_module(sys.argv[0].removesuffix(".py")).main())
