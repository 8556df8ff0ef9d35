"""The meeting: who is missing, who is there twice, and who does not belong to this job."""

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

import pytest
import torch.distributed as dist

from tests.processes import ROOT, finish, free_port, run, script, start
from tests.test_launch import error_lines, wait_for_port
from utils.cluster.meeting import COMPLETE, Meeting, Member, RendezvousError, meet, name
from utils.cluster.places import Address, File

HOST = socket.gethostname()


def attend(place, rank, size, outcomes, seconds=5.0, **more):
    own = Member(rank, **({"pid": 1000 + rank} | more))
    try:
        outcomes.append(meet(place, own, size, seconds))
    except Exception as error:
        outcomes.append(error)


def meet_all(place, *members, pause=0.0):
    """Hold a meeting among threads; return what each got, in no order."""
    outcomes = []
    threads = []
    for more in members:
        own = {"size": 2, "outcomes": outcomes} | more
        threads.append(threading.Thread(target=attend, args=(place,), kwargs=own))
        threads[-1].start()
        time.sleep(pause)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return outcomes


@pytest.fixture
def place():
    return Address("127.0.0.1", free_port())


class Ranks:
    """Ranks that are started one by one, by hand."""

    def __init__(self, data_dir, size, seconds):
        self.port, self.processes = free_port(), list[subprocess.Popen[str]]()
        self.words = ["--dataset", "synthetic", "--data-dir", data_dir, "--world-size", size]
        self.words += ["--rdzv-timeout", seconds, "--init-method", f"tcp://127.0.0.1:{self.port}"]

    def start(self, rank, *more):
        command = script("train_ddp.py", *self.words, "--rank", rank, *more)
        self.processes.append(start(*command))
        if len(self.processes) == 1 and rank == 0:
            wait_for_port(self.port, self.processes[0])
        return self.processes[-1]

    def end(self, within):
        """Wait for all; each ends with one line."""
        ended = [finish(process, within) for process in self.processes]
        for one in ended:
            assert one.returncode == 1, one.text
            assert len(one.stderr.splitlines()) == len(error_lines(one)) == 1, one.stderr
        return ended


def test_all_that_wait_name_the_missing(synthetic_dir):
    ranks = Ranks(synthetic_dir, 4, 6)
    pids = [ranks.start(rank).pid for rank in (0, 1)]
    for ended in ranks.end(30):
        assert f"2 of 4 ranks are here: 0 ({HOST} pid {pids[0]}), 1 (" in ended.stderr
        assert "missing: 2, 3. Is WORLD_SIZE" in ended.stderr


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([[0]], "two processes claim the same rank: 0 ("),
        ([[1], [1]], "two processes claim the same rank: 1 ("),
        ([[1, "--seed", 1]], "has seed 1, rank 0 ("),
        ([[1, "--world-size", 4]], "has WORLD_SIZE 4, rank 0 ("),
    ],
)
def test_who_does_not_fit_is_named_at_once(others, words, synthetic_dir):
    ranks = Ranks(synthetic_dir, 3, 60)
    for arguments in ([0], *others):
        ranks.start(*arguments)
    for ended in ranks.end(30):
        assert words in ended.stderr


def test_a_foreign_program_has_the_port(synthetic_dir):
    """It accepts connections and never answers."""
    ranks = Ranks(synthetic_dir, 2, 4)
    with closing(socket.create_server(("127.0.0.1", ranks.port))):
        ranks.processes.append(start(*script("train_ddp.py", *ranks.words, "--rank", 0)))
        ranks.start(1)
        first, second = ranks.end(40)
    assert f"cannot listen on port {ranks.port} (address already in use)" in first.stderr
    assert f"127.0.0.1:{ranks.port} (from --init-method)" in second.stderr
    assert "no answer" in second.stderr


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_rank_0_is_stopped_or_killed_while_others_wait(number, synthetic_dir):
    ranks = Ranks(synthetic_dir, 3, 5)
    main = ranks.start(0)
    ranks.start(1)
    time.sleep(2.0)
    main.send_signal(number)
    ranks.processes = ranks.processes[1:]
    (ended,) = ranks.end(40)
    words = {signal.SIGSTOP: "its host is stopped", signal.SIGKILL: "Rank 0 is missing"}
    assert words[number] in ended.stderr
    main.kill()
    main.communicate()


