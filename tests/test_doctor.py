"""The doctor finds what it is asked to find, on the facts of ranks and for real."""

import json
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import doctor
import pytest
import torch

import data
from tests.processes import ROOT, error_line, free_port, run, succeed
from utils import config
from utils.datasets.sources import SOURCES

DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"


def healthy(rank):
    """Facts of four ranks on two hosts with two cores and two GPUs each."""
    return {
        "host": f"h{rank // 2}",
        "name": f"node{rank // 2}",
        "address": f"10.0.0.{rank // 2 + 1}",
        "versions": {"torch": "2.15", "python": "3.11"},
        "data": {"sum": 1},
        "cores": 2,
        "device": f"cuda:{rank % 2}",
        "uuid": f"GPU-{rank}",
        "memory": [79000, 81000],
        "shm": 1024,
        "files": 1024,
        "threads": 1,
        "interface": "eth0",
        "unreachable": [],
    }


def examine(**changes):
    """Change facts of the last rank; return the rows that are not ok, by check."""
    facts = [healthy(rank) for rank in range(4)]
    facts[3] |= changes
    rows = doctor.examine(facts, config.build_parser("ddp", None).parse_args([]), "nccl")
    assert all(row.found and (row.fix or row.state == "ok") for row in rows)
    return {row.check: row for row in rows if row.state != "ok"}


@pytest.mark.parametrize(
    ("check", "state", "words", "changes"),
    [
        ("versions", "failure", "torch 2.13 / 2.15", {"versions": {"torch": "2.13"}}),
        ("hostnames", "warning", "127.0.1.1", {"unreachable": ["node1 resolves to 127.0.1.1"]}),
        ("devices", "failure", "rank 3 shares cuda:1", {"uuid": "GPU-2"}),
        ("GPU memory", "warning", "9 of 20 MiB of cuda:1 on node1 free", {"memory": [9, 20]}),
        ("/dev/shm MiB", "warning", "64 on node1", {"shm": 64}),
        ("open files", "warning", "256 on node1", {"files": 256}),
        ("data", "failure", "mnist in data differs from rank to rank", {"data": {"sum": 2}}),
        ("data", "failure", "no file on node1", {"data": {"problem": "no file"}}),
        ("data", "warning", "no mnist in data on node1", {"data": {}}),
        ("threads", "warning", "9 threads on 2 cores of node1", {"threads": 8}),
    ],
)
def test_each_defect_is_named(check, state, words, changes):
    assert examine() == {}, "healthy ranks pass"
    rows = examine(**changes)
    assert rows[check].state == state
    assert words in rows[check].found
    assert set(rows) == {check}


def test_what_is_known_of_a_gpu(monkeypatch):
    gpus = [torch.device("cuda", index) for index in range(3)]
    properties = SimpleNamespace(name="H200", uuid="1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**31))
    found = doctor.facts_of_device(gpus[1], gpus)
    name = "cuda:1 H200 (one of 3 visible)"
    assert found == {"device": name, "uuid": "1", "memory": [1024, 2048]}


def test_own_data_is_loaded_as_the_training_loads_it(monkeypatch):
    images, labels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4)
    own = data.ImageSet(images, labels)
    monkeypatch.setitem(data.SOURCES, "shapes", SOURCES["synthetic"]._replace(folder="Shapes"))
    monkeypatch.setattr(data, "load_dataset", lambda name, data_dir: (own, own))
    first = doctor.facts_of_data("shapes", "/nowhere")
    labels[0] = 3
    assert first["sum"] != doctor.facts_of_data("shapes", "/nowhere")["sum"]
    monkeypatch.setattr(data, "load_dataset", lambda *_: Path("/nowhere/own.npy").stat())
    assert "/nowhere/own.npy" in doctor.facts_of_data("shapes", "/nowhere")["problem"]
    assert doctor.facts_of_data("mnist", "/nowhere") == {}, "it is fetched by the training"


def test_two_processes_for_real(synthetic_dir):
    flags = ["--nprocs", 2, "--dataset", "synthetic", "--data-dir", synthetic_dir, "--threads", 1]
    ended = succeed(run(sys.executable, DOCTOR, "--json", *flags))
    rows = {row["check"]: row for row in json.loads(ended.stdout)}
    assert f"2 processes on {socket.gethostname()}" in rows["rendezvous"]["found"]
    assert rows["all-reduce"]["state"] == "ok"
    assert "16,777,216 B" in rows["all-reduce"]["found"]
    assert rows["data"]["state"] == "ok"
    assert rows["open files"]["found"].endswith("for a process")


def test_a_failed_check_is_status_1(short_dir, tmp_path):
    shutil.copytree(short_dir, tmp_path / "data")
    for path in tmp_path.rglob("train-labels*"):
        path.write_bytes(path.read_bytes()[:-1])
    flags = ["--dataset", "synthetic", "--data-dir", tmp_path / "data", "--threads", 1, "--json"]
    ended = run(sys.executable, DOCTOR, *flags)
    failed = [row["check"] for row in json.loads(ended.stdout) if row["state"] == "failure"]
    assert (ended.returncode, failed) == (1, ["data"])


def test_an_incomplete_world_is_a_failure_in_time(synthetic_dir):
    flags = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--rank", 0, "--world-size", 2]
    command = [sys.executable, DOCTOR, "--dataset", "synthetic", "--data-dir", synthetic_dir]
    ended = run(*command, *flags, "--rdzv-timeout", 2)
    assert "missing: 1." in error_line(ended, status=1)
    line = error_line(run(*command, "--rank", 0))
    assert line.startswith("doctor.py: error: --rank and --world-size go together")
