"""train_ddp.py, of which one rank crashes in its first attempt, at the start of the training."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import train_ddp
from utils import engine

train_one_epoch = engine.train_one_epoch


def crash(*args: Any, **kwargs: Any) -> Any:
    flag = Path(os.environ["CRASH_FLAG"])
    if os.environ["RANK"] == os.environ["CRASH_RANK"] and not flag.exists():
        flag.touch()
        if os.environ["CRASH_HOW"] == "kill":
            os.kill(os.getpid(), 9)
        raise RuntimeError("crashed once, on purpose")
    return train_one_epoch(*args, **kwargs)


engine.train_one_epoch = crash

if __name__ == "__main__":
    sys.exit(train_ddp.main())
