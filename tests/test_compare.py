"""The table of the quick start says when other programs took a share of the machine."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import ROOT, run

SCRIPT = ROOT / "scripts" / "tools" / "compare.py"


@pytest.fixture
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([100.0, 60.0, 58.0], ""),  # of 100 s we took 58, and others 2
        ([100.0, 60.0, 20.0], "Other programs took 40% of this machine's CPU time"),
        ([0.0, 0.0, 0.0], ""),  # no /proc
        ([100.0, 60.0, 61.0], ""),  # rounded to ticks
    ],
)
def test_a_busy_machine_is_told(compare: ModuleType, after: list[float], words: str) -> None:
    told = compare.describe_others([0.0, 0.0, 0.0], after)
    assert words in told
    assert bool(told) == bool(words)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_what_children_used_is_ours(compare: ModuleType) -> None:
    begin = compare.read_usage(os.getpid())
    work = "import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", work], timeout=60, check=True)
    total, busy, ours = (b - a for a, b in zip(begin, compare.read_usage(os.getpid()), strict=True))
    assert 0.9 < ours < total + 0.1
    assert busy > 0.5


def test_the_usage_is_printed_for_the_shell() -> None:
    ended = run(sys.executable, SCRIPT, "--usage-of", os.getpid(), timeout=30)
    assert ended.returncode == 0, ended.text
    assert len([float(word) for word in ended.stdout.split()]) == 3


@pytest.mark.parametrize(
    "content",
    ["{}", "[1]", "null", '"text"', "[" * 100_000, "no JSON", b"\xff", None, "a pipe", "escapes"],
    ids=str,
)
def test_what_is_no_summary_is_one_line(
    content: str | bytes | None,
    compare: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "summary.json"
    if content == "a pipe":
        os.mkfifo(path)
    elif content == "escapes":
        numbers = dict.fromkeys(compare.NUMBERS, 1) | {"train_images_per_second": 1.0}
        texts = {"technique": "\x1b[31m\nddp", "device": "cpu", "peak_memory_bytes": [1]}
        path.write_text(json.dumps(numbers | texts))
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    line = str(ended.value.code)
    assert line.startswith(f"compare.py: error: '{path}': ")
    assert line.isprintable()


def test_without_runs_it_says_what_to_name() -> None:
    ended = run(sys.executable, SCRIPT, timeout=30)
    assert ended.returncode == 2
    assert "name the folders of complete runs" in ended.stderr
