"""A rank ends as Python processes end: its process group is gone, with all of its threads."""

import sys

import pytest

from tests.processes import ROOT, finish, free_port, start_rank

# Runs a script, and prints the names of the threads that gloo has left. After "stop" the script
# gets SIGTERM in its first step. A process of its own, because what has to be imported early may
# have been imported in this one.
MAIN = """
import os, runpy, signal, sys
import torch
from pathlib import Path
how, *sys.argv = sys.argv[1:]
step = torch.optim.SGD.step
def step_and_stop(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return step(*args)
if how == "stop":
    torch.optim.SGD.step = step_and_stop
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert end.code == (143 if how == "stop" else 0)
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print("left:", sorted(name for name in names if "gloo" in name))
"""
OF_TRAINING = ["--model", "linear", "--no-tensorboard", "--max-steps", 3, "--run-dir", "run"]


def threads_left(folder, data_dir, script, how="complete"):
    """Return what a script prints about the threads of gloo at its end."""
    flags = ["--data-dir", data_dir, *(OF_TRAINING if script.stem == "train_ddp" else [])]
    command = [sys.executable, "-c", MAIN, how, script, *flags]
    ended = finish(start_rank(0, 1, free_port(), *command, cwd=folder, PYTHONPATH=str(ROOT)))
    assert ended.status == 0, ended.text
    assert ("stopped" in ended.stdout) == (how == "stop")
    return ended.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("train_ddp.py", "complete"),
        pytest.param("train_ddp.py", "stop", marks=pytest.mark.slow),
    ],
)
def test_no_thread_of_gloo_is_left_to_abort_the_process(script, how, digits_dir, tmp_path):
    assert threads_left(tmp_path, digits_dir, ROOT / script, how) == "left: []"


@pytest.mark.slow
def test_without_the_early_import_threads_stay(digits_dir, tmp_path):
    """If this fails, PyTorch has changed, and the import in the scripts can go."""
    script = tmp_path / "train_ddp.py"
    text = (ROOT / "train_ddp.py").read_text()
    script.write_text(text.replace("import torch.distributed.nn\n", ""))
    assert "pt_gloo_runloop" in threads_left(tmp_path, digits_dir, script)


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
