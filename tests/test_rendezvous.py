"""The meeting: who is missing, who is there twice, and who does not belong to this job."""

import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.processes import ROOT, finish, run, script, start
from tests.test_launch import error_lines, free_port
from utils import signals
from utils.cluster import rendezvous
from utils.cluster.members import Member
from utils.cluster.places import Address, File
from utils.cluster.rendezvous import RendezvousError

Outcome = list[Member] | Exception
stores: list[dist.Store] = []  # of the test that runs: rank 0's has to outlast the meeting


@pytest.fixture(autouse=True)
def no_store_is_left() -> Iterator[None]:
    yield
    stores.clear()


def attend(place: Address, own: Member, outcomes: list[Outcome]) -> None:
    try:
        store, members = rendezvous.meet(place, own)
        stores.append(store)
        outcomes.append(members)
    except Exception as error:
        outcomes.append(error)


def meet(place: Address, *members: Member, pause: float = 0.0) -> tuple[list[Outcome], float]:
    """Hold a roll call among threads; return what each got, in no order, and the seconds."""
    outcomes: list[Outcome] = []
    begin = time.monotonic()
    threads = [threading.Thread(target=attend, args=(place, m, outcomes)) for m in members]
    for thread in threads:
        thread.start()
        time.sleep(pause)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes, time.monotonic() - begin


def member(rank: int, world_size: int, wait_seconds: float = 5.0, **more: Any) -> Member:
    own = {"wait_seconds": wait_seconds, "pid": 1000 + rank}
    return Member(rank, world_size, **(own | more))


def messages(outcomes: list[Outcome]) -> set[str]:
    assert all(isinstance(outcome, RendezvousError) for outcome in outcomes), outcomes
    return {str(outcome) for outcome in outcomes}


@pytest.fixture
def place() -> Address:
    return Address("127.0.0.1", free_port())


def test_all_ranks_get_the_same_list(place: Address) -> None:
    outcomes, seconds = meet(place, *(member(rank, 8) for rank in range(8)))
    for outcome in outcomes:
        assert isinstance(outcome, list), outcome
        assert [m.rank for m in outcome] == list(range(8))
        assert [m.pid for m in outcome] == list(range(1000, 1008))
    assert seconds < 3


def test_rank_0_may_come_last(place: Address) -> None:
    outcomes, _ = meet(place, member(1, 2), member(0, 2), pause=0.5)
    assert all(isinstance(outcome, list) for outcome in outcomes)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_missing_are_named(place: Address, order: tuple[int, int]) -> None:
    """Both end at the first one's deadline: the world cannot get complete any more."""
    members = [member(rank, 4, wait_seconds=1.5) for rank in order]
    outcomes, seconds = meet(place, *members, pause=0.5)
    (text,) = messages(outcomes)
    name = socket.gethostname()
    assert f"2 of 4 ranks are here: 0 ({name} pid 1000), 1 ({name} pid 1001)" in text
    assert "missing: 2, 3." in text
    assert "WORLD_SIZE" in text
    assert "node_rank" in text
    assert "\n" not in text
    assert seconds < 3


def test_rank_0_is_missing(place: Address) -> None:
    outcomes, seconds = meet(place, member(1, 4, 1.0), member(2, 4, 1.0))
    for text in messages(outcomes):
        assert f"rank 0 at {place}: Connection refused. Rank 0 is missing" in text
    assert seconds < 2.5


@pytest.mark.parametrize("claimed", [0, 1])
def test_two_claim_one_rank(place: Address, claimed: int) -> None:
    members = [member(rank, 3, pid=pid) for rank, pid in [(1, 7), (0, 8), (claimed, 9)]]
    # Rank 1 tries again and again: it is there when the second claim comes.
    outcomes, seconds = meet(place, *members, pause=0.4)
    assert len(outcomes) == 3
    (text,) = messages(outcomes)
    assert f"two processes claim rank {claimed}: " in text
    assert "node_rank or RANK was given twice" in text
    assert seconds < 3


def test_two_claim_rank_0_by_file(tmp_path: Path) -> None:
    place = File(str(tmp_path / "f"))
    outcomes, _ = meet(place, member(0, 2), member(0, 2, pid=9), pause=0.3)
    (text,) = messages(outcomes)
    assert "two processes claim rank 0" in text


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"world_size": 4}, "has WORLD_SIZE 4, rank 0"),
        ({"facts": {"torch": "2.12", "model": "linear"}}, "has torch 2.12, rank 0"),
        ({"facts": {"torch": "2.13"}}, "has model None, rank 0"),
    ],
)
def test_who_differs_is_told_at_once(place: Address, other: dict[str, Any], words: str) -> None:
    facts = {"torch": "2.13", "model": "linear"}
    second = Member(1, **({"world_size": 3, "facts": facts, "wait_seconds": 20.0} | other))
    outcomes, seconds = meet(place, member(0, 3, 20.0, facts=facts), second)
    (text,) = messages(outcomes)
    assert words in text
    assert seconds < 3


