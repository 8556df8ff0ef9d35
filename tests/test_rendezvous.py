"""The roll call: who is missing, who is there twice, and who does not belong to this job."""

import json
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.processes import finish, script, start
from tests.test_launch import error_lines, free_port
from utils import rendezvous, signals
from utils.rendezvous import Address, File, Member, RendezvousError

Outcome = list[Member] | Exception


def attend(place: Address, own: Member, outcomes: list[Outcome]) -> None:
    try:
        if own.rank == 0:
            word = "word" if place.is_published else ""
            with rendezvous.open_roll(place, own, word) as listener:
                outcomes.append(rendezvous.call_roll(listener, word, own, place.hint()))
                place.withdraw()
        else:
            outcomes.append(rendezvous.answer_roll(place, own)[2])
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


def member(rank: int, world_size: int, patience: float = 5.0, **more: Any) -> Member:
    return Member(rank, world_size, patience=patience, pid=1000 + rank, **more)


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
    members = [member(rank, 4, patience=1.5) for rank in order]
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


def test_the_address_is_that_of_another_machine() -> None:
    outcomes, _ = meet(Address("192.0.2.77", free_port()), member(0, 2, 0.5))
    (text,) = messages(outcomes)
    assert "192.0.2.77 is not an address of this host" in text


@pytest.mark.parametrize("claimed", [0, 1])
def test_two_claim_one_rank(place: Address, claimed: int) -> None:
    ranks = [1, 0, claimed]
    members = [member(rank, 3) for rank in ranks]
    # Rank 1 tries every 0.1 s: it is there when the second claim comes.
    outcomes, seconds = meet(place, *members, pause=0.4)
    assert len(outcomes) == 3
    (text,) = messages(outcomes)
    assert f"two processes claim rank {claimed}: " in text
    assert "node_rank or RANK was given twice" in text
    assert seconds < 3


def test_two_claim_rank_0_by_file(tmp_path: Path) -> None:
    outcomes, _ = meet(File(str(tmp_path / "f")), member(0, 2), member(0, 2), pause=0.3)
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
    second = Member(1, **({"world_size": 3, "facts": facts, "patience": 20.0} | other))
    outcomes, seconds = meet(place, member(0, 3, 20.0, facts=facts), second)
    (text,) = messages(outcomes)
    assert words in text
    assert seconds < 3


def test_a_rank_that_starts_again_takes_its_place(place: Address) -> None:
    """A launcher restarts a rank while the others wait: this is no second claim."""
    outcomes: list[Outcome] = []
    threads = [
        threading.Thread(target=attend, args=(place, member(rank, 3), outcomes)) for rank in (0, 1)
    ]
    threads[0].start()
    time.sleep(0.3)
    with socket.create_connection((place.host, place.port)) as first_life:
        first_life.recv(100)
        first_life.sendall(json.dumps(vars(member(1, 3))).encode() + b"\n")
        time.sleep(0.3)
    time.sleep(0.3)
    threads[1].start()
    attend(place, member(2, 3), outcomes)
    for thread in threads:
        thread.join(10)
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes


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
        outcomes, seconds = meet(place, member(0, 2, 2.0), member(1, 2, 2.0))
        listener.shutdown(socket.SHUT_RDWR)
    texts = messages(outcomes)
    assert any("cannot listen on port" in text and "another program" in text for text in texts)
    assert any("another program, or a job that has begun, has this port" in text for text in texts)
    assert seconds < 5


def test_strangers_do_not_disturb_the_roll_call(place: Address) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=attend, args=(place, member(0, 2), outcomes))
    thread.start()
    time.sleep(0.3)
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"rank": 1}\n', b"\0" * 5000):
        with socket.create_connection((place.host, place.port)) as line:
            line.sendall(said)
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
    assert {type(outcome) for outcome in outcomes} == {rendezvous.Stopped}
    assert {getattr(outcome, "exit_status", None) for outcome in outcomes} == {143}
    assert seconds < 3


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
