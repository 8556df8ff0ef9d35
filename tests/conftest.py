"""Fixtures: data without a network, runs of the scripts, and a watch for processes left behind."""

import functools
import importlib
import os
import runpy
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

# A test without the mark ``gpu`` is about CPUs, and sees no GPU. Kept for pytest-xdist's workers,
# which inherit what is set here.
GPUS = os.environ.setdefault("MNIST_TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: tests compare bits
# Tests send these. In a job in the background, or under nohup, the tests inherit that they are
# ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

from tests import helpers, processes  # noqa: E402
from utils.cli import parse_args  # noqa: E402


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory):
    """A folder in torchvision's layout, with drawn digits: 1,920 for training, 500 for testing.

    They are there as MNIST and as Synthetic, so ``--dataset mnist`` works without a network.
    """
    from utils import digits

    draw = digits.draw_digits
    folder = tmp_path_factory.mktemp("digits")
    with mock.patch.object(digits, "draw_digits") as fewer:
        fewer.side_effect = lambda count, seed: draw(1920 if count == 60_000 else 500, seed)
        digits.Synthetic(folder, download=True)
    shutil.copytree(folder / "Synthetic", folder / "MNIST")
    return folder


@pytest.fixture(scope="session")
def mnist_dir():
    """The folder with the real MNIST, if MNIST_ROOT names one."""
    root = os.environ.get("MNIST_ROOT")
    if not root:
        pytest.skip("needs the real MNIST: set MNIST_ROOT to a folder in torchvision's layout")
    return Path(root)


@pytest.fixture
def training(digits_dir, tmp_path):
    """Real starts of the scripts in a folder that is not there yet."""
    return processes.Training(digits_dir, tmp_path / "run")


@pytest.fixture
def train(digits_dir, tmp_path, monkeypatch):
    """Return a function that runs a script in forked processes, and returns its run.

    This is much quicker than a real start, because torch is loaded already. The run is in the
    folder ``tmp_path / name``. It has to end with the stop signal ``stop``. An error is raised.
    """

    def run(name, *flags, script="single", ranks=1, stop=0):
        training = processes.Training(digits_dir, tmp_path / name)
        monkeypatch.setattr(sys, "argv", training.arguments(script, *flags))
        module = importlib.import_module(f"train_{script}")
        stops = helpers.on_ranks(lambda rank: module.train(parse_args(script, "")), ranks)
        for error in stops:
            if isinstance(error, Exception):
                raise error
        assert stops == [stop] * ranks
        return training

    return run


@pytest.fixture
def run_ranks(capfd):
    """Return a function that runs a whole script in forked ranks, in the folder ``cwd``.

    It returns the exit statuses and what was printed. What the ranks wrote to stderr stands in the
    report of a test that fails. ``prepare`` is called in each rank before the script.
    """

    def run(script, ranks, *flags, cwd, prepare=int):
        def execute(rank):
            os.chdir(cwd)
            sys.argv = [str(script), *map(str, flags)]
            prepare()
            runpy.run_path(str(script), run_name="__main__")

        capfd.readouterr()
        statuses = helpers.ended(*helpers.fork_ranks(execute, ranks))
        said = capfd.readouterr()
        sys.stderr.write(said.err)
        return statuses, processes.without_gloo(said.out)

    return run


@functools.cache
def count_gpus():
    """Return the number of GPUs in sight of another process, because this one sees none."""
    if not shutil.which("nvidia-smi"):
        return 0
    code = "from torch import cuda; print(cuda.device_count())"
    return int(processes.succeed(sys.executable, "-c", code).stdout)


@pytest.fixture(autouse=True)
def _gpus_if_marked(request, monkeypatch):
    """Show the user's GPUs to the tests with the mark ``gpu``, or skip them."""
    mark = request.node.get_closest_marker("gpu")
    if mark is None:
        return
    if GPUS == "all":
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS)
    if count_gpus() < mark.args[0]:
        pytest.skip(f"needs {mark.args[0]} GPUs")


@pytest.fixture(autouse=True)
def _no_process_is_left():
    """Fail a test that leaves a process running."""
    yield
    left = processes.kill_strays()
    assert not left, f"left running: {left}"
