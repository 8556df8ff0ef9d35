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
print("left:", sorted(name for name in names if "gloo" in name))
"""
# Leaves out an import at the top of train_ddp.py.
LATE = """
import types
source = Path("train_ddp.py").read_text().replace("import torch.distributed.nn\\n", "")
train_ddp = sys.modules["train_ddp"] = types.ModuleType("train_ddp")
exec(compile(source, "train_ddp.py", "exec"), train_ddp.__dict__)
"""


def threads_left(training, first="", ranks=2, fault="::"):
    """Return what each rank prints about the threads of gloo after its training."""
    flags = ["--model", "tests.user_code:network", "--no-tensorboard", "--max-steps", 25]
    _, *flags = training.arguments("ddp", *flags)
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "FAULT": fault}
    common |= {"MASTER_PORT": str(free_port())}
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", MAIN.format(first=first), *flags]
        processes.append(start(*command, **common | own))
    printed = []
    for ended in map(finish, processes):
        assert ended.status == 0, ended.text
        printed += [line for line in ended.stdout.splitlines() if line.startswith("left: ")]
    return printed


def test_no_thread_of_gloo_is_left_to_abort_the_process(training):
    """In a process of its own, because another test may have imported what has to be early."""
    assert threads_left(training, ranks=1) == ["left: []"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["::", "1:13:SIGTERM"], ids=["complete", "stopped"])
def test_no_thread_of_gloo_is_left_on_two_ranks(fault, training):
    assert threads_left(training, fault=fault) == ["left: []"] * 2


@pytest.mark.slow
def test_without_the_early_import_three_threads_stay(training):
    """If this fails, PyTorch has changed, and the import in the scripts can go."""
    three = str(["gloo_tcp_loop", "pt_gloo_runloop", "pt_gloo_runloop"])
    assert threads_left(training, LATE) == [f"left: {three}"] * 2
