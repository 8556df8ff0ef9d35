"""The doctor finds what it is asked to find, on the facts of ranks and for real."""

import importlib.util
import json
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.processes import ROOT, finish, free_port, run, start
from utils import config

DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"


@pytest.fixture(scope="module")
def doctor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doctor", DOCTOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["doctor"] = module
    spec.loader.exec_module(module)
    return module


def healthy(rank: int) -> dict[str, Any]:
    """Facts of four ranks on two hosts with two cores and two GPUs each."""
    return {
        "host": f"h{rank // 2}",
        "name": f"node{rank // 2}",
        "address": f"10.0.0.{rank // 2 + 1}",
        "versions": {"torch": "2.15", "python": "3.11"},
        "variables": {"NCCL_DEBUG": "INFO", "LOCAL_WORLD_SIZE": "2"},
        "data": {"sum": 1, "file": (7, 7)},
        "cores": 2,
        "device": f"cuda:{rank % 2}",
        "uuid": f"GPU-{rank}",
        "visible": ["GPU-0", "GPU-1"],
        "used": 4,
        "users": [],
        "far": [],
        "driver": "570.12",
        "shm": 1024,
        "open_files": 1024,
        "locked": None,
        "infiniband": True,
        "threads": 1,
        "interface": "eth0",
        "work": 1.0,
        "unreachable": [],
    }


@pytest.fixture
def examine(doctor: ModuleType) -> Callable[..., dict[str, Any]]:
    def call(backend: str = "nccl", **changes: Any) -> dict[str, Any]:
        """Change facts of the last rank; return the rows that are not ok, by check."""
        facts = [healthy(rank) for rank in range(4)]
        facts[3] |= changes
        args = config.build_parser("ddp", None).parse_args([])
        rows = doctor.examine(facts, args, backend)
        assert all(row.found and (row.fix or row.state == "ok") for row in rows)
        return {row.check: row for row in rows if row.state != "ok"}

    return call


def test_healthy_ranks_pass(examine: Callable[..., dict[str, Any]]) -> None:
    assert examine() == {}


@pytest.mark.parametrize(
    ("check", "state", "words", "changes"),
    [
        ("versions", "failure", "torch 2.13 / 2.15", {"versions": {"torch": "2.13"}}),
        ("variables", "warning", "NCCL_DEBUG is not the same", {"variables": {}}),
        ("hostnames", "warning", "127.0.1.1", {"unreachable": ["node1 resolves to 127.0.1.1"]}),
        ("devices", "failure", "rank 3 shares cuda:1", {"uuid": "GPU-2"}),
        ("GPU memory", "warning", "900 MiB of cuda:1 on node1 in use by other", {"used": 900}),
        (
            *("GPU memory", "warning", "in use by pid 77 python"),
            {"used": 900, "users": ["pid 77 python"]},
        ),
        ("peer access", "warning", "none between cuda:1 and cuda:0 on node1", {"far": ["cuda:0"]}),
        ("driver", "warning", "570.12 on node0; 570.12 on node1; none on node1", {"driver": ""}),
        ("versions", "failure", "nccl (2, 27) / -", {"versions": {"nccl": "(2, 27)"}}),
        ("/dev/shm", "warning", "64 MiB free on node1", {"shm": 64}),
        ("open files", "warning", "256 for a process on node1", {"open_files": 256}),
        ("locked mem", "warning", "8192 KiB on node1, which has InfiniBand", {"locked": 8192}),
        ("data", "failure", "differs from host to host", {"data": {"sum": 2, "file": (8, 8)}}),
        ("data", "warning", "no mnist in data on node1", {"data": {}}),
        ("threads", "warning", "9 threads on 2 cores of node1", {"threads": 8}),
        ("speed", "warning", "rank 3 on node1 takes 1.6 x the median", {"work": 1.6}),
    ],
)
def test_each_defect_is_named(
    check: str,
    state: str,
    words: str,
    changes: dict[str, Any],
    examine: Callable[..., dict[str, Any]],
) -> None:
    rows = examine(**changes)
    assert rows[check].state == state
    assert words in rows[check].found
    assert set(rows) <= {check, "versions"}


