"""The doctor's findings, and the benchmark's equal conditions."""

import argparse
import itertools
import json
import os
import signal
import socket
import sys
import time

import pytest

from scripts.tools import benchmark, doctor
from tests.processes import ROOT, finish, run, start, succeed, torchrun

DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"
BENCHMARK = ROOT / "scripts" / "tools" / "benchmark.py"


def healthy(rank):
    """Return the facts of one of four ranks, on two machines with two GPUs each."""
    host = f"node{rank // 2}"
    facts = {"host": host, "versions": "torch 2.15", "address": "10.0.0.1", "interface": None}
    facts |= {"name_leads_to": "10.0.0.1", "shm": 1024, "files": 1024}
    return facts | {"gpu": f"GPU {rank % 2} of {host}", "free": 79.0, "memory": 80.0}


@pytest.mark.parametrize(
    ("rank", "changes", "words"),
    [
        (3, {"versions": "torch 2.14"}, "error: ranks [3] have torch 2.14: install"),
        (2, {"name_leads_to": "nowhere"}, "error: on node1 the name node1 leads to nowhere"),
        (2, {"shm": 64}, "warning: 64 MiB free in /dev/shm of node1"),
        (2, {"files": 256}, "warning: node1 allows 256 open files"),
        (3, {"free": 9.0}, "warning: 9 of 80 GiB free on GPU 1 of node1: nvidia-smi"),
        (3, {"gpu": "GPU 0 of node1"}, "error: ranks [2, 3] have GPU 0 of node1: each"),
    ],
)
def test_the_doctor_names_each_defect_and_nothing_else(rank, changes, words):
    ranks = [healthy(rank) for rank in range(4)]
    assert all(line.startswith("ok: ") for line in doctor.examine(ranks))
    ranks[rank] |= changes
    found = [line for line in doctor.examine(ranks) if not line.startswith("ok: ")]
    assert found[-1].startswith(words)
    assert len(found) == (2 if "versions" in changes else 1), "both versions are named"


def test_a_rank_without_a_gpu_among_others_is_an_error():
    without = healthy(1) | {"gpu": "no GPU"}
    found = list(doctor.examine([healthy(0), without]))
    assert "error: ranks [1] have no GPU: each rank needs its own" in found
    assert not any(line.startswith("error") for line in doctor.examine([without, without]))


def examined(ranks, world_size, port=None, **changes):
    """Start the doctor by hand as these ranks, and return how each of them ended."""
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    meeting = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, DOCTOR, "--timeout", 10]
    return [finish(p) for p in [start(*command, RANK=str(r), **meeting) for r in ranks]]


def test_the_doctor_names_who_is_missing_and_who_came_twice():
    first, again, also = examined([0, 2, 2], world_size=4)
    assert [ended.status for ended in (first, again, also)] == [1, 1, 1]
    assert "missing after 10 s: rank 1, 3 of 4." in first.stderr
    twice = f"error: rank 2 on {socket.gethostname()}: this rank was started twice"
    assert (again.stderr + also.stderr).count(twice) == 1
    assert (first.text + again.text + also.text).count("\n") == 2, "a line each"


@pytest.mark.slow
def test_without_rank_0_or_with_another_program_in_its_place_the_doctor_ends_in_time():
    (alone,) = examined([1], world_size=2)
    assert alone.status == 1
    assert "no rank 0 at 127.0.0.1:" in alone.stderr
    with socket.create_server(("", 0)) as mute:  # PyTorch would wait for its answer for ever
        ranks = examined([0, 1], world_size=2, port=mute.getsockname()[1])
    assert [ended.status for ended in ranks] == [1, 1]
    assert "is in use, by another program or a second rank 0" in ranks[0].stderr
    assert "another program answers at 127.0.0.1:" in ranks[1].stderr


@pytest.mark.slow
def test_the_doctor_measures_under_torchrun():
    told = succeed(*torchrun(2, DOCTOR)).stdout
    assert f"ok: ranks [0, 1] are on {socket.gethostname()}, where gloo uses " in told
    *_, measured = told.splitlines()
    assert measured.startswith("ok: gloo: ")
    assert measured.endswith(" GB/s for 4 MiB")


PRETENDER = """
import json, os, pathlib, sys, time
flags = dict(zip(sys.argv, sys.argv[1:]))
technique = pathlib.Path(sys.argv[0]).stem.removeprefix("train_")
rank = int(os.environ.get("RANK", 0))
size = int(flags["--batch-size"]) * int(os.environ.get("WORLD_SIZE", 1))
if rank == 0:
    with open(os.environ["LOG"], "a") as log:
        log.write(json.dumps([technique, size, flags]) + "\\n")
if technique == os.environ.get("FAILS"):
    sys.exit("train.py: error: not today")
if technique == "ddp" and "STALLS" in os.environ:
    pathlib.Path(os.environ["STALLS"]).touch()
    time.sleep(60)
speed = {"single": 500.0, "ddp": 750.0}[technique] * int(flags["--threads"])
pathlib.Path(flags["--run-dir"], "summary.json").write_text(
    json.dumps({"train_images_per_second": speed})
)
"""


