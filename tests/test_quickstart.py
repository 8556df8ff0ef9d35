"""The first command: it trains and compares, and leaves nothing half-made."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, finish, run, start


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout of its own, without an environment."""
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs", "data") and not path.name.endswith("_cache"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "scripts").unlink()
    (tmp_path / "scripts").mkdir()
    for path in (ROOT / "scripts").iterdir():
        if path.is_file():
            (tmp_path / "scripts" / path.name).write_bytes(path.read_bytes())
            (tmp_path / "scripts" / path.name).chmod(0o755)
        else:
            (tmp_path / "scripts" / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.long
def test_quickstart_compares_the_three(copy: Path, synthetic_dir: Path) -> None:
    """In an environment that has what is needed: nothing is installed."""
    flags = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--model", "linear"]
    begin = time.monotonic()
    result = run(copy / "scripts" / "quickstart.sh", *flags, "--threads", 1, cwd=copy, timeout=120)
    assert result.returncode == 0, result.text
    assert not (copy / ".venv").exists()
    rows = [line.split() for line in result.stdout.splitlines() if "MB" in line]
    assert [row[0] for row in rows] == ["single", "dp", "ddp"]
    assert rows[0][rows[0].index("x", 3) - 1] == "1.00"
    for words in ("How to read it", "tensorboard", "--resume", "MODELS in models.py"):
        assert words in result.stdout
    assert "Traceback" not in result.text
    assert time.monotonic() - begin < 120


@pytest.mark.slow
def test_without_a_network_it_goes_on_with_drawn_digits(copy: Path) -> None:
    dead = "http://127.0.0.1:9"
    result = run(
        *[copy / "scripts" / "quickstart.sh", "--model", "linear", "--threads", 1],
        cwd=copy,
        timeout=150,
        http_proxy=dead,
        https_proxy=dead,
    )
    assert result.returncode == 0, result.text
    assert "Going on with drawn digits" in result.stderr
    assert result.stdout.count("data    synthetic") == 3


def without_uv() -> str:
    return ":".join(p for p in os.environ["PATH"].split(":") if not (Path(p) / "uv").exists())


@pytest.mark.slow
def test_an_interrupted_installation_leaves_nothing(copy: Path) -> None:
    # A registry that takes the connection and never answers: pip waits until it is interrupted.
    registry = socket.create_server(("127.0.0.1", 0))
    process = start(
        copy / "scripts" / "test.sh",
        cwd=copy,
        PATH=without_uv(),
        PIP_INDEX_URL=f"http://127.0.0.1:{registry.getsockname()[1]}/simple",
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
        PIP_CONFIG_FILE="/dev/null",
    )
    deadline = time.monotonic() + 60
    while not list(copy.glob(".venv/bin/pip*")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it was interrupted"
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    result = finish(process, timeout=20)
    registry.close()
    assert result.returncode == 130, result.text
    assert not (copy / ".venv").exists()


@pytest.mark.slow
def test_a_failed_installation_says_what_to_do(copy: Path) -> None:
    result = run(
        copy / "scripts" / "test.sh",
        cwd=copy,
        timeout=90,
        PATH=without_uv(),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
        PIP_EXTRA_INDEX_URL="",
        PIP_CONFIG_FILE="/dev/null",
    )
    assert result.returncode == 1
    assert "Install python3-venv" in result.stderr
    assert not (copy / ".venv").exists()
