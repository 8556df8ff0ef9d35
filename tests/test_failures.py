"""A rank that fails: the job ends soon, and names that rank instead of a healthy one."""

import json
import os
import signal
import sys
import time

import pytest
import torch.distributed as dist

from tests.processes import ROOT, finish, flags, run, start
from tests.test_launch import error_lines
from utils.cluster.failures import ADVICE, Job, LostRank
from utils.cluster.meeting import Meeting, Member
from utils.errors import UsageError

TIMEOUT = 5  # of a collective, seconds
SOON = 15  # after a rank went wrong the others name it; the machine is busy
UNKNOWN = ADVICE[True, True]
SLOW = pytest.mark.slow
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def fail(how, when, rank, processes, folder, *words):
    """Let one rank go wrong; return what came of it, and when it went wrong."""
    flag, faulty, said = folder / "flag", ROOT / "tests" / "faulty.py", ""
    command = [*TORCHRUN, "--nproc_per_node", processes, faulty, *words]
    if "--nprocs" in words:
        command = [faulty, *words]
    variables = {"FAULT": how, "FAULT_RANK": str(rank), "FAULT_STEP": str(when)}
    variables["FAULT_FLAG"] = str(flag)
    process = start(sys.executable, *command, "--threads", 1, **variables)
    if how == "stall":
        while process.poll() is None and ".py: error: " not in said:
            said += process.stderr.readline()
        assert time.time() - flag.stat().st_mtime < SOON, said
        os.kill(int(flag.read_text()), signal.SIGKILL)  # launchers wait half a minute for it
    ended = finish(process, 60)
    ended.stderr = said + ended.stderr
    assert ended.returncode == 1, ended.text
    assert "Exception raised from" not in ended.text, "C++ frames"
    return ended, flag.stat().st_mtime


def in_training(data_dir, folder):
    extra = ["--model", "mlp", "--max-steps", 400, "--save-every-steps", 2, "--timeout", TIMEOUT]
    return flags(data_dir, folder / "run", *extra)


def check_status(folder, rank, begin, words, step=7):
    """Rank 0 has written soon who is lost. What takes longer is the launcher's end."""
    path = folder / "run" / "status.json"
    told = json.loads(path.read_text())
    assert (told["state"], told["ranks"]) == ("failed", [rank]), told
    assert f"rank 0 lost rank {rank} (" in told["reason"], told
    assert f" at step {step}: " in told["reason"], told
    assert words in told["reason"], told
    assert path.stat().st_mtime - begin < SOON


@pytest.mark.parametrize(
    ("how", "rank", "processes", "cause"),
    [
        ("stall", 1, 2, UNKNOWN),
        ("raise", 1, 2, "ArithmeticError: wrong on purpose"),
        pytest.param("leave while one computes", 1, 3, UNKNOWN, marks=SLOW),
        pytest.param("kill", 1, 3, UNKNOWN, marks=SLOW),
        pytest.param("stall", 0, 3, UNKNOWN, marks=SLOW),
        pytest.param("kill", 0, 2, UNKNOWN, marks=SLOW),
        pytest.param("nan", 1, 2, "the loss is nan at step 8 on rank 1", marks=SLOW),
    ],
)
def test_the_rank_that_failed_is_named(how, rank, processes, cause, synthetic_dir, tmp_path):
    words = in_training(synthetic_dir, tmp_path)
    ended, begin = fail(how, 7, rank, processes, tmp_path, *words)
    healthy = [other for other in range(processes) if other != rank]
    assert not any(f"lost rank {other} (" in ended.text for other in healthy), ended.text
    if how not in ("raise", "nan"):  # these say it themselves, and torchrun ends the others
        assert ended.text.count(f"lost rank {rank} (") == 1, ended.text
    if rank:
        check_status(tmp_path, rank, begin, cause, 8 if how == "nan" else 7)
    assert cause in ended.text, ended.text
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()


@pytest.mark.parametrize("how", ["kill", pytest.param("stall", marks=SLOW)])
def test_without_a_launcher_too(how, synthetic_dir, tmp_path):
    words = [*in_training(synthetic_dir, tmp_path), "--nprocs", 2]
    ended, begin = fail(how, 7, 1, 2, tmp_path, *words)
    check_status(tmp_path, 1, begin, UNKNOWN)
    first, *others = error_lines(ended)
    assert "rank 0 lost rank 1 (" in first
    assert all("rank 1 (pid " in line and "killed by SIGKILL" in line for line in others), others
    assert len(others) == 1 or (how, others) == ("stall", [])  # which is killed in the end


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("frozen", "1.weight: float32 (256, 784), frozen, rank 0 float32 (256, 784)"),
        ("batches", "training data: "),
    ],
)
def test_ranks_that_differ_are_named_before_the_first_step(how, message, synthetic_dir, tmp_path):
    """Otherwise the first would hang in its last batch; the others compute nonsense or crash."""
    words = flags(synthetic_dir, tmp_path / "run", "--model", "mlp", "--nprocs", 2)
    fault = {"FAULT": how, "FAULT_RANK": "1", "FAULT_STEP": "never"}
    ended = run(sys.executable, ROOT / "tests" / "faulty.py", *words, **fault)
    assert ended.returncode == 2, ended.text
    (line,) = error_lines(ended)
    assert f"rank 1 has {message}" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


