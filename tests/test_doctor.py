"""The doctor finds what it is asked to find, on the facts of ranks and for real."""

import importlib.util
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.processes import ROOT, finish, run, start
from tests.test_launch import free_port
from utils import config

DOCTOR = ROOT / "scripts" / "doctor.py"


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
        "used": 4,
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
        ("GPU memory", "warning", "900 MiB of cuda:1 on node1", {"used": 900}),
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


def test_two_processes_for_real(synthetic_dir: Path) -> None:
    flags = ["--nprocs", 2, "--dataset", "synthetic", "--data-dir", synthetic_dir, "--threads", 1]
    ended = run(sys.executable, DOCTOR, "--json", *flags, timeout=60)
    assert ended.returncode == 0, ended.text
    rows = {row["check"]: row for row in json.loads(ended.stdout)}
    assert f"2 processes on {socket.gethostname()}" in rows["rendezvous"]["found"]
    assert rows["all-reduce"]["state"] == "ok"
    assert "16,777,216 B" in rows["all-reduce"]["found"]
    assert rows["data"]["state"] == "ok"


def test_an_incomplete_world_is_a_failure_in_time(synthetic_dir: Path) -> None:
    flags = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--rank", 0, "--world-size", 2]
    command = [sys.executable, DOCTOR, "--dataset", "synthetic", "--data-dir", synthetic_dir]
    ended = finish(start(*command, *flags, "--rdzv-timeout", 2), 30)
    assert ended.returncode == 1
    assert "rendezvous   failure" in ended.stdout
    assert "missing: 1." in ended.stdout
    assert ended.stderr == ""
