"""Fixtures: data without a network, a folder for runs, and proof that nothing is left behind."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# The same examples in every run: what fails here fails for everybody. `--hypothesis-profile
# default` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

# Where the tests run in the background a shell has them ignore Ctrl-C, and their processes, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

import data  # noqa: E402
from tests.processes import stray_processes  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the slow tests, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    if not config.getoption("--all"):
        # Left out rather than skipped: a skip is a test that this machine cannot run.
        slow = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ``--all``, let no file go without a test, and no test be skipped without a need."""
    if not session.config.getoption("--all") or session.config.args != ["tests"]:
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    passed = {report.nodeid.partition("::")[0] for report in reporter.stats.get("passed", [])}
    skipped = [report.longrepr[2] for report in reporter.stats.get("skipped", [])]
    problems = [
        f"{path} ran no test"
        for path in sorted(Path("tests").glob("test_*.py"))
        if str(path) not in passed
    ]
    problems += [f"skipped for no need: {reason}" for reason in skipped if "needs" not in reason]
    for problem in problems:
        reporter.write_line(problem, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def files_of_the_project() -> set[str]:
    """Return all files but those of git, environments and the caches of tools."""
    found = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        found |= {os.path.join(folder, name) for name in files}
    return found


@pytest.fixture(scope="session", autouse=True)
def no_file_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what is cached in a temporary folder, and fail if a file is left in the project."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    before = files_of_the_project()
    yield
    left = files_of_the_project() - before
    assert not left, f"left behind: {sorted(left)}"


@pytest.fixture(scope="session")
def synthetic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder in which the synthetic set is prepared."""
    folder = tmp_path_factory.mktemp("data")
    data.prepare("synthetic", str(folder))
    return folder


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """The folder with the real MNIST, where MNIST_ROOT names one."""
    root = os.environ.get("MNIST_ROOT")
    if not root:
        pytest.skip("needs the real MNIST: set MNIST_ROOT to a folder in torchvision's layout")
    return Path(root)


@pytest.fixture(autouse=True)
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process of this project running."""
    yield
    strays = stray_processes()
    for pid, _ in strays:
        os.kill(pid, signal.SIGKILL)  # one failure, not a row of them
    assert not strays, f"left running: {strays}"
