"""Errors: one line for a known cause, a traceback for any other, and one rank prints."""

import signal
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from utils.errors import ADVICE, UsageError, UserError, guard


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


# Each row of ADVICE with what PyTorch prints. The slow tests provoke most of these for real.
PRINTED = {
    "out of memory": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has",
    "invalid usage": "ncclInvalidUsage: This usually reflects invalid usage of NCCL library",
    "unable to allocate shared memory": "unable to allocate shared memory(shm) for file </torch_7>",
    "DataLoader worker (pid": "DataLoader worker (pid 7) is killed by signal: Killed",
    "did not receive grad": "Parameter indices which did not receive grad for rank 0: 2 3",
    "clients joined": "Timed out after 2 seconds waiting for clients. 1/2 clients joined",
    "wait timeout after": "wait timeout after 1000ms, keys: /default_pg/0//cpu//0/0",
    "EADDRINUSE": "port: 29500, code: -98, name: EADDRINUSE, message: address in use",
    "gloo/transport": "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms",
    "trying to connect to": "timed out after 1000ms while trying to connect to (127.0.0.1, 29500)",
}


@pytest.mark.parametrize("part", ADVICE)
def test_a_line_of_pytorch_is_quoted_with_advice(part, report, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    error = RuntimeError(f"first\n{PRINTED[part]}. This error happened before\nlast")
    line = f"train_ddp.py: error: rank 3: {PRINTED[part]}: {ADVICE[part]}\n"
    assert report(fail(error)) == (1, line)


class Broken:
    """A data set with an error of its user."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise ValueError("label 77 is too large\nand more")


def test_an_error_in_a_loader_worker_is_its_message_and_its_place(report):
    status, line = report(lambda: next(iter(DataLoader(Broken(), num_workers=1))))
    place = (
        f"({__file__}, line {Broken.__getitem__.__code__.co_firstlineno + 1}, in a loader worker)"
    )
    assert line == f"train_ddp.py: error: ValueError: label 77 is too large {place}\n"
    assert status == 1
