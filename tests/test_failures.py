"""A rank that fails: the job ends soon, and names that rank instead of a healthy one."""

import json
import os
import re
import signal
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from tests.processes import ROOT, STANDALONE, Training, error_lines, finish, run, wait_until
from utils import errors
from utils.cluster.job import LOST_IN_TRAINING, Job, LostRank, Report
from utils.cluster.rendezvous import Peer, Peers

TIMEOUT = 10  # seconds; more than ranks on a busy machine are apart
UNKNOWN = LOST_IN_TRAINING
SLOW = pytest.mark.slow
LONG = ["--model", "mlp", "--max-steps", 400, "--save-every-steps", 2, "--no-tensorboard"]
LONG += ["--timeout", TIMEOUT]


@pytest.fixture
def training(synthetic_dir, tmp_path):
    """Trainings whose epoch has 312 steps, so that ranks get lost in the middle of it."""
    return Training(synthetic_dir, tmp_path / "run")


def start_altered(training, how, when, rank, *extra, technique="ddp", **more):
    """Start a training of which one rank goes wrong, and return where it notes the moment."""
    flag = training.folder.with_name("flag")
    variables = {"ALTER": how, "ALTER_RANK": str(rank), "ALTER_AT": str(when)}
    return training.start(technique, *extra, ALTER_FLAG=str(flag), **variables, **more), flag


def fail(training, how, when, rank, *extra, then=signal.SIGKILL, **more):
    """Let one rank go wrong, and return what came of it.

    Args:
        then: the signal for a rank that was stopped, once another one has named it.
    """
    process, flag = start_altered(training, how, when, rank, *extra, **more)
    said = ""
    if how == "SIGSTOP":
        while process.poll() is None and ".py: error: " not in said:
            said += process.stderr.readline()
        os.kill(int(flag.read_text()), then)  # launchers wait half a minute for it
    ended = finish(process, 120)
    ended.stderr = said + ended.stderr
    assert ended.returncode == 1, ended.text
    return ended


def check_status(training, rank, words, step=7):
    """Rank 0 has written who is lost, at which step, and why."""
    told = training.status
    assert (told["state"], told["ranks"]) == ("failed", [rank]), told
    assert f"rank 0 lost rank {rank} (" in told["reason"], told
    assert f" at step {step}: " in told["reason"], told
    assert words in told["reason"], told


@pytest.mark.parametrize(
    ("how", "rank", "processes", "cause"),
    [
        ("raise", 1, 2, "ArithmeticError: wrong on purpose"),
        ("raise", 0, 2, "ArithmeticError: wrong on purpose"),
        pytest.param("leave", 1, 3, UNKNOWN, marks=SLOW),
        pytest.param("SIGKILL", 1, 3, UNKNOWN, marks=SLOW),
        pytest.param("SIGKILL", 0, 2, UNKNOWN, marks=SLOW),
        pytest.param("nan", 1, 2, "the loss is nan at step 8 on rank 1", marks=SLOW),
    ],
)
def test_the_rank_that_failed_is_named(how, rank, processes, cause, training):
    busy = {"ALTER_BUSY": "2"} if how == "leave" else {}  # one computes when the rank leaves
    ended = fail(training, how, 7, rank, *LONG, processes=processes, **busy)
    healthy = [other for other in range(processes) if other != rank]
    assert not any(f"lost rank {other} (" in ended.text for other in healthy), ended.text
    if how not in ("raise", "nan"):  # these say it themselves, and torchrun ends the others
        assert sum("lost rank" in line for line in error_lines(ended)) == 1, ended.text
    if rank:
        check_status(training, rank, cause, 8 if how == "nan" else 7)
    else:  # its store ends with it
        assert any("lost rank 0 (" in line and cause in line for line in error_lines(ended))
    assert training.is_saved()
    assert cause in ended.text.partition("FAILED")[2] or how == "nan", "torchrun's summary"


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
        pytest.param("batches", "training data: ", marks=SLOW),
        pytest.param("buffer", "queue: float32 (3,), rank 0 None", marks=SLOW),
        pytest.param("code", "the class ConvNet with the hash: ", marks=SLOW),
    ],
)
def test_ranks_that_differ_are_named_before_the_first_step(how, message, training):
    """Otherwise the first would hang in its last batch; the others compute nonsense or crash."""
    model = ["--model", "convnet" if how == "code" else "mlp", "--max-steps", 3]
    ended = training.run("spawn", *model, ALTER=how, ALTER_RANK="1")
    assert ended.returncode == 2, ended.text
    (line,) = error_lines(ended)
    assert re.search(f"[Rr]ank [01] has [0-9 ]*{re.escape(message)}", line)
    assert not training.is_saved()


OUT_OF_STEP = """
import sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from utils.distributed import StopAgreement
from utils.errors import UserError
dist.init_process_group("gloo")
agreement = StopAgreement()
assert agreement.now(dist.get_rank()) == 1, "the largest of all ranks"
if dist.get_rank() == 1:
    dist.all_reduce(torch.ones(4, dtype=torch.int64))
else:
    try:
        agreement.now(0)
    except UserError as error:
        print(error)
"""


def test_calls_of_the_same_size_are_told_apart(tmp_path):
    text = OUT_OF_STEP.format(root=str(ROOT))
    (tmp_path / "out_of_step.py").write_text(text)
    result = run(*STANDALONE, 2, tmp_path / "out_of_step.py")
    assert result.stdout.count("the ranks are out of step") == 1, result.text


@pytest.mark.parametrize(
    ("how", "when", "rank", "processes"),
    [
        ("SIGSTOP", "group", 0, 2),
        pytest.param("SIGSTOP", "data", 1, 3, marks=SLOW),
        pytest.param("leave", "data", 1, 3, marks=SLOW),
        pytest.param("leave", "group", 0, 2, marks=SLOW),
    ],
)
def test_who_does_not_come_to_the_process_group_is_named(how, when, rank, processes, training):
    """Rank 0's store is that of the group: while it is stopped PyTorch waits without a limit."""
    extra = ["--model", "linear", "--rdzv-timeout", TIMEOUT]
    ended = fail(training, how, when, rank, *extra, processes=processes)
    assert f" lost rank {rank} (" in ended.text, ended.text
    healthy = [other for other in range(processes) if other != rank]
    assert not any(f"lost rank {other} (" in ended.text for other in healthy), ended.text
    assert "on all ports" not in ended.text, ended.text


@pytest.mark.slow
def test_a_signal_ends_the_waiting_for_the_process_group(training):
    """Nothing can interrupt that wait, which might last for --rdzv-timeout."""
    extra = ["--model", "linear", "--rdzv-timeout", 300]
    process, flag = start_altered(training, "SIGSTOP", "group", 1, *extra, technique="spawn")
    wait_until(flag.exists)
    process.terminate()
    said = ""
    while "rank 0 lost rank 1 (" not in said and process.poll() is None:
        said = process.stderr.readline()
    assert "still prepares its data" in said
    with suppress(ProcessLookupError):
        os.kill(int(flag.read_text()), signal.SIGKILL)
    finish(process, 120)


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=SLOW)])
def test_rank_0_does_not_write_the_results(how, training):
    """The others have nothing left to do, and nobody else would notice."""
    extra = ["--model", "linear", "--max-steps", 20, "--no-tensorboard", "--timeout", TIMEOUT]
    ended = fail(training, how, "results", 0, *extra)
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
