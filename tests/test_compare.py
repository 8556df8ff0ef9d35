"""The table of the quick start: what it compares, and when its figures prove little."""

import json
import os
import sys

import compare

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
    told = tell(tmp_path, RUN | {"timed_steps": [11, 312]}, DDP | {"timed_steps": [2, 9]})
    assert "1.50 x" in told
    assert "a device is a core of the CPU." in told
    assert "of 96 images each" in told
    assert "ddp was short, so its images/s are those of steps 2 to 9.\n" in told
    assert "single was short" not in told
    line = f"set -o pipefail; {sys.executable} {SCRIPT} {tmp_path}/0 | true"
    assert succeed(run("bash", "-c", line)).stderr == "", "nobody reads its output"


def test_runs_that_are_not_alike_have_none_and_it_says_why(tmp_path):
    told = tell(tmp_path, RUN | {"device": "cuda"}, DDP | {"model": "mlp"})
    assert "not alike, so no row has a speed-up: model (convnet, mlp)" in told
    assert "A device is a GPU (cuda)." in told
    assert "1.50 x" not in told
    assert "How to read it" not in told


def test_a_busy_machine_is_told():
    begin = compare.read_usage(os.getpid())
    total, busy, ours = begin[0] + 100, begin[1] + 60, begin[2] + 58
    assert compare.describe_others(begin, [total, busy, ours]) == ""
    told = compare.describe_others(begin, [total, busy, begin[2] + 20])
    assert "Other programs took 40%" in told


def test_what_is_no_summary_is_one_line(tmp_path):
    line = error_line(run(sys.executable, SCRIPT, tmp_path), status=1)
    assert line.startswith(f"compare.py: error: '{tmp_path}/summary.json': ")
