"""Fixtures: data without a network, a folder for runs, and proof that nothing is left behind."""

import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# The same examples in every run: what fails here fails for everybody. `--hypothesis-profile
# default` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "scripts" / "tools"))  # where the tools find each other

# Where the tests run in the background a shell has them ignore Ctrl-C, and their processes, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

from tests import fork_server, processes  # noqa: E402

# As the scripts set it where they are imported, and before torch is in the tests' fork server.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Read when torch is imported, which is therefore left to the fixtures that need it.
os.environ.update(processes.SETTINGS)

# A test of the quick run may take this long where `import torch` takes that long, in seconds; where
# the import lasts longer, because the machine is slower or busy, a test may as well.
TEST_LIMIT, IMPORT_NOMINAL = 10.0, 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the slow tests, too")
    parser.addoption("--fast", action="store_true", help="only tests that start no process")
    parser.addoption("--real", action="store_true", help="fork no process, start all anew")


def pytest_configure(config: pytest.Config) -> None:
    processes.use_fork_server = not config.getoption("--real")
    processes.may_start = not config.getoption("--fast")


def pytest_unconfigure() -> None:
    fork_server.uninstall()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("gpu")
        needed = (mark.args or (1,))[0] if mark else 0
        if needed and processes.count_gpus() < needed:
            reason = "needs a GPU" if needed == 1 else f"needs {needed} GPUs"
            item.add_marker(pytest.mark.skip(reason=reason))
    if not config.getoption("--all"):
        # Left out rather than skipped: a skip is a test that this machine cannot run.
        is_fast = config.getoption("--fast")
        slow = [i for i in items if "slow" in i.keywords or (is_fast and takes_seconds(i))]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    # Of several workers none is to be left alone with a long file at the end.
    cost: Counter[Path] = Counter()
    for item in items:
        is_long = bool(item.keywords.keys() & {"slow", "long"})
        has_files = "tmp_path" in item.fixturenames  # and most often processes
        cost[item.path] += 1 + 3 * has_files + 30 * is_long
    items.sort(key=lambda item: -cost[item.path])


def takes_seconds(item: pytest.Item) -> bool:
    """Whether a test waits for time limits, or has a whole data set, which is drawn or read."""
    fixtures = {"synthetic_dir", "mnist_dir", "raw", "place"} & {*item.fixturenames}
    return "long" in item.keywords or bool(fixtures)


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one that has shared them out (pytest-xdist)."""
    return hasattr(config, "workerinput")


def files_of_the_project() -> set[str]:
    """Return all files but those of git, environments and the caches of tools."""
    found = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        found |= {os.path.join(folder, name) for name in files}
    return found


files_before = pytest.StashKey[set[str]]()
import_seconds = pytest.StashKey[list[float]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[files_before] = files_of_the_project()
    session.config.stash[import_seconds] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take from a worker of pytest-xdist what it has measured."""
    node.config.stash[import_seconds] += getattr(node, "workeroutput", {}).get("import", [])  # type: ignore[attr-defined]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run for what no single test can see."""
    config = session.config
    seconds = [fork_server.import_seconds] if fork_server.import_seconds else []
    if is_worker(config):
        config.workeroutput["import"] = seconds  # type: ignore[attr-defined]
        return
    config.stash[import_seconds] += seconds
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly:
        return
    left = files_of_the_project() - config.stash[files_before]
    problems = [f"left behind in the project: {sorted(left)}"] if left else []
    if config.getoption("--all"):
        if config.args == ["tests"] and not config.option.markexpr:
            problems += what_did_not_run(reporter)
    else:
        slow = what_took_too_long(reporter, config.stash[import_seconds])
        if os.getloadavg()[1] < (os.cpu_count() or 1) + 2:
            problems += slow
        else:  # others keep the machine busy
            reporter.write_line("\n".join(slow))
    for problem in problems:
        reporter.write_line(problem, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def what_did_not_run(reporter: pytest.TerminalReporter) -> list[str]:
    """With ``--all``, let no file go without a test, and no test be skipped without a need."""
    passed = {report.nodeid.partition("::")[0] for report in reporter.stats.get("passed", [])}
    skipped = [report.longrepr[2] for report in reporter.stats.get("skipped", [])]
    files = sorted(Path("tests").glob("test_*.py"))
    return [f"{path} ran no test" for path in files if str(path) not in passed] + [
        f"skipped for no need: {reason}" for reason in skipped if "needs" not in reason
    ]


def what_took_too_long(reporter: pytest.TerminalReporter, imports: list[float]) -> list[str]:
    """Name the tests of the quick run that have to become shorter, or be marked ``slow``."""
    import_time = max(imports, default=0.0)
    limit = TEST_LIMIT * max(1.0, import_time / IMPORT_NOMINAL)
    reports = [report for key in ("passed", "failed") for report in reporter.stats.get(key, [])]
    too_long = [r for r in reports if r.duration > limit and "long" not in r.keywords]
    why = f"limit {limit:.0f} s, as `import torch` took {import_time:.1f} s: shorten it or mark it"
    return [f"{r.nodeid} ({r.when}) took {r.duration:.1f} s, {why}" for r in too_long]


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what is cached in a temporary folder."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def synthetic_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder in which the synthetic set is prepared, once for all workers."""
    import data

    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "synthetic"
    folder.mkdir(exist_ok=True)
    data.load_dataset("synthetic", str(folder))  # one draws; it locks the others out meanwhile
    return folder


@pytest.fixture(scope="session")
def short_dir(synthetic_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with 500 test images, for runs that are compared."""
    from tests import short

    return short.make(tmp_path_factory.mktemp("short"), 500, synthetic_dir)


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """The folder with the real MNIST, where MNIST_ROOT names one."""
    root = os.environ.get("MNIST_ROOT")
    if not root:
        pytest.skip("needs the real MNIST: set MNIST_ROOT to a folder in torchvision's layout")
    return Path(root)


@pytest.fixture(autouse=True)
def _as_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    processes.show_gpus = "gpu" in request.keywords
    is_real = processes.show_gpus or "real" in request.keywords
    with fork_server.real_processes() if is_real else contextlib.nullcontext():
        yield
    processes.show_gpus = False


@pytest.fixture(autouse=True)
def _the_environment_stays() -> Iterator[None]:
    """Fail a test after which no process could be forked any more, see tests/fork_server.py."""
    before = fork_server.early(os.environ)
    yield
    assert fork_server.early(os.environ) == before


@pytest.fixture(autouse=True)
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process of this project running."""
    yield
    strays = processes.stray_processes()
    for pid, _ in strays:
        os.kill(pid, signal.SIGKILL)  # one failure, not a row of them
    assert not strays, f"left running: {strays}"
