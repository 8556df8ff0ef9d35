"""The doctor finds what it is asked to find, and its figures and scaling.py's are the link's."""

import re
import socket
import sys
from types import SimpleNamespace

import collectives
import doctor
import pytest
import scaling
import torch

from tests.processes import ROOT, STANDALONE, error_line, free_port, run, succeed

DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"


def healthy(rank):
    """Facts of four ranks on two hosts with two cores and two GPUs each."""
    return {
        "host": f"node{rank // 2}",
        "versions": "torch 2.15",
        "address": f"10.0.0.{rank // 2 + 1}",
        "cores": 2,
        "device": f"cuda:{rank % 2}",
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
    rows = doctor.examine(facts, "gloo")
    assert all(row.found and (row.fix or row.state == "ok") for row in rows)
    return {row.check: row for row in rows if row.state != "ok"}


@pytest.mark.parametrize(
    ("check", "words", "changes"),
    [
        ("versions", "torch 2.14 on node1", {"versions": "torch 2.14"}),
        ("hostnames", "127.0.1.1", {"unreachable": ["node1 resolves to 127.0.1.1"]}),
        ("GPU memory", "9 of 20 MiB of cuda:1 on node1 free", {"memory": [9, 20]}),
        ("threads", "9 threads on 2 cores of node1", {"threads": 8}),
    ],
)
def test_each_defect_is_named(check, words, changes):
    assert examine() == {}, "healthy ranks pass"
    rows = examine(**changes)
    assert rows[check].state == ("failure" if check == "versions" else "warning")
    assert words in rows[check].found
    assert set(rows) == {check}


class SlowLink:
    """A link of four ranks, with its clock: 5 us for each message, and 10 MB/s."""

    ReduceOp = SimpleNamespace(MAX=None)
    now = 0.0

    def get_rank(self):
        return 1

    def get_world_size(self):
        return 4

    def all_reduce(self, values, op=None):
        if values.is_floating_point():  # not one of the agreements, which go another way
            self.now += 2 * 3 * (5e-6 + values.numel() * 4 / 4 / 10e6)
            values.mul_(5)  # 2 of this rank; 1, 3 and 4 of the others

    def perf_counter(self):
        return self.now

    def init_process_group(self, backend):
        pass

    barrier = destroy_process_group = lambda self: None


@pytest.fixture
def link(monkeypatch):
    slow = SlowLink()
    monkeypatch.setattr(collectives, "dist", slow)
    monkeypatch.setattr(collectives, "time", slow)
    monkeypatch.setattr(scaling, "dist", slow)
    return slow


def test_the_doctor_tells_the_figures_of_the_link(link):
    smallest, first, *rest = timings = collectives.time_all_reduce(torch.device("cpu"))
    assert smallest.seconds == pytest.approx(30e-6 + 6e-6 / 10)
    assert first.seconds == pytest.approx(30e-6 + 1.5 * 2**20 / 10e6)
    assert first.bus_bandwidth(4) == pytest.approx(10e6, rel=1e-3)
    assert all(timing.is_right for timing in timings)
    assert [timing.size for timing in rest] == [4 * 2**20], "the next one would take seconds"
    told = doctor.check_all_reduce(torch.device("cpu"), 4).found
    assert told == "31 us for 4 B; 1 MiB 0.010 GB/s; 4 MiB 0.010 GB/s"


def test_scaling_tells_them_too_and_predicts_with_them(link, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "DistributedDataParallel", lambda model, **_: model)
    monkeypatch.setattr(scaling, "ROUNDS", 1)
    monkeypatch.setattr(scaling, "setup_device", lambda *_, **__: torch.device("cpu"))
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    words = "--model linear --batch-size 4 --device cpu"
    assert scaling.run(scaling.parse_args(words.split())) == 0
    told = capsys.readouterr().out
    assert "\nlink: 0.010 GB/s, 5 us a message\n" in told
    alone, late = (
        float(re.search(f"{words} ([0-9.]+)", told)[1]) for words in ("alone:", "backward,")
    )
    size = 4 * 7850  # gradients: a ring sends 1.5 times as many bytes in six messages
    assert late - alone == pytest.approx(1e3 * (6 * 5e-6 + 1.5 * size / 10e6), abs=0.3)


def test_two_processes_for_real():
    ended = succeed(run(*STANDALONE, 2, DOCTOR, "--threads", 1))
    rows = {line[:12].strip(): line[14:].split(None, 1) for line in ended.stdout.splitlines()}
    assert f"2 processes on {socket.gethostname()}" in rows["rendezvous"][1]
    state, told = rows["all-reduce"]
    assert state == "ok"
    assert re.match(r" *[\d,]+ us for 4 B; 1 MiB [\d.]+ GB/s; 4 MiB ", told)
    assert rows["open files"][1].endswith("for a process")


def test_a_failed_check_is_status_1():
    code = f"import sys; sys.path.insert(0, {str(DOCTOR.parent)!r}); import doctor\n"
    code += "import collectives\nwrong = collectives.Timing(4, 1.0, False)\n"
    code += "doctor.time_all_reduce = lambda *_: [wrong]\nsys.exit(doctor.main())"
    ended = run(sys.executable, "-c", code, "--threads", 1)
    assert ended.returncode == 1, ended.text
    assert "failure  wrong sums of 4 bytes" in ended.stdout


def test_an_incomplete_world_is_a_failure_in_time():
    by_hand = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    ended = run(sys.executable, DOCTOR, "--rdzv-timeout", 2, **by_hand)
    assert "missing: 1." in error_line(ended, status=1)