def connect(place: Address) -> dist.TCPStore:
    """Connect as anybody can who reaches the port, once rank 0 listens."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((place.host, place.port)).close()
            return dist.TCPStore(place.host, place.port, None, False, wait_for_workers=False)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_rank_that_starts_again_is_refused_in_one_line(place: Address) -> None:
    """A rank is started again by hand while the others wait."""
    outcomes, _ = meet(place, member(0, 3), member(1, 3), member(1, 3, pid=9), pause=0.3)
    (text,) = messages(outcomes)
    assert "two processes claim rank 1: " in text
    assert "or one rank was started again: restart all" in text


def claim(**changes: Any) -> str:
    return json.dumps(vars(member(1, 2)) | changes)


@pytest.mark.parametrize(
    "said",
    [
        "[" * 60_000,
        "not json",
        "[1]",
        "null",
        '{"rank": 1}',
        '{"rank":1,"world_size":2,"facts":null}',
        "9" * 5000,
        "x" * 3_000_000,
        *(claim(rank=rank) for rank in (10**9, -1, 1.5, True, "1", None, [1])),
        *(claim(world_size=size) for size in (0, -2, 2.5, "2", 10**12)),
        *(
            claim(facts=facts)
            for facts in ([], {"model": [1]}, {"model": 1}, {"a" * 300: "1"}, {"a": "\x1b[2J"})
        ),
        *(claim(wait_seconds=wait) for wait in ("1", None, float("inf"), float("nan"), 10**400)),
        *(claim(host=name) for name in ("\x1b[2Jhost", "a" * 300, 7, "two\nlines")),
        *(claim(cores=cores) for cores in (3, None, "f" * 5000)),
        *(claim(pid=pid) for pid in (-1, 1.5, "1", 2**40)),
        *(claim(gpus=gpus) for gpus in ("GPU", [1], None, 3)),
        *(claim(local_rank=number) for number in (-2, "0", 0.5, None)),
        claim(unknown=1),
    ],
    ids=lambda said: said[:40],
)
def test_a_claim_that_no_rank_makes_is_ignored(said: str, place: Address) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=attend, args=(place, member(0, 2), outcomes))
    thread.start()
    connect(place).queue_push("claims", said)
    time.sleep(0.2)
    assert outcomes == []
    attend(place, member(1, 2), outcomes)
    thread.join(10)
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
    assert len(outcomes) == 2


def disturb_verdict(store: dist.TCPStore) -> None:
    store.set("verdict_read", "no number")


def disturb_keys(store: dist.TCPStore) -> None:
    store.set("claims", "no queue")
    store.set("nonce", "another")
    for number in range(1000):
        store.set(f"key {number}", "x" * 1000)


def flood_claims(store: dist.TCPStore) -> None:
    for _ in range(3000):
        store.queue_push("claims", "[]")


@pytest.mark.parametrize("disturb", [disturb_verdict, disturb_keys, flood_claims])
def test_who_writes_into_the_store_does_not_end_the_meeting(
    disturb: Callable[[dist.TCPStore], None], place: Address
) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=attend, args=(place, member(0, 2), outcomes))
    thread.start()
    disturb(connect(place))
    attend(place, member(1, 2), outcomes)
    thread.join(10)
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes


@pytest.mark.parametrize(
    "verdict",
    [
        "[" * 60_000,
        "[]",
        "null",
        '{"problem": "", "members": [{"rank": 0}]}',
        '{"problem": "", "members": []}',
        '{"problem": 7, "members": []}',
        '{"problem": "\\u001b[2Jgone", "members": []}',
    ],
)
def test_a_verdict_that_rank_0_does_not_give(verdict: str, place: Address) -> None:
    """One line, within the time, and nothing of it raw on the terminal."""
    server = dist.TCPStore(place.host, place.port, None, True, wait_for_workers=False)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=attend, args=(place, member(1, 2, 2.0), outcomes))
    thread.start()
    time.sleep(0.5)
    server.set("verdict", verdict)
    thread.join(10)
    (text,) = messages(outcomes)
    assert text.isprintable()


@pytest.mark.long
def test_a_flood_of_connections(synthetic_dir: Path, place: Address) -> None:
    """400 connections with 256 descriptors: rank 0 ends in time, with one line."""
    flags = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--rdzv-timeout", 8]
    flags += ["--rank", 0, "--world-size", 2, "--init-method", f"tcp://{place}"]
    can_unshare = os.geteuid() == 0 and shutil.which("unshare")
    alone = ["unshare", "--net"] if can_unshare else []
    flood = [sys.executable, ROOT / "tests" / "flood.py"]
    told = run(*alone, *flood, *script("train_ddp.py", *flags))
    assert told.returncode == 0, told.text
    ended = json.loads(told.stdout)
    assert ended["returncode"] == 1
    assert ended["seconds"] < 25
    [line] = ended["stderr"].splitlines()
    assert "train_ddp.py: error" in line
    assert "missing: 1." in line


def test_a_world_of_five_million_is_told_in_a_short_line(place: Address) -> None:
    (text,) = messages(meet(place, member(0, 5_000_000, 0.5))[0])
    assert "1 of 5000000 ranks are here" in text
    assert "missing: 1, 2, 3, 4, 5, 6, 7, 8 and 4999991 more." in text
    assert len(text) < 400


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9\r\n", b"\xff\xfe\x00 garbage\n"])
def test_another_program_has_the_port(said: bytes, place: Address) -> None:
    def serve(listener: socket.socket) -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            kept.append(line)
            line.sendall(said)

    kept: list[socket.socket] = []
    with closing(socket.create_server((place.host, place.port))) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        outcomes, seconds = meet(place, member(0, 2, 1.0), member(1, 2, 1.0))
        listener.shutdown(socket.SHUT_RDWR)
    texts = messages(outcomes)
    assert any("cannot listen on port" in text and "another program" in text for text in texts)
    assert any("another program, or a job that has begun, has this port" in text for text in texts)
    assert seconds < 5


def test_raw_bytes_at_the_port_do_no_harm(place: Address) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=attend, args=(place, member(0, 2), outcomes))
    thread.start()
    connect(place)
    magic = b"\0" + (0x3C85F7CE).to_bytes(4, "little")  # how a client of the store begins
    for said in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 60_000 + b"\n",
        b'{"rank":1,"world_size":2,"facts":null}\n',
        b"\0" * 5000,
        b"\xff" * 100_000,
        b"x" * 2_000_000,  # a line without an end
        magic,
        magic + b"\1" + b"\xff" * 8,
        magic + os.urandom(1000),
    ):
        with suppress(OSError), socket.create_connection((place.host, place.port)) as connection:
            connection.sendall(said)
    attend(place, member(1, 2), outcomes)
    thread.join(10)
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes


@pytest.mark.parametrize("content", [b"\0\1binary", b'[["127.0.0.1", 9, "old"]]', b"{}", b"[3]"])
def test_a_stale_file_does_no_harm(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "meet"
    path.write_bytes(content)
    outcomes, seconds = meet(File(str(path)), member(1, 2), member(0, 2), pause=0.5)
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
    assert seconds < 4
    assert list(tmp_path.iterdir()) == []


def test_a_stop_signal_ends_the_waiting(place: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = threading.Timer(0.5, lambda: monkeypatch.setattr(signals, "_received", 15))
    timer.start()
    outcomes, seconds = meet(place, member(0, 3, 60.0), member(1, 3, 60.0))
    assert {type(outcome) for outcome in outcomes} == {signals.Stopped}
    assert {getattr(outcome, "exit_status", None) for outcome in outcomes} == {143}
    assert seconds < 3


@pytest.mark.long
def test_the_incomplete_world_for_real(synthetic_dir: Path) -> None:
    """WORLD_SIZE=4, two processes: both end in time, and both name the two who never came."""
    common = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--rdzv-timeout", 10]
    port, processes = str(free_port()), []
    for rank in (0, 1):
        variables = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_PORT": port}
        processes.append(start(*script("train_ddp.py", *common), **variables))
        later = time.monotonic()
        time.sleep(1 - rank)
    for process in processes:
        ended = finish(process, 30, later)
        assert ended.returncode == 1
        assert ended.seconds < 15
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        (line,) = error_lines(ended)
        assert "missing: 2, 3." in line
        for rank, other in enumerate(processes):
            assert f"{rank} ({socket.gethostname()} pid {other.pid})" in line


def test_the_wrong_data_set_for_real(synthetic_dir: Path) -> None:
    common = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--rdzv-timeout", 30]
    method, processes = f"tcp://127.0.0.1:{free_port()}", []
    for rank in (0, 1):
        own = ["--init-method", method, "--rank", rank, "--world-size", 2, "--seed", rank]
        processes.append(start(*script("train_ddp.py", *common, *own)))
    for process in processes:
        ended = finish(process, 20)
        assert ended.returncode == 1
        assert "has seed 1, rank 0" in ended.stderr
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
