"""The rendezvous: who is missing, who is there twice, and who does not belong to this job."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.processes import free_port
from utils.cluster import launch
from utils.cluster.addresses import Address, AgentStore
from utils.cluster.rank_info import RankInfo
from utils.cluster.rendezvous import Peer, Peers, RendezvousError, meet, name_ranks
from utils.training import config

HOST = socket.gethostname()
CORES = sorted(os.sched_getaffinity(0))


def attend(place, own, size=2, seconds=90.0):
    try:
        return meet(place, own, size, seconds)
    except Exception as error:
        return error


def meet_all(place, *ranks, size=2, seconds=90.0):
    """Let ranks meet, which are threads of this process; return what each got."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(lambda own: attend(place, own, size, seconds), ranks)]


@pytest.fixture
def place():
    return Address("127.0.0.1", free_port(), "MASTER_ADDR")


def test_all_that_wait_name_the_missing(place):
    """With a world of four and one of 4,000, whose line is short, too."""
    for outcome in meet_all(place, Peer(0, pid=7), Peer(1, pid=8), size=4, seconds=3.0):
        words = f"2 of 4 ranks are here: 0 ({HOST} pid 7), 1 ({HOST} pid 8); missing: 2, 3."
        assert words in str(outcome)
    outcome = attend(Address("127.0.0.1", free_port()), Peer(0), size=4000, seconds=0.5)
    assert isinstance(outcome, RendezvousError)
    assert "missing: 1, 2, 3, 4, 5, 6, 7, 8 and 3991 more." in str(outcome)
    assert len(str(outcome)) < 500


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({8: "2.15", 9: "2.15"}, "two processes claim the same rank: 1 ("),
        ({8: "1.0"}, "has torch 1.0, rank 0 ("),
    ],
)
def test_who_does_not_fit_is_named_at_once(others, words, place):
    ranks = [Peer(1, {"torch": version}, pid=pid) for pid, version in others.items()]
    for outcome in meet_all(place, Peer(0, {"torch": "2.15"}), *ranks, size=3):
        assert words in str(outcome)


def test_without_rank_0_and_with_a_foreign_program_at_its_port(place):
    """The program accepts connections and never answers."""
    waiting = f"for rank 0 at 127.0.0.1:{place.port} (from MASTER_ADDR): "
    assert f"{waiting}Connection refused" in str(attend(place, Peer(1), seconds=1.0))
    with socket.create_server(("127.0.0.1", place.port)):
        first, second = meet_all(place, Peer(0), Peer(1), seconds=1.0)
    assert f"cannot listen on port {place.port} (address already in use)" in str(first)
    assert f"{waiting}no answer" in str(second)


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("is_apart", [True, False])
def test_ranks_share_the_cores_that_they_have_in_common(is_apart, place):
    """A launcher may give each rank cores of its own, of which it then takes all."""

    def attend_on_own_cores(rank):
        os.sched_setaffinity(0, CORES[rank : rank + 1] if is_apart else CORES)  # of this thread
        return attend(place, Peer(rank))

    with ThreadPoolExecutor(2) as pool:
        met = [*pool.map(attend_on_own_cores, range(2))]
    assert [peers.sharing_cores for peers in met] == [1, 1] if is_apart else [2, 2]


def test_a_rank_tells_its_torch_and_takes_its_share_of_its_own_cores(monkeypatch):
    """Of 16, which one of the three others has, too."""
    told = []

    def meet(place, own, *_):
        told.append(own.facts)
        return Peers(own, 4, Peer(0), local_ranks=[0, 1, 2, 3], sharing_cores=2)

    monkeypatch.setattr(launch, "meet", meet)
    monkeypatch.setattr(launch, "usable_cores", lambda: 16)
    monkeypatch.setattr(os, "environ", {})
    args = config.build_parser("ddp", "").parse_args([])
    launch._meet(args, RankInfo("environment", 0, 4), "gloo")
    assert os.environ["OMP_NUM_THREADS"] == "8"
    assert told[0]["torch"] == torch.__version__
    assert {"WORLD_SIZE", "seed", "backend"} <= {*told[0]}


def test_what_an_earlier_attempt_has_published_does_no_harm():
    """In the store of torchrun's agent, where rank 0 publishes its address."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = AgentStore("127.0.0.1", store.port)
    agent.store.set(agent.KEY, b'["127.0.0.1", 9, "old"]')
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(attend, agent, Peer(1, pid=8))
        time.sleep(0.5)  # rank 1 reads what is there, until rank 0 comes
        outcomes = attend(agent, Peer(0, pid=7)), late.result()
    for met in outcomes:
        assert isinstance(met, Peers), met
        assert (met.local_ranks, met.main.pid, met.interface) == ([0, 1], 7, "")
        assert name_ranks(met.store, [0, 1]) == f"0 ({HOST} pid 7), 1 ({HOST} pid 8)"
