"""A rank ends as Python processes end: its process group is gone, with all of its threads."""

import sys

import pytest

from tests.processes import ROOT, finish, free_port, has_succeeded, start_rank

# Runs a script, and prints the names of the threads that gloo has left. A process of its own,
# because what has to be imported early may have been imported in this one.
MAIN = """
import runpy, sys
from pathlib import Path
del sys.argv[0]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert end.code == 0
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print("left:", sorted(name for name in names if "gloo" in name))
"""


@pytest.mark.slow
def test_no_thread_of_gloo_is_left_to_abort_the_process(training):
    flags = ["--model", "linear", "--no-tensorboard", "--max-steps", 3]
    command = [sys.executable, "-c", MAIN, *training.arguments("ddp", *flags)]
    ended = has_succeeded(finish(start_rank(0, 1, free_port(), *command)))
    assert ended.stdout.splitlines()[-1] == "left: []"


@pytest.mark.parametrize(
    "script",
    [
        "train_ddp.py",
        "scripts/minimal/ddp.py",
        "scripts/minimal/ddp_resume.py",
        "docs/examples/text.py",
        "docs/examples/pictures.py",
    ],
)
def test_who_copies_a_script_gets_the_early_import(script):
    """Where torchvision imports the module too, its effect is not seen."""
    text = (ROOT / script).read_text()
    assert text.index("\nimport torch.distributed.nn\n") < text.index("init_process_group(")
