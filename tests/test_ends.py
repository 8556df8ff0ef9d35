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
@pytest.mark.parametrize("is_early", [True, False])
def test_no_thread_of_gloo_is_left_to_abort_the_process(is_early, training, tmp_path):
    """If no thread stays without the early import either, it can go from the scripts."""
    text = (ROOT / "train_ddp.py").read_text()
    script = tmp_path / "train_ddp.py"
    script.write_text(text if is_early else text.replace("import torch.distributed.nn\n", ""))
    flags = training.arguments("ddp", "--model", "linear", "--no-tensorboard", "--max-steps", 3)
    command = [sys.executable, "-c", MAIN, script, *flags[1:]]
    ended = has_succeeded(finish(start_rank(0, 1, free_port(), *command, PYTHONPATH=str(ROOT))))
    left = ended.stdout.splitlines()[-1]
    assert (left == "left: []") == is_early, left


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
