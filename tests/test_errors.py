"""Errors: one line for a known cause, a traceback for any other, and one rank prints."""

import os
import signal
import socket
import sys
import time
from datetime import timedelta
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.helpers import FORK, ended, fork, on_ranks
from utils import errors
from utils.errors import ADVICE, UsageError, UserError, guard

SECOND = timedelta(seconds=1)


@pytest.fixture
def report(capfd, monkeypatch):
    """Return a function that guards another one: its exit status, and what it printed."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr("sys.argv", ["/home/me/train_ddp.py"])

    def call(train):
        capfd.readouterr()
        status = guard(lambda args: train(), None)
        return status, capfd.readouterr().err

    yield call
    for number, handler in kept.items():
        signal.signal(number, handler)


def fail(error):
    def train():
        raise error

    return train


def test_an_error_of_the_user_is_one_line_with_its_exit_status(report):
    line = "train_ddp.py: error: lower --lr\n"
    assert report(fail(UserError("lower --lr"))) == (1, line)
    assert report(fail(UsageError("lower --lr"))) == (2, line)
    status, line = report(Path("/nowhere/x").read_text)
    assert (status, line) == (1, "train_ddp.py: error: /nowhere/x: No such file or directory\n")


def test_any_other_error_keeps_its_traceback(report):
    status, text = report(lambda: [].pop())
    assert status == 1
    assert text.startswith("Traceback")
    assert "lambda: [].pop()" in text
    assert text.endswith("IndexError: pop from empty list\n")


def test_the_exit_status_of_a_stop(report, monkeypatch):
    assert [report(lambda n=n: n)[0] for n in (0, signal.SIGINT, signal.SIGTERM)] == [0, 130, 143]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert report(lambda: int(signal.SIGTERM)) == (0, "")


# Each row of ADVICE with the text that PyTorch prints.


def wait_for_a_rank():
    dist.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=SECOND)


def wait_for_a_key():
    dist.TCPStore("127.0.0.1", 0, is_master=True).wait(["a key of another rank"], SECOND)


def use_a_port_twice():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.TCPStore("127.0.0.1", store.port, is_master=True, timeout=SECOND)


def connect_to_nobody():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dist.TCPStore("127.0.0.1", port, is_master=False, timeout=SECOND)


def reduce_while_the_other_rank(does):
    def reduce(rank):
        if rank == 1:
            does()
        dist.all_reduce(torch.ones(1))

    raise on_ranks(reduce, timeout=1)[0]


def wait_for_an_answer():
    reduce_while_the_other_rank(lambda: time.sleep(2))


def lose_a_rank():
    reduce_while_the_other_rank(lambda: os._exit(0))


class Samples:
    """A data set that fails."""

    def __init__(self, fail):
        self.fail = fail

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.fail()


def read_in_a_worker(fail):
    iterator = iter(DataLoader(Samples(fail), num_workers=1))
    try:
        next(iterator)
    finally:
        iterator._shutdown_workers()  # or another test may wait for them, for five seconds


def kill_a_worker():
    read_in_a_worker(lambda: os.kill(os.getpid(), signal.SIGKILL))


def leave_a_parameter_unused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Two())
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()


def printed_by(library, text):
    """Raise an error with a text of a library of PyTorch, which cannot be provoked here."""

    def train():
        path = Path(torch.__file__).parent / "lib" / library
        if not path.exists():
            pytest.skip(f"needs {library}")
        with path.open() as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            assert content.find(text.encode()) >= 0
        raise RuntimeError(f"{text} ...\nException raised from ...")

    return train


OUT_OF_MEMORY = printed_by("libc10_cuda.so", "CUDA out of memory. Tried to allocate ")
OUT_OF_SHM = printed_by("libtorch_cpu.so", "unable to allocate shared memory(shm) for file <")
TWO_ON_A_GPU = printed_by("libtorch_cuda.so", "usually reflects invalid usage of NCCL library")


@pytest.mark.parametrize(
    ("part", "provoke", "quote"),
    [
        ("out of memory", OUT_OF_MEMORY, "Tried to allocate"),
        ("invalid usage", TWO_ON_A_GPU, "invalid usage of NCCL library"),
        ("unable to allocate shared memory", OUT_OF_SHM, "for file <"),
        ("DataLoader worker (pid", kill_a_worker, "DataLoader worker (pid"),
        ("did not receive grad", leave_a_parameter_unused, "for rank 0: 2 3"),
        ("clients joined", wait_for_a_rank, "1/2 clients joined"),
        ("EADDRINUSE", use_a_port_twice, "address already in use"),
        ("wait timeout after", wait_for_a_key, "wait timeout after 1000ms"),
        ("gloo/transport", wait_for_an_answer, "Timed out waiting 1000ms"),
        ("gloo/transport", lose_a_rank, "peer"),
        ("trying to connect to", connect_to_nobody, "timed out after 1000ms while trying"),
    ],
)
def test_a_line_of_pytorch_is_quoted_with_advice(part, provoke, quote, report, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    status, text = report(provoke)
    [line] = [line for line in text.splitlines() if "train_ddp.py: error: " in line]
    assert line.startswith("train_ddp.py: error: rank 3: ")
    assert quote in line
    assert line.endswith(f": {ADVICE[part]}")
    assert "\nTraceback" not in text, "PyTorch prints lines of its own, but no traceback"
    assert status == 1


def test_an_error_in_a_loader_worker_is_its_message_and_its_place(report):
    def broken():
        raise ValueError("label 77 is too large\nand more")

    status, line = report(lambda: read_in_a_worker(broken))
    number = broken.__code__.co_firstlineno + 1
    place = f"({__file__}, line {number}, in a loader worker)"
    assert line == f"train_ddp.py: error: ValueError: label 77 is too large {place}\n"
    assert status == 1


def test_only_the_first_rank_of_a_machine_prints(tmp_path, monkeypatch):
    """torchrun ends the others, with SIGTERM, when the first has ended."""
    monkeypatch.setattr(errors, "REPORT_SECONDS", 60)
    receive, send = FORK.Pipe(duplex=False)

    def run(local_rank):
        os.environ["LOCAL_RANK"] = str(local_rank)
        sys.stderr = (tmp_path / f"{local_rank}").open("w")

        def train(args):
            send.send(local_rank)
            raise UserError("a message")

        os._exit(guard(train, None))

    first, other = fork(run, 0), fork(run, 1)
    assert {receive.recv(), receive.recv()} == {0, 1}
    assert ended(first) == 1
    time.sleep(0.3)  # so that the other has come to the place where it waits
    other.terminate()
    assert ended(other) == -signal.SIGTERM
    assert (tmp_path / "0").read_text().endswith("error: a message\n")
    assert (tmp_path / "1").read_text() == ""
