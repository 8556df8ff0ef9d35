"""The rendezvous: who is missing, who is there twice, and who does not belong to this job."""

import os
import socket
import subprocess
import threading
from contextlib import closing

import pytest
import torch.distributed as dist

from tests.processes import (
    error_lines,
    finish,
    free_port,
    script,
    start,
    wait_for_port,
)
from utils.cluster import launch
from utils.cluster.addresses import Address, AgentStore
from utils.cluster.rank_info import RankInfo
from utils.cluster.rendezvous import Peer, Peers, RendezvousError, meet, name_ranks
from utils.training import config

HOST = socket.gethostname()


def attend(place, rank, size, outcomes, seconds=90.0, **more):
    own = Peer(rank, **({"pid": 1000 + rank} | more))
    try:
        outcomes.append(meet(place, own, size, seconds))
    except Exception as error:
        outcomes.append(error)


def meet_all(place, *ranks, size=2, **more):
    """Let threads meet; return what each got, in no order."""
    outcomes = []
    arguments = [(place, rank, size, outcomes) for rank in ranks]
    threads = [threading.Thread(target=attend, args=args, kwargs=more) for args in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.fixture
def place():
    return Address("127.0.0.1", free_port())


# Run train_ddp.py as if another PyTorch was installed.
OTHER_TORCH = """
import sys, torch, train_ddp
torch.__version__ = "{}"
sys.argv[0] = "train_ddp.py"
sys.exit(train_ddp.main())
"""


class Ranks:
    """Ranks that are started one by one, by hand."""

    def __init__(self, data_dir, size, seconds):
        self.port, self.processes = free_port(), list[subprocess.Popen[str]]()
        self.words = ["--dataset", "synthetic", "--data-dir", data_dir, "--rdzv-timeout", seconds]
        self.variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        self.variables["WORLD_SIZE"] = str(size)

    def start(self, rank, *flags, waits=True, torch_version="", **other):
        variables = self.variables | other | {"RANK": str(rank)}
        command = script("train_ddp.py", *self.words, *flags)
        if torch_version:
            command[1:2] = ["-c", OTHER_TORCH.format(torch_version)]
        self.processes.append(start(*command, **variables))
        if len(self.processes) == 1 and rank == 0 and waits:
            wait_for_port(self.port, self.processes[0])
        return self.processes[-1]

    def end(self):
        """Wait for all; each ends with one line."""
        ended = [finish(process, 120) for process in self.processes]
        for one in ended:
            assert one.returncode == 1, one.text
            assert len(one.stderr.splitlines()) == len(error_lines(one)) == 1, one.stderr
        return ended


def test_all_that_wait_name_the_missing(place):
    """With a world of four and one of 4,000, whose line is short, too."""
    for outcome in meet_all(place, 0, 1, size=4, seconds=3.0):
        words = f"2 of 4 ranks are here: 0 ({HOST} pid 1000), 1 ({HOST} pid 1001); missing: 2, 3."
        assert words in str(outcome)
    (outcome,) = meet_all(Address("127.0.0.1", free_port()), 0, size=4000, seconds=0.5)
    assert isinstance(outcome, RendezvousError)
    assert "missing: 1, 2, 3, 4, 5, 6, 7, 8 and 3991 more." in str(outcome)
    assert len(str(outcome)) < 500


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([{}, {}], "two processes claim the same rank: 1 ("),
        ([{"flags": ["--seed", 1]}], "has seed 1, rank 0 ("),
        ([{"torch_version": "1.0"}], "has torch 1.0, rank 0 ("),
    ],
)
def test_who_does_not_fit_is_named_at_once(others, words, synthetic_dir):
    ranks = Ranks(synthetic_dir, 3, 60)
    ranks.start(0)
    for other in others:
        ranks.start(1, *other.pop("flags", []), **other)
    for ended in ranks.end():
        assert words in ended.stderr


def test_a_foreign_program_has_the_port(synthetic_dir):
    """It accepts connections and never answers."""
    ranks = Ranks(synthetic_dir, 2, 4)
    with closing(socket.create_server(("127.0.0.1", ranks.port))):
        ranks.start(0, waits=False)
        ranks.start(1)
        first, second = ranks.end()
    assert f"cannot listen on port {ranks.port} (address already in use)" in first.stderr
    assert f"127.0.0.1:{ranks.port} (from MASTER_ADDR)" in second.stderr
    assert "no answer" in second.stderr


def test_rank_0_is_killed_while_others_wait(synthetic_dir):
    ranks = Ranks(synthetic_dir, 3, 6)
    main = ranks.start(0)
    ranks.start(1)
    dist.TCPStore("127.0.0.1", ranks.port, wait_for_workers=False).wait(["peer/1"])
    main.kill()
    ranks.processes = ranks.processes[1:]
    (ended,) = ranks.end()
    main.communicate()
    assert "Connection refused" in ended.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("is_apart", [True, False])
def test_ranks_share_the_cores_that_they_have_in_common(is_apart, place):
    """A launcher may give each rank cores of its own, of which it then takes all."""
    cores = sorted(os.sched_getaffinity(0))
    outcomes = []

    def attend_on_own_cores(rank):
        os.sched_setaffinity(0, cores[rank : rank + 1] if is_apart else cores)  # of this thread
        attend(place, rank, 2, outcomes)

    threads = [threading.Thread(target=attend_on_own_cores, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [peers.sharing_cores for peers in outcomes] == [1, 1] if is_apart else [2, 2]


def test_a_rank_takes_its_share_of_its_own_cores(monkeypatch):
    """Of 16, which one of the three others has, too."""
    met = Peers(Peer(0), 4, Peer(0), local_ranks=[0, 1, 2, 3], sharing_cores=2)
    monkeypatch.setattr(launch, "meet", lambda *_: met)
    monkeypatch.setattr(launch, "usable_cores", lambda: 16)
    monkeypatch.setattr(os, "environ", {})
    args = config.build_parser("ddp", "").parse_args([])
    launch._meet(args, RankInfo("environment", 0, 4), "gloo")
    assert os.environ["OMP_NUM_THREADS"] == "8"


@pytest.fixture
def agent():
    """The store of torchrun's agent, where rank 0 publishes its address."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield AgentStore("127.0.0.1", store.port)
    del store


def test_what_an_earlier_attempt_has_published_does_no_harm(agent):
    agent.store.set(agent.KEY, b'["127.0.0.1", 9, "old"]')
    outcomes = []
    late = threading.Timer(0.5, attend, (agent, 0, 2, outcomes))
    late.start()  # rank 1 reads what is there, until rank 0 comes
    attend(agent, 1, 2, outcomes)
    late.join()
    for met in outcomes:
        assert isinstance(met, Peers), met
        assert (met.local_ranks, met.main.pid, met.interface) == ([0, 1], 1000, "")
        assert name_ranks(met.store, [0, 1]) == f"0 ({HOST} pid 1000), 1 ({HOST} pid 1001)"
