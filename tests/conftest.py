"""Fixtures: data without a network, a folder for runs, and proof that nothing is left behind."""

import os
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Programs that install and start nothing. $GPUS is what torch counts, $INSTALL what pip does.
PYTHON = """case "$*" in
    -c*) echo "${GPUS:-0}" ;;
    -m\\ venv*) mkdir -p "$3/bin" && touch "$3/pyvenv.cfg" && cp "$0" "$3/bin/python" ;;
    -m\\ pip*) eval "$INSTALL" ;;
    -\\ *) [ -z "$INSTALL" ] ;;
    *) echo "ran $*" ;;
esac"""
FAKES = {"python3": PYTHON} | dict.fromkeys(("torchrun", "ssh", "srun"), "echo STARTED")
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "scripts" / "tools"))  # where the tools find each other

# Where the tests run in the background a shell has them ignore Ctrl-C, and their processes, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests import processes  # noqa: E402

# Read when torch is imported, which is therefore left to the fixtures that need it.
os.environ.update(processes.SETTINGS)


def pytest_collection_modifyitems(items):
    for item in items:
        mark = item.get_closest_marker("gpu")
        needed = (mark.args or (1,))[0] if mark else 0
        if needed and processes.count_gpus() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs GPUs: {needed}"))


def files_of_the_project():
    """Return all files but those of git, environments and the caches of tools."""
    found = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        found |= {os.path.join(folder, name) for name in files}
    return found


files_before = pytest.StashKey()


def pytest_sessionstart(session):
    session.config.stash[files_before] = files_of_the_project()


def pytest_sessionfinish(session):
    """Fail the run for what no single test can see."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput") or reporter is None or config.option.collectonly:
        return  # a worker of pytest-xdist reports to another process
    left = files_of_the_project() - config.stash[files_before]
    problems = [f"left behind in the project: {sorted(left)}"] if left else []
    if config.args == ["tests"] and not config.option.markexpr and not config.option.lf:
        passed, skipped = (reporter.stats.get(kind, []) for kind in ("passed", "skipped"))
        ran = {report.nodeid.partition("::")[0] for report in (*passed, *skipped)}
        files = map(str, sorted(Path("tests").glob("test_*.py")))
        problems += [f"{path} has no test" for path in files if path not in ran]
        # What this machine lacks is named. A test that is skipped for no need never runs anywhere.
        reasons = {report.longrepr[2] for report in skipped}
        problems += [f"skipped for no need: {why}" for why in reasons if "needs" not in why]
    for problem in problems:
        reporter.write_line(problem, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    """Keep what is cached in a temporary folder."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def synthetic_dir(tmp_path_factory):
    """A data folder in which the synthetic set is prepared, once for all workers."""
    import data

    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "synthetic"
    folder.mkdir(exist_ok=True)
    data.load_dataset("synthetic", str(folder))  # one draws; it locks the others out meanwhile
    return folder


@pytest.fixture(scope="session")
def short_dir(synthetic_dir, tmp_path_factory):
    """The same with 1,920 images for training and 500 for testing: an epoch takes a moment."""
    from utils.datasets import idx, prepare

    whole, folder = prepare.prepare("synthetic", str(synthetic_dir)), tmp_path_factory.mktemp("a")
    for path in whole.iterdir():
        part = folder / path.relative_to(synthetic_dir)
        part.parent.mkdir(parents=True, exist_ok=True)
        first = idx.read(path)[: 500 if path.name.startswith("t10k") else 1920]
        part.write_bytes(idx.to_bytes(first))
    return folder


@pytest.fixture
def training(short_dir, tmp_path):
    """Trainings in a folder of this test's own, in which 20 steps are an epoch."""
    return processes.Training(short_dir, tmp_path / "run")


@pytest.fixture(scope="session")
def expected(synthetic_dir, tmp_path_factory):
    """The weights that two processes reach, however they were started."""
    from tests.launches import LAUNCHES, SHORT, finish_all, launch

    folder = tmp_path_factory.mktemp("expected")
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {folder}"
    command = LAUNCHES["no launcher, one machine"]
    (ended,) = finish_all(launch(command, flags, literal=False), 60)
    assert ended.returncode == 0, ended.text
    return processes.summary(folder)["weights_sha256"]


@pytest.fixture
def copy(tmp_path):
    """A checkout of its own, without an environment; and fake programs."""
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs", "data"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "fakes").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "fakes" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "fakes" / name).chmod(0o755)
    return tmp_path


@pytest.fixture(scope="session")
def mnist_dir():
    """The folder with the real MNIST, where MNIST_ROOT names one."""
    root = os.environ.get("MNIST_ROOT")
    if not root:
        pytest.skip("needs the real MNIST: set MNIST_ROOT to a folder in torchvision's layout")
    return Path(root)


@pytest.fixture(autouse=True)
def _gpus_as_marked(request, monkeypatch):
    monkeypatch.setattr(processes, "show_gpus", "gpu" in request.keywords)


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Fail a test that leaves a process of this project running."""
    yield
    strays = processes.stray_processes()
    for pid, _ in strays:
        os.kill(pid, signal.SIGKILL)  # one failure, not a row of them
    assert not strays, f"left running: {strays}"
