"""The table of the quick start: what it compares, and when its figures prove little."""

import json
import os
import subprocess
import sys

import compare
import pytest

from tests.processes import ROOT, error_line, run, succeed

SCRIPT = ROOT / "scripts" / "tools" / "compare.py"
RUN = {"technique": "single", "dataset": "mnist", "model": "convnet", "amp": "off", "device": "cpu"}
RUN |= {"global_batch_size": 96, "global_step": 312, "torch_version": "2.15", "resumed_from": None}
RUN |= {"world_size": 1, "num_devices": 1, "threads": 1, "test_accuracy": 0.99}
RUN |= {"train_images_per_second": 4000.0, "total_seconds": 9.0, "peak_memory_bytes": [2**20]}
DDP = RUN | {"technique": "ddp", "num_devices": 2, "world_size": 2, "train_images_per_second": 6e3}


def tell(folder, *runs):
    for i, content in enumerate(runs):
        (folder / str(i)).mkdir()
        (folder / str(i) / "summary.json").write_text(json.dumps(content))
    return succeed(run(sys.executable, SCRIPT, *(folder / str(i) for i in range(len(runs))))).stdout


def test_runs_that_are_alike_have_a_speed_up(tmp_path):
    told = tell(tmp_path, RUN, DDP)
    for words in (
        "1.50 x",
        "a device is a core of the CPU.",
        "of 96 images each",
    ):
        assert words in told
    line = f"set -o pipefail; {sys.executable} {SCRIPT} {tmp_path}/0 | true"
    assert succeed(run("bash", "-c", line)).stderr == "", "nobody reads its output"


@pytest.mark.parametrize(("name", "value"), [("model", "mlp"), ("global_step", 20)])
def test_runs_that_are_not_alike_have_none_and_it_says_why(name, value, tmp_path):
    told = tell(tmp_path, RUN | {"device": "cuda"}, DDP | {name: value})
    assert f"not alike, so no row has a speed-up: {name} ({RUN[name]}, {value})" in told
    assert "A device is a GPU (cuda)." in told
    assert "1.50 x" not in told
    assert "How to read it" not in told


def test_a_busy_machine_is_told():
    nothing, total, busy = [0.0, 0.0, 0.0], 100.0, 60.0
    assert compare.describe_others(nothing, [total, busy, 58.0]) == ""
    told = compare.describe_others(nothing, [total, busy, 20.0])
    assert "Other programs took 40%" in told


def test_what_children_used_is_ours():
    begin = compare.read_usage(os.getpid())
    work = "import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass"
    subprocess.run([sys.executable, "-c", work], timeout=60, check=True)
    total, busy, ours = (b - a for a, b in zip(begin, compare.read_usage(os.getpid()), strict=True))
    assert 0.9 < ours < total + 0.1
    assert busy > 0.5


@pytest.mark.parametrize("content", ["{}", "no JSON", None])
def test_what_is_no_summary_is_one_line(content, tmp_path):
    if content:
        (tmp_path / "summary.json").write_text(content)
    line = error_line(run(sys.executable, SCRIPT, tmp_path), status=1)
    assert line.startswith(f"compare.py: error: '{tmp_path}/summary.json': ")