OUT_OF_STEP = """
import sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from utils.distributed import AgreedMax, OutOfStep
from utils.metrics import Metrics
dist.init_process_group("gloo")
metrics = Metrics(torch.device("cpu"), [1.0, 2.0, 3.0])
assert metrics.sum_over_ranks().sums.tolist() == [2.0, 4.0, 6.0]
agreed = AgreedMax()
assert [agreed(dist.get_rank()), agreed(0)] == [0, 1]
if dist.get_rank() == 1:
    dist.all_reduce(torch.ones({size}, dtype=torch.{dtype}))
else:
    try:
        {call}
    except OutOfStep as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("call", "size", "dtype"),
    [("metrics.sum_over_ranks()", 4, "float64"), ("agreed(0); agreed(0)", 3, "int64")],
)
def test_calls_of_the_same_size_are_told_apart(call, size, dtype, tmp_path):
    text = OUT_OF_STEP.format(call=call, size=size, dtype=dtype, root=str(ROOT))
    (tmp_path / "out_of_step.py").write_text(text)
    result = run(sys.executable, *TORCHRUN, "--nproc_per_node", 2, tmp_path / "out_of_step.py")
    assert result.stdout.count("the ranks are out of step") == 1, result.text


@pytest.mark.parametrize(
    ("how", "when", "rank", "processes"),
    [
        ("stall", "data", 1, 2),
        ("stall", "group", 0, 2),
        pytest.param("stall", "data", 0, 3, marks=SLOW),
        pytest.param("leave", "data", 1, 3, marks=SLOW),
        pytest.param("leave", "group", 0, 2, marks=SLOW),
    ],
)
def test_who_does_not_come_to_the_process_group_is_named(
    how, when, rank, processes, synthetic_dir, tmp_path
):
    """Rank 0's store is that of the group: while it is stopped PyTorch waits without a limit."""
    words = flags(synthetic_dir, tmp_path / "run", "--model", "linear", "--rdzv-timeout", 6)
    ended, _ = fail(how, when, rank, processes, tmp_path, *words)
    assert f" lost rank {rank} (" in ended.text, ended.text
    healthy = [other for other in range(processes) if other != rank]
    assert not any(f"lost rank {other} (" in ended.text for other in healthy), ended.text
    assert "on all ports" not in ended.text, ended.text


@pytest.mark.parametrize("how", ["stall", pytest.param("kill", marks=SLOW)])
def test_rank_0_does_not_write_the_results(how, synthetic_dir, tmp_path):
    """The others have nothing left to do, and nobody else would notice."""
    extra = ["--model", "linear", "--max-steps", 20, "--timeout", TIMEOUT]
    words = flags(synthetic_dir, tmp_path / "run", *extra)
    ended, _ = fail(how, "results", 0, 2, tmp_path, *words)
    assert "rank 1 lost rank 0 (" in ended.text
    assert not (tmp_path / "run" / "summary.json").exists()


def a_job():
    main = Member(0)
    meeting = Meeting(Member(1), 2, main)
    meeting.store.set("lost", json.dumps([[0], f"rank {main}", ""]))
    return Job(meeting, 1.0)


def test_what_nccl_says_is_recognised(monkeypatch):
    """NCCL's errors may be plain RuntimeErrors. Its own line about shared GPUs gets an advice."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    lost = a_job().explain(RuntimeError("NCCL communicator was aborted on rank 1."), 3)
    assert isinstance(lost, LostRank)
    assert lost.ranks == [0]
    assert "rank 1 lost rank 0 (" in str(lost)
    assert "at step 3" in str(lost)
    text = "ncclInvalidUsage\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 6000\n"
    shared = a_job().explain(dist.DistBackendError(text))
    assert isinstance(shared, UsageError)
    assert "rank 1 and rank 0 both on CUDA device 6000): start one process for each" in str(shared)


def test_an_error_is_explained_once(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    job = a_job()
    once = job.explain(RuntimeError("Application timeout caused pair closure"), 87)
    assert "at step 87" in str(once)
    assert job.explain(once) is once
    bug = ArithmeticError("wrong")
    assert job.explain(bug) is bug
