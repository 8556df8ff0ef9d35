"""Errors: one line for a known cause, a traceback for any other, and one rank prints."""

import os
import signal
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from tests.helpers import ended, fork
from utils.errors import ADVICE, UsageError, UserError, guard


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


def test_the_first_rank_of_each_machine_says_why_it_ends_and_the_others_are_ended(
    capfd, monkeypatch
):
    """Not rank 0 alone: its machine would end the job before another one has said anything."""
    monkeypatch.setattr("utils.errors.REPORT_SECONDS", 60)
    monkeypatch.setenv("RANK", "8")
    ranks = []
    for local_rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        ranks.append(fork(guard, fail, UserError("lower --lr")))
    other, first = ranks
    assert ended(first, timeout=30) == [0]
    other.terminate()  # as torchrun does
    assert ended(other) == [-signal.SIGTERM]
    assert capfd.readouterr().err.count("error: lower --lr") == 1


def test_any_other_error_keeps_its_traceback(report):
    with pytest.raises(IndexError, match="pop from empty list"):
        report(lambda: [].pop())


def test_after_a_stop_the_status_is_that_of_its_signal_and_0_under_torchrun(report, monkeypatch):
    assert [report(int, n)[0] for n in (0, signal.SIGINT, signal.SIGTERM)] == [0, 130, 143]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert report(int, signal.SIGTERM) == (0, "")


@pytest.mark.parametrize(
    ("said", "part"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "out of memory"),
        ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library", "invalid usage"),
    ],
)
def test_a_line_of_pytorch_is_quoted_with_advice(said, part, report, monkeypatch):
    """Slow tests see other rows of ADVICE in real runs."""
    monkeypatch.setenv("RANK", "3")
    error = RuntimeError(f"first\n{said}. This error happened before\nlast")
    status, line = report(fail, error)
    assert line.startswith(f"train_ddp.py: error: rank 3: {said}: {ADVICE[part]} (")
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
        pytest.param(1, "is the memory or /dev/shm full?", marks=pytest.mark.slow),
    ],
)
def test_a_loader_worker_that_fails_is_one_line(index, said, report):
    loader = DataLoader(Broken(), sampler=[index], num_workers=1)
    status, line = report(lambda: next(iter(loader)))
    assert said in line
    assert __file__ in line
    assert (status, line.count("\n")) == (1, 1)
