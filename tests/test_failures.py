"""A rank that fails: the job ends soon, and names that rank instead of a healthy one."""

import json
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist

from tests.processes import Training, error_lines, finish
from utils import errors
from utils.cluster.job import LOST_IN_TRAINING, Job, LostRank, Report
from utils.cluster.rendezvous import Peer, Peers

TIMEOUT = 10  # seconds; more than ranks on a busy machine are apart
UNKNOWN = LOST_IN_TRAINING
LONG = ["--model", "mlp", "--max-steps", 400, "--save-every-steps", 2, "--no-tensorboard"]
LONG += ["--timeout", TIMEOUT]


@pytest.fixture
def training(synthetic_dir, tmp_path):
    """Trainings whose epoch has 312 steps, so that ranks get lost in the middle of it."""
    return Training(synthetic_dir, tmp_path / "run")


def fail(training, how, when, rank, *extra, then=signal.SIGKILL, technique="ddp", **more):
    """Let one rank go wrong, and return what came of it.

    Args:
        then: the signal for a rank that was stopped, once another one has named it.
    """
    flag = training.folder.with_name("flag")
    altered = {"ALTER": how, "ALTER_RANK": str(rank), "ALTER_AT": str(when)}
    process = training.start(technique, *extra, ALTER_FLAG=str(flag), **altered, **more)
    said = ""
    if how == "SIGSTOP":
        while process.poll() is None and ".py: error: " not in said:
            said += process.stderr.readline()
        os.kill(int(flag.read_text()), then)  # launchers wait half a minute for it
    ended = finish(process, 120)
    ended.stderr = said + ended.stderr
    assert ended.returncode == 1, ended.text
    return ended


def check_status(training, rank, words):
    """Rank 0 has written who is lost, at which step, and why."""
    told = training.status
    assert (told["state"], told["ranks"]) == ("failed", [rank]), told
    assert f"rank 0 lost rank {rank} (" in told["reason"], told
    assert " at step 7: " in told["reason"], told
    assert words in told["reason"], told


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_a_rank_is_the_reason_on_all(rank, training):
    cause = "ArithmeticError: wrong on purpose"
    ended = fail(training, "raise", 7, rank, *LONG)
    assert f"lost rank {1 - rank} (" not in ended.text, ended.text
    if rank:
        check_status(training, rank, cause)
    else:  # its store ends with it
        assert any("lost rank 0 (" in line and cause in line for line in error_lines(ended))
    assert training.is_saved()
    assert cause in ended.text.partition("FAILED")[2], "torchrun's summary"


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_once(training):
    ended = fail(training, "SIGKILL", 7, 1, *LONG, processes=3)
    assert sum("lost rank" in line for line in error_lines(ended)) == 1, ended.text
    check_status(training, 1, UNKNOWN)


def test_a_rank_that_stalls_is_named_and_hears_it_when_it_wakes(training):
    """It does not blame those that went on."""
    ended = fail(training, "SIGSTOP", 7, 1, *LONG, then=signal.SIGCONT)
    check_status(training, 1, UNKNOWN)
    (woken,) = (line for line in error_lines(ended) if "rank 0 lost rank 1 (" not in line)
    assert "gave up this rank" in woken or "was slower than --timeout" in woken


def test_without_a_launcher_too(training):
    ended = fail(training, "SIGKILL", 7, 1, *LONG, technique="spawn")
    check_status(training, 1, UNKNOWN)
    by_rank_0, by_parent = error_lines(ended)
    assert "rank 0 lost rank 1 (" in by_rank_0
    assert "rank 1 (pid " in by_parent
    assert "killed by SIGKILL" in by_parent


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("frozen", "params, while rank "),
        ("answers", "test data: "),
    ],
)
def test_ranks_that_differ_are_named_before_the_first_step(how, message, training):
    """Otherwise the first would hang in its last batch; the others compute nonsense or crash."""
    few = ["--model", "mlp", "--max-steps", 3]
    ended = training.run("spawn", *few, ALTER=how, ALTER_RANK="1")
    assert ended.returncode == 2, ended.text
    (line,) = error_lines(ended)
    assert re.search(f"[Rr]ank [01] has [0-9 ]*{re.escape(message)}", line)
    assert not training.is_saved()


def test_rank_0_does_not_come_to_the_process_group(training):
    """Its store is that of the group: while it is stopped PyTorch waits without a limit."""
    extra = ["--model", "linear", "--rdzv-timeout", TIMEOUT]
    ended = fail(training, "SIGSTOP", "group", 0, *extra)
    assert "rank 1 lost rank 0 (" in ended.text, ended.text
    assert "lost rank 1 (" not in ended.text, ended.text
    assert "on all ports" not in ended.text, ended.text


def test_rank_0_does_not_write_the_results(training):
    """The others have nothing left to do, and nobody else would notice."""
    extra = ["--model", "linear", "--max-steps", 20, "--no-tensorboard", "--timeout", TIMEOUT]
    ended = fail(training, "SIGKILL", "results", 0, *extra)
    assert "rank 1 lost rank 0 (" in ended.text
    assert not (training.folder / "summary.json").exists()


def test_an_error_of_nccl_is_explained_once(monkeypatch):
    """It may be a plain RuntimeError."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    main = Peer(0)
    peers = Peers(Peer(1), 2, main, store=dist.HashStore())
    peers.store.set("report", json.dumps(vars(Report([0], f"rank {main}"))))
    job = Job(peers, 1.0)
    aborted = RuntimeError("NCCL communicator was aborted on rank 1.")
    aborted.add_note("at step 3")
    lost = job.explain(aborted)
    assert isinstance(lost, LostRank)
    assert lost.ranks == [0]
    assert "rank 1 lost rank 0 (" in str(lost)
    assert "at step 3" in str(lost)
    for error in (lost, RuntimeError("NCCL"), ArithmeticError("wrong")):
        assert job.explain(error) is error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB", "out of memory: lower --batch-size"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", "cuBLAS got no"),
        ("Duplicate GPU detected : rank 0 and rank 1", "--ntasks-per-node"),
        ("CUDA error: no kernel image is available", "Tesla V100, a GPU of capability 7.0 (it has"),
    ],
)
def test_what_a_gpu_says_is_explained(text, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    error = errors.explain(RuntimeError(text))
    assert isinstance(error, errors.UserError)
    assert said in str(error)
