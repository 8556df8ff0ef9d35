"""The doctor's findings, and the equal conditions of the benchmark."""

import argparse
import json
import socket
import sys

import pytest

from scripts.tools import benchmark, doctor
from tests.processes import ROOT, finish, free_port, run, start, succeed, torchrun

DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"
BENCHMARK = ROOT / "scripts" / "tools" / "benchmark.py"


def healthy(rank):
    """Return the facts of one of four ranks, on two machines with two GPUs each."""
    host = f"node{rank // 2}"
    return {
        "host": host,
        "versions": "torch 2.15",
        "interface": None,
        "shm": 1024,
        "name_leads_to": f"10.0.0.{rank // 2 + 1}",
        "gpu": f"GPU {rank % 2} of {host}",
        "free": 79.0,
        "memory": 80.0,
    }


@pytest.mark.parametrize(
    ("rank", "fact", "value", "words"),
    [
        (3, "versions", "torch 2.14", "error: ranks [3] have torch 2.14: install"),
        (0, "name_leads_to", "127.0.1.1", "warning: on node0 the name node0 leads to 127.0.1.1"),
        (2, "shm", 64, "warning: 64 MiB free in /dev/shm of node1"),
        (3, "free", 9.0, "warning: 9 of 80 GiB free on GPU 1 of node1: nvidia-smi"),
        (3, "gpu", "GPU 0 of node1", "error: ranks [2, 3] have GPU 0 of node1: each"),
        (3, "gpu", "no GPU", "error: ranks [3] have no GPU: each"),
    ],
)
def test_the_doctor_names_each_defect_and_nothing_else(rank, fact, value, words):
    ranks = [healthy(rank) for rank in range(4)]
    assert all(line.startswith("ok: ") for line in doctor.examine(ranks))
    ranks[rank][fact] = value
    found = [line for line in doctor.examine(ranks) if not line.startswith("ok: ")]
    assert found[-1].startswith(words)
    assert len(found) == (2 if fact == "versions" else 1), "both versions are named"


@pytest.mark.slow
def test_the_doctor_names_who_is_missing_and_who_came_twice():
    meeting = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, DOCTOR, "--timeout", 30]
    processes = [start(*command, RANK=rank, **meeting) for rank in "022"]
    first, again, also = map(finish, processes)
    assert [ended.status for ended in (first, again, also)] == [1, 1, 1]
    assert "missing after 30 s: rank 1, 3 of 4." in first.stderr
    twice = f"error: rank 2 on {socket.gethostname()}: this rank was started twice"
    assert (again.stderr + also.stderr).count(twice) == 1
    assert (first.text + again.text + also.text).count("\n") == 2, "a line each"


@pytest.mark.slow
def test_the_doctor_does_not_wait_for_a_program_that_says_nothing():
    """Another program may have the port. PyTorch's store would wait for its answer for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        ended = run(sys.executable, DOCTOR, "--timeout", 5, RANK="1", WORLD_SIZE="2", **place)
    assert ended.status == 1
    assert "another program answers at 127.0.0.1" in ended.stderr
    assert ended.text.count("\n") == 1


@pytest.mark.slow
def test_the_doctor_measures_and_judges_under_torchrun():
    ended = run(*torchrun(2, DOCTOR, "--pairs", "--json", "--min-gbps", 1e6))
    assert ended.status == 1
    found = json.loads(ended.stdout)
    assert not found["ok"]
    assert [row["bytes"] for row in found["rows"]] == [*doctor.SIZES, doctor.SIZES[-1]]
    of_all, of_pair = found["findings"][-2:]
    assert of_all.startswith("error: below 1e+06 GB/s: gloo all-reduce 268,435,456 B ")
    assert of_pair.startswith("error: below 1e+06 GB/s: rank 0 on ")


PRETENDER = """
import json, os, sys
from pathlib import Path
from utils.cli import parse_args
technique = Path(sys.argv[0]).stem.removeprefix("train_")
args = parse_args(technique, "")
if os.environ.get("RANK", "0") == "0":
    size = args.batch_size * int(os.environ.get("WORLD_SIZE", 1))
    with open("log", "a") as log:
        print(technique, args.threads, size, args.max_steps, args.amp, args.device, file=log)
summary = {
    "train_images_per_second": {"single": 500.0, "ddp": 750.0}[technique] * args.threads,
    "peak_memory_mb": [100, 200.0],
    "data_seconds": 1.0,
    "train_seconds": 4.0,
}
Path(args.run_dir, "summary.json").write_text(json.dumps(summary))
"""


@pytest.mark.slow
def test_the_benchmark_compares_equal_conditions_in_turns(tmp_path):
    """With scripts that only pretend to train, and write down their flags."""
    folder = tmp_path / "scripts" / "tools"
    folder.mkdir(parents=True)
    (folder / "benchmark.py").write_text(BENCHMARK.read_text())
    for name in ("single", "ddp"):
        (tmp_path / f"train_{name}.py").write_text(PRETENDER)
    command = [sys.executable, folder / "benchmark.py", "--rounds", 2, "--seconds", 0.1]
    command += ["--", "--amp", "bf16"]
    ended = succeed(*command, cwd=tmp_path, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    runs = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    names = [run[:2] for run in runs[1:]]  # the first one finds the number of steps
    assert names[:3] == [["single", "1"], ["single", "2"], ["ddp", "1"]]
    assert names[3:] == names[2::-1], "the second round goes backwards"
    assert {run[2] for run in runs} == {"512"}, "the global batch"
    assert len({tuple(run[3:]) for run in runs[1:]}) == 1
    assert runs[-1][-2:] == ["bf16", "cpu"]
    rows = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert "single 1 2 1,000 (1,000 to 1,000) 2.00 (2.00 to 2.00) 200 25%" in rows
    assert "ddp 2 2 750 (750 to 750) 1.50 (1.50 to 1.50) 200 25%" in rows


def test_on_gpus_dp_takes_part_and_the_sizes_are_equal():
    args = argparse.Namespace(gpus=8, devices=[1, 2, 8], threads=3)
    found = benchmark.settings(args)
    techniques = [(setting.technique, setting.devices) for setting in found]
    assert techniques == [("single", 1), ("ddp", 1), ("dp", 2), ("ddp", 2), ("dp", 8), ("ddp", 8)]
    assert [setting.threads for setting in found] == [3, 3, 6, 6, 24, 24]
