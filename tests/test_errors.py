"""Errors: one line for a known cause, a traceback for any other, and one rank prints."""

import os
import signal
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.helpers import ended, fork
from utils.errors import ADVICE, REPORT_SECONDS, UsageError, UserError, guard


@pytest.fixture
def report(capfd, monkeypatch):
    """Return a function that guards another one: its exit status, and what it printed."""
    monkeypatch.setattr("sys.argv", ["/home/me/train_ddp.py"])

    def call(train, *args):
        capfd.readouterr()
        status = guard(lambda _: train(*args), None)
        return status, capfd.readouterr().err

    return call


def fail(error):
    raise error


def test_an_error_of_the_user_is_one_line_with_its_exit_status(report):
    line = "train_ddp.py: error: lower --lr\n"
    assert report(fail, UserError("lower --lr")) == (1, line)
    assert report(fail, UsageError("lower --lr")) == (2, line)


def test_a_missing_file_is_named_with_the_line_that_opens_it(report):
    def load():
        return Path("/nowhere/x").read_text()

    place = f"({__file__}, line {load.__code__.co_firstlineno + 1})"
    line = f"train_ddp.py: error: /nowhere/x: No such file or directory {place}\n"
    assert report(load) == (1, line)


def test_the_other_ranks_of_a_machine_are_ended_before_they_say_the_same(capfd, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("utils.errors.REPORT_SECONDS", 600)
    rank = fork(guard, lambda args: Path("/nowhere/x").read_text(), None)
    rank.join(1)  # nothing happens
    rank.terminate()  # as torchrun does
    assert ended(rank) == [-signal.SIGTERM]
    assert capfd.readouterr().err == ""


def test_any_other_error_keeps_its_traceback(report):
    with pytest.raises(IndexError, match="pop from empty list"):
        report(lambda: [].pop())


def test_after_a_stop_the_status_is_that_of_its_signal_and_0_under_torchrun(report, monkeypatch):
    assert [report(int, n)[0] for n in (0, signal.SIGINT, signal.SIGTERM)] == [0, 130, 143]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert report(int, signal.SIGTERM) == (0, "")


# What PyTorch prints on GPUs. Slow tests see other rows of ADVICE in real runs.
PRINTED = {
    "out of memory": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has",
    "invalid usage": "ncclInvalidUsage: This usually reflects invalid usage of NCCL library",
}


@pytest.mark.parametrize("part", PRINTED)
def test_a_line_of_pytorch_is_quoted_with_advice(part, report, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    error = RuntimeError(f"first\n{PRINTED[part]}. This error happened before\nlast")
    status, line = report(fail, error)
    assert line.startswith(f"train_ddp.py: error: rank 3: {PRINTED[part]}: {ADVICE[part]} (")
    assert (status, line.count("\n")) == (1, 1)


class Broken:
    """A data set whose first sample is a mistake of its user, and whose second ends the worker."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index == 0:
            raise ValueError("label 77 is too large")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (0, "error: ValueError: label 77 is too large ("),
        # If memory is short, the kernel kills a worker.
        pytest.param(
            1, "is the memory or /dev/shm full? Try --num-workers 0", marks=pytest.mark.slow
        ),
    ],
)
def test_a_loader_worker_that_fails_is_one_line(index, said, report):
    loader = DataLoader(Broken(), sampler=[index], num_workers=1)
    status, line = report(lambda: next(iter(loader)))
    assert said in line
    assert __file__ in line
    assert (status, line.count("\n")) == (1, 1)


def test_each_machine_says_at_once_why_it_ends(report, monkeypatch):
    """Not only rank 0: its machine would end the job before another one has said anything."""
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    began = time.monotonic()
    assert report(fail, UserError("/dev/shm is full"))[1].endswith("error: /dev/shm is full\n")
    assert time.monotonic() - began < REPORT_SECONDS