def test_too_few_descriptors_are_named_before_anyone_waits(synthetic_dir):
    ranks = Ranks(synthetic_dir, 1000, 60)
    command = script("train_ddp.py", *ranks.words, "--rank", 0)
    ended = run("bash", "-c", 'ulimit -n 1024; exec "$@"', "bash", *command, timeout=50)
    assert ended.returncode == 2
    (line,) = error_lines(ended)
    assert "may open 1024 files and needs 4128 for 1000 ranks: raise the hard limit" in line


def test_a_stale_master_addr_does_not_break_one_node(synthetic_dir, tmp_path):
    words = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--model", "linear"]
    words += ["--max-steps", 2, "--nprocs", 2, "--run-dir", tmp_path / "run"]
    ended = run(*script("train_ddp.py", *words), MASTER_ADDR="192.0.2.1", MASTER_PORT="29500")
    assert ended.returncode == 0, ended.text


def test_a_large_world_is_one_short_line(place):
    with pytest.raises(RendezvousError) as caught:
        meet(place, Member(0), 4000, 0.5)
    assert "missing: 1, 2, 3, 4, 5, 6, 7, 8 and 3991 more." in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_rank_that_starts_again_leaves_the_job_alone(place):
    outcomes = meet_all(place, {"rank": 0}, {"rank": 1})
    attend(place, 1, 2, outcomes, 1.0, pid=9)
    assert "two processes claim the same rank: 1 (" in str(outcomes[-1])
    (met, _, _) = outcomes
    assert isinstance(met, Meeting)
    assert met.store.get("verdict").decode() == COMPLETE


def test_garbage_on_the_port_does_no_harm(place):
    outcomes = []
    thread = threading.Thread(target=attend, args=(place, 0, 2, outcomes))
    thread.start()
    magic = b"\0" + (0x3C85F7CE).to_bytes(4, "little")  # how a client of the store begins
    deadline = time.monotonic() + 10
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, magic + b"\1" + b"x" * 9):
        while time.monotonic() < deadline:
            with suppress(ConnectionRefusedError):
                with socket.create_connection((place.host, place.port)) as connection:
                    with suppress(OSError):
                        connection.sendall(said)
                break
            time.sleep(0.05)
    attend(place, 1, 2, outcomes)
    thread.join(10)
    assert [type(outcome) for outcome in outcomes] == [Meeting, Meeting], outcomes


@pytest.mark.parametrize("content", [b"\0\1binary", b'[["127.0.0.1", 9, "old"]]', b"[3]"])
def test_a_stale_file_does_no_harm(content, tmp_path):
    path = tmp_path / "meet"
    path.write_bytes(content)
    outcomes = meet_all(File(str(path)), {"rank": 1}, {"rank": 0}, pause=0.5)
    assert len(outcomes) == 2
    for met in outcomes:
        assert isinstance(met, Meeting), met
        assert (met.mates, met.main.pid, met.interface) == ([0, 1], 1000, "")
        assert name(met.store, [0, 1]) == f"0 ({HOST} pid 1000), 1 ({HOST} pid 1001)"


def test_a_store_of_another_attempt_is_not_taken(tmp_path):
    """Where rank 0 was published, its nonce has to be there."""
    place = File(str(tmp_path / "meet"))
    other = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other.set("member/0", '{"rank": 0, "facts": {"seed": "9"}}')
    place.publish(other.port, "ours")
    outcomes = []
    attend(place, 1, 2, outcomes, 1.0)
    assert "another program, or another job, has this port" in str(outcomes[0])
    attend(place, 0, 1, outcomes)
    assert isinstance(outcomes[1], Meeting), outcomes


@pytest.mark.slow
def test_a_world_of_256_meets_and_names_who_is_missing_and_who_is_lost():
    """Real stores, and as many connections for each rank as a rank holds."""
    ended = run(
        sys.executable, ROOT / "tests" / "simulate.py", "--ranks", 64, 256, timeout=400, real=True
    )
    assert ended.returncode == 0, ended.text
    small, large = (line.split() for line in ended.stdout.splitlines()[1:])
    assert (large[1], large[6], large[9]) == ("256", "255", "255")
    for column in (3, 8):  # MB grow no faster than the world
        assert float(large[column]) < 2 * 4 * max(float(small[column]), 0.1), ended.stdout
