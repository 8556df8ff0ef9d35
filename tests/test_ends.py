"""A rank ends as Python processes end: its process group is gone, with all of its threads."""

import sys

import pytest

from tests.processes import finish, free_port, start

# What a rank does after it has trained: it prints the names of the threads that gloo has left.
MAIN = """
import sys
from pathlib import Path
{first}
import train_ddp
from utils.cli import parse_args
train_ddp.train(parse_args("ddp", ""))
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print("left:", sorted(name for name in names if "gloo" in name), flush=True)
"""
# Leaves out an import at the top of train_ddp.py.
LATE = """
import types
source = Path("train_ddp.py").read_text().replace("import torch.distributed.nn\\n", "")
train_ddp = sys.modules["train_ddp"] = types.ModuleType("train_ddp")
exec(compile(source, "train_ddp.py", "exec"), train_ddp.__dict__)
"""


def threads_left(training, first, **environment):
    """Return what each of two ranks prints about the threads of gloo after its training."""
    port = free_port()
    flags = training.arguments("ddp", "--model", "tests.user_code:network", "--no-tensorboard")
    ranks = []
    for rank in range(2):
        launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in launcher.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1"} | environment
        code = MAIN.format(first=first)
        ranks.append(
            start(sys.executable, "-c", code, *flags[1:], "--max-steps", "25", **variables)
        )
    printed = []
    for ended in map(finish, ranks):
        assert ended.status == 0, ended.text
        [line] = [line for line in ended.stdout.splitlines() if line.startswith("left:")]
        printed.append(line.removeprefix("left: "))
    return printed


@pytest.mark.parametrize("fault", ["", "1:13:SIGTERM"], ids=["complete", "stopped"])
def test_no_thread_of_gloo_is_left_to_abort_the_process(fault, training):
    assert threads_left(training, "", FAULT=fault or "::") == ["[]"] * 2