@pytest.fixture
def pretend(tmp_path):
    """Return what is needed to start the benchmark on scripts that only pretend to train."""
    folder = tmp_path / "scripts" / "tools"
    folder.mkdir(parents=True)
    (folder / "benchmark.py").write_text(BENCHMARK.read_text())
    for name in ("single", "ddp"):
        (tmp_path / f"train_{name}.py").write_text(PRETENDER)
    command = [sys.executable, folder / "benchmark.py", "--rounds", 2, "--seconds", 0.1]
    return command, {"LOG": str(tmp_path / "log"), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_the_benchmark_compares_equal_conditions_in_turns(pretend, tmp_path):
    command, environment = pretend
    picture = tmp_path / "plot.png"
    ended = succeed(*command, "--plot", picture, "--", "--amp", "bf16", **environment)
    runs = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    names = [(technique, flags["--threads"]) for technique, _, flags in runs[1:]]
    assert names[:3] == [("single", "1"), ("single", "2"), ("ddp", "1")]
    assert names[3:] == names[2::-1], "the second round goes backwards"
    assert {size for _, size, _ in runs} == {512}
    assert len({flags["--max-steps"] for _, _, flags in runs[1:]}) == 1
    assert all(flags["--amp"] == "bf16" and flags["--device"] == "cpu" for *_, flags in runs)
    rows = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert "single 1 2 1,000 (1,000 to 1,000) 2.00 (2.00 to 2.00)" in rows
    assert "ddp 2 2 750 (750 to 750) 1.50 (1.50 to 1.50)" in rows
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_setting_that_fails_does_not_lose_the_others(pretend):
    command, environment = pretend
    ended = run(*command, FAILS="ddp", **environment)
    assert ended.status == 1
    assert "ddp on 2 with 2 CPU threads: train.py: error: not today" in ended.stderr
    assert "1,000 (1,000 to 1,000)" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_the_benchmark_prints_what_it_has(number, pretend, tmp_path):
    command, environment = pretend
    process = start(*command, STALLS=str(tmp_path / "stalls"), **environment)
    deadline = time.monotonic() + 60
    while not (tmp_path / "stalls").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # Ctrl-C reaches torchrun too.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    ended = finish(process, 60)
    assert ended.status == 130, ended.text
    assert "500 (500 to 500)" in ended.stdout
    assert "Traceback" not in ended.text


def test_on_gpus_dp_takes_part_and_the_sizes_are_equal():
    args = argparse.Namespace(gpus=8, devices=[2, 8], threads=3)
    found = benchmark.settings(args)
    assert [setting.technique for setting in found] == ["single", "dp", "ddp", "dp", "ddp"]
    assert [setting.threads for setting in found] == [3, 6, 6, 24, 24]


def test_finished_runs_are_compared_only_if_they_are_alike(tmp_path, capsys):
    run = {"technique": "single", "dataset": "mnist", "model": "convnet", "device": "cpu"}
    run |= {"global_batch_size": 96, "num_devices": 1, "train_images_per_second": 4000.0}
    run |= {"test_accuracy": 0.99, "train_seconds": 9.0}
    faster = {"train_images_per_second": 6000.0}
    others = ({}, {"technique": "dp"}, {"technique": "ddp", "num_devices": 2}, {"model": "mlp"})
    for i, changes in zip(itertools.count(), others, strict=False):
        (tmp_path / str(i)).mkdir()
        content = run | changes | (faster if i > 1 else {})
        (tmp_path / str(i) / "summary.json").write_text(json.dumps(content))
    benchmark.compare([str(tmp_path / str(i)) for i in range(4)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows[1:4]] == [
        ["single", "1", "4,000", "1.00"],
        ["dp", "1", "4,000", "1.00"],
        ["ddp", "2", "6,000", "1.50"],
    ]
    assert rows[4][3] == "-", "another model"
    assert rows[-1][:4] == ["dp:", "nn.DataParallel", "only", "calls"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--devices", "3"], "--global-batch-size 512 is no multiple of 3"),
        (["--dataset", "mnist"], "unrecognized arguments: --dataset"),
    ],
)
def test_flags_that_cannot_be_used_are_named(flags, words):
    ended = run(sys.executable, BENCHMARK, *flags)
    assert ended.status == 2
    assert words in ended.stderr.splitlines()[-1]
