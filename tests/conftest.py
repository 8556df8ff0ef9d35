"""Fixtures: data without a network, and proof that no test leaves a process behind."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

# A test without the mark ``gpu`` is about CPUs, and sees no GPU. Kept for pytest-xdist's workers,
# which inherit what is set here.
GPUS = os.environ.setdefault("MNIST_TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: tests compare bits

from tests import processes  # noqa: E402


def pytest_sessionfinish(session):
    """Fail a whole run (--all) in which a file has no test, or a test is skipped without a need."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None or config.args != ["tests"]:
        return  # a worker of pytest-xdist, or a part of the tests
    if config.option.markexpr or config.option.keyword or config.option.collectonly:
        return
    passed, skipped = (reporter.stats.get(kind, []) for kind in ("passed", "skipped"))
    ran = {report.nodeid.partition("::")[0] for report in (*passed, *skipped)}
    files = (f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py")))
    problems = [f"{name} has no test" for name in files if name not in ran]
    # A reason names what this machine lacks. Without one, a test would be skipped everywhere.
    reasons = {report.longrepr[2] for report in skipped}
    problems += [f"skipped without a need: {why}" for why in reasons if "needs" not in why]
    for problem in problems:
        reporter.write_line(problem, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory):
    """A folder in torchvision's layout, with drawn digits: 1,920 for training, 500 for testing.

    They lie there as MNIST and as Synthetic, so ``--dataset mnist`` works without a network.
    """
    from utils.digits import draw_digits

    folder = tmp_path_factory.mktemp("digits")
    for part, count, seed in (("train", 1920, 0), ("t10k", 500, 1)):
        for kind, values in zip(
            ("images-idx3", "labels-idx1"), draw_digits(count, seed), strict=True
        ):
            # The IDX format: the type (8 for bytes), the number of dimensions, and each.
            header = [0x800 + values.ndim, *values.shape]
            content = b"".join(x.to_bytes(4, "big") for x in header) + values.numpy().tobytes()
            for name in ("MNIST", "Synthetic"):
                path = folder / name / "raw" / f"{part}-{kind}-ubyte"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
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
    """Runs of the scripts in a folder that is not there yet."""
    return processes.Training(digits_dir, tmp_path / "run")


@pytest.fixture
def in_process(digits_dir, tmp_path, monkeypatch):
    """Return what runs a script in this process: for effects that need no process of their own."""
    import importlib

    import torch

    from utils import cli, signals

    handlers = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    threads = torch.get_num_threads()

    def train(name, *flags, script="single", stop=0):
        run = processes.Training(digits_dir, tmp_path / name)
        words = [str(word) for word in run.command(script, *flags)]
        at = words.index(f"train_{script}.py")
        monkeypatch.setattr(sys, "argv", words[at:])
        args = cli.parse_args(script, "")
        assert importlib.import_module(f"train_{script}").train(args) == stop
        return run

    yield train
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@functools.cache
def count_gpus():
    """Return the number of the user's GPUs, from another process, because this one sees none."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    shown = kept if GPUS == "all" else kept | {"CUDA_VISIBLE_DEVICES": GPUS}
    code = "from torch import cuda; print(cuda.device_count() if cuda.is_available() else 0)"
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, env=shown, capture_output=True, text=True).stdout or 0)


@pytest.fixture(autouse=True)
def _gpus_if_marked(request, monkeypatch):
    """Show the user's GPUs to the tests with the mark ``gpu``, or skip them."""
    mark = request.node.get_closest_marker("gpu")
    if mark is None:
        return
    needed = mark.args[0] if mark.args else 1
    if count_gpus() < needed:
        pytest.skip(f"needs {needed} GPUs")
    if GPUS == "all":
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS)


@pytest.fixture(autouse=True)
def _no_process_is_left():
    """Fail a test that leaves a process running."""
    yield
    left = processes.kill_strays()
    assert not left, f"left running: {left}"
