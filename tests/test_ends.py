"""A rank ends as Python processes end: its process group is gone, with all of its threads."""

import sys

import pytest

from tests.processes import free_port, succeed

# What a rank does after it has trained: it prints the names of the threads that gloo has left.
MAIN = """
from pathlib import Path
import train_ddp
from utils.cli import parse_args
train_ddp.train(parse_args("ddp", ""))
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print("left:", [name for name in names if "gloo" in name])
"""


@pytest.mark.parametrize(
    "fault",
    ["::", pytest.param("0:13:SIGTERM", marks=pytest.mark.slow)],
    ids=["complete", "stopped"],
)
def test_no_thread_of_gloo_is_left_to_abort_the_process(fault, training):
    """In a process of its own, because another test may have imported what has to be early."""
    flags = ["--model", "tests.user_code:network", "--no-tensorboard", "--max-steps", 25]
    _, *flags = training.arguments("ddp", *flags)
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    launcher |= {"MASTER_PORT": str(free_port()), "FAULT": fault}
    ended = succeed(sys.executable, "-c", MAIN, *flags, **launcher)
    assert ended.stdout.splitlines()[-1] == "left: []"