def test_a_wrong_local_world_size(
    examine: Callable[..., dict[str, Any]], doctor: ModuleType
) -> None:
    facts = [healthy(rank) for rank in range(3)]
    args = config.build_parser("ddp", None).parse_args([])
    rows = {row.check: row for row in doctor.examine(facts, args, "nccl")}
    assert "LOCAL_WORLD_SIZE=2 for 1 processes on node1" in rows["variables"].found


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"shm": None, "open_files": None}, ("/dev/shm", "-")),  # a system without
        ({"locked": 64, "infiniband": False}, ("locked mem", "enough")),
        ({"visible": ["GPU-3"]}, ("devices", "cuda:1 (GPU-3, one of 1 visible)")),
    ],
)
def test_what_is_no_defect(changes: dict[str, Any], row: tuple[str, str], host: ModuleType) -> None:
    facts = [healthy(3) | changes]
    found = {row.check: row for row in [*host.check_limits(facts), *host.check_gpus(facts, "nccl")]}
    assert (found[row[0]].state, row[1] in found[row[0]].found) == ("ok", True), found


@pytest.fixture
def host(doctor: ModuleType) -> ModuleType:
    return sys.modules["host"]


NVIDIA_SMI = """#!/bin/sh
case $1 in
    --query-gpu=*) echo "GPU-a, 900, 570.12"; echo "GPU-b, [N/A], 570.12" ;;
    --query-compute-apps=*) echo "GPU-a, 77, /usr/bin/python3"; echo "GPU-a, 78, odd, name" ;;
esac
"""


def test_who_uses_a_gpu_is_asked_of_the_driver(
    host: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert host.facts_of_driver() == {
        "driver": "570.12",
        "in_use": {"GPU-a": 900, "GPU-b": 0},
        "users": {"GPU-a": ["pid 77 python3", "pid 78 odd,name"]},
    }
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no devices were found >&2; exit 6\n")
    assert host.facts_of_driver() == {"driver": "", "in_use": {}, "users": {}}


def test_what_is_known_of_a_gpu(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches GPU 0, and not GPU 2."""
    gpus = [torch.device("cuda", index) for index in range(3)]
    uuids = [f"GPU-{index}" for index in range(3)]
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: uuids)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    properties = SimpleNamespace(name="H200", uuid="1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    reach = lambda device, other: {device.index, other.index} == {0, 1}  # noqa: E731
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)
    driver = {"driver": "570.12", "in_use": {"GPU-1": 900}, "users": {"GPU-1": ["pid 77 python3"]}}
    assert host.facts_of_device(gpus[1], gpus, driver) == {
        "device": "cuda:1 H200",
        "uuid": "GPU-1",
        "visible": uuids,
        "driver": "570.12",
        "used": 900,
        "users": ["pid 77 python3"],
        "far": ["cuda:2"],
    }
    cpu = torch.device("cpu")
    assert host.facts_of_device(cpu, [cpu], driver) == {"device": "cpu", "driver": "570.12"}


def test_what_the_system_allows(
    host: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = SimpleNamespace(f_bavail=16_384, f_frsize=4096)
    monkeypatch.setattr(host.os, "statvfs", lambda path: status)
    limits = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_MEMLOCK: 8 * 2**20}
    monkeypatch.setattr(resource, "getrlimit", lambda name: (limits[name], -1))
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(host, "INFINIBAND", tmp_path)
    facts = {"shm": 64, "open_files": 256, "locked": 8192, "infiniband": True}
    assert host.facts_of_host() == facts
    monkeypatch.setattr(resource, "getrlimit", lambda name: (resource.RLIM_INFINITY, -1))
    monkeypatch.setattr(host, "INFINIBAND", tmp_path / "none")
    unlimited = {"open_files": None, "locked": None, "infiniband": False}
    assert host.facts_of_host() == facts | unlimited


def test_two_processes_for_real(synthetic_dir: Path) -> None:
    flags = ["--nprocs", 2, "--dataset", "synthetic", "--data-dir", synthetic_dir, "--threads", 1]
    ended = run(sys.executable, DOCTOR, "--json", *flags, timeout=60)
    assert ended.returncode == 0, ended.text
    rows = {row["check"]: row for row in json.loads(ended.stdout)}
    assert f"2 processes on {socket.gethostname()}" in rows["rendezvous"]["found"]
    assert rows["all-reduce"]["state"] == "ok"
    assert "16,777,216 B" in rows["all-reduce"]["found"]
    assert rows["data"]["state"] == "ok"
    assert rows["open files"]["found"].endswith("for a process")


def test_an_incomplete_world_is_a_failure_in_time(synthetic_dir: Path) -> None:
    flags = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--rank", 0, "--world-size", 2]
    command = [sys.executable, DOCTOR, "--dataset", "synthetic", "--data-dir", synthetic_dir]
    ended = finish(start(*command, *flags, "--rdzv-timeout", 2), 30)
    assert ended.returncode == 1
    assert "missing: 1." in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
