"""The doctor finds what it is asked to find, on the facts of ranks and for real."""

import importlib.util
import json
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import data
from tests.processes import ROOT, finish, free_port, run, start
from utils import config
from utils.datasets.sources import SOURCES

DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"


@pytest.fixture(scope="module")
def doctor():
    spec = importlib.util.spec_from_file_location("doctor", DOCTOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doctor"] = module
    spec.loader.exec_module(module)
    return module


def healthy(rank):
    """Facts of four ranks on two hosts with two cores and two GPUs each."""
    return {
        "host": f"h{rank // 2}",
        "name": f"node{rank // 2}",
        "address": f"10.0.0.{rank // 2 + 1}",
        "versions": {"torch": "2.15", "python": "3.11"},
        "variables": {"NCCL_DEBUG": "INFO", "LOCAL_WORLD_SIZE": "2"},
        "data": {"sum": 1},
        "cores": 2,
        "device": f"cuda:{rank % 2}",
        "uuid": f"GPU-{rank}",
        "visible": 2,
        "used": 4,
        "far": [],
        "driver": "570.12",
        "shm": 1024,
        "files": 1024,
        "threads": 1,
        "interface": "eth0",
        "work": 1.0,
        "unreachable": [],
    }


@pytest.fixture
def examine(doctor):
    def call(backend="nccl", **changes):
        """Change facts of the last rank; return the rows that are not ok, by check."""
        facts = [healthy(rank) for rank in range(4)]
        facts[3] |= changes
        args = config.build_parser("ddp", None).parse_args([])
        rows = doctor.examine(facts, args, backend)
        assert all(row.found and (row.fix or row.state == "ok") for row in rows)
        return {row.check: row for row in rows if row.state != "ok"}

    return call


def test_healthy_ranks_pass(examine):
    assert examine() == {}


@pytest.mark.parametrize(
    ("check", "state", "words", "changes"),
    [
        ("versions", "failure", "torch 2.13 / 2.15", {"versions": {"torch": "2.13"}}),
        ("variables", "warning", "NCCL_DEBUG is not the same", {"variables": {}}),
        ("hostnames", "warning", "127.0.1.1", {"unreachable": ["node1 resolves to 127.0.1.1"]}),
        ("devices", "failure", "rank 3 shares cuda:1", {"uuid": "GPU-2"}),
        ("GPU memory", "warning", "900 MiB of cuda:1 on node1 in use by other", {"used": 900}),
        ("peer access", "warning", "none between cuda:1 and cuda:0 on node1", {"far": ["cuda:0"]}),
        ("driver", "warning", "570.12 on node0; 570.12 on node1; none on node1", {"driver": ""}),
        ("/dev/shm MiB", "warning", "64 on node1", {"shm": 64}),
        ("open files", "warning", "256 on node1", {"files": 256}),
        ("data", "failure", "mnist in data differs from rank to rank", {"data": {"sum": 2}}),
        ("data", "failure", "no file on node1", {"data": {"problem": "no file"}}),
        ("data", "warning", "no mnist in data on node1", {"data": {}}),
        ("threads", "warning", "9 threads on 2 cores of node1", {"threads": 8}),
        ("speed", "warning", "rank 3 on node1 takes 1.6 x the median", {"work": 1.6}),
    ],
)
def test_each_defect_is_named(check, state, words, changes, examine):
    rows = examine(**changes)
    assert rows[check].state == state
    assert words in rows[check].found
    assert set(rows) <= {check, "versions"}


def test_a_wrong_local_world_size(examine, doctor):
    facts = [healthy(rank) for rank in range(3)]
    args = config.build_parser("ddp", None).parse_args([])
    rows = {row.check: row for row in doctor.examine(facts, args, "nccl")}
    assert "LOCAL_WORLD_SIZE=2 for 1 processes on node1" in rows["variables"].found


NVIDIA_SMI = """#!/bin/sh
echo "GPU-1, 900, 570.12"; echo "GPU-b, [N/A], 570.12"
"""


def test_what_is_known_of_a_gpu(doctor, tmp_path, monkeypatch):
    """It reaches GPU 0, and not GPU 2."""
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpus = [torch.device("cuda", index) for index in range(3)]
    properties = SimpleNamespace(name="H200", uuid="1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    reach = lambda device, other: {device.index, other.index} == {0, 1}  # noqa: E731
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)
    found = doctor.facts_of_device(gpus[1], gpus, doctor.ask_driver())
    assert (found["used"], found["driver"], found["far"]) == (900, "570.12", ["cuda:2"])
    assert found["visible"] == 3
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no devices were found >&2; exit 6\n")
    cpu = torch.device("cpu")
    found = doctor.facts_of_device(cpu, [cpu], doctor.ask_driver())
    assert found == {"device": "cpu", "driver": ""}


def test_own_data_is_loaded_as_the_training_loads_it(doctor, monkeypatch):
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
    ended = run(sys.executable, DOCTOR, "--json", *flags, timeout=60)
    assert ended.returncode == 0, ended.text
    rows = {row["check"]: row for row in json.loads(ended.stdout)}
    assert f"2 processes on {socket.gethostname()}" in rows["rendezvous"]["found"]
    assert rows["all-reduce"]["state"] == "ok"
    assert "16,777,216 B" in rows["all-reduce"]["found"]
    assert rows["data"]["state"] == "ok"
    assert rows["open files"]["found"].endswith("for a process")


def test_an_incomplete_world_is_a_failure_in_time(synthetic_dir):
    flags = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--rank", 0, "--world-size", 2]
    command = [sys.executable, DOCTOR, "--dataset", "synthetic", "--data-dir", synthetic_dir]
    ended = finish(start(*command, *flags, "--rdzv-timeout", 2), 30)
    assert ended.returncode == 1
    assert "missing: 1." in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
