"""What goes wrong: the job ends soon, says why in one line, and what was saved is whole."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, finish, free_port, rank_pids, run, said_by_ranks, wait_until
from utils.errors import UserError

LONG = ["--model", "tests.user_code:network", "--epochs", 9999, "--save-every-steps", 2]
LONG += ["--no-tensorboard"]
FEW = ["--model", "linear", "--max-steps", 3, "--no-tensorboard"]
BROKE = "another rank has ended, or is stuck for --timeout seconds"


def test_a_misspelt_name_is_one_line_for_all_ranks(training):
    ended = training.run("ddp", *FEW, "--dataset", "my_dta:load")
    assert ended.status == 1
    assert said_by_ranks(ended) == [
        "train_ddp.py: error: --dataset my_dta:load: ModuleNotFoundError: No module named 'my_dta'"
    ]
    assert ended.stdout == ""


@pytest.mark.parametrize("log_every", [1, 50])
def test_what_is_not_finite_is_not_saved(log_every, in_process):
    """The loss is looked at when it is logged, and the weights before they are saved."""
    flags = ["--model", "mlp", "--no-tensorboard", "--save-every-steps", 2]
    training = in_process("run", *flags, "--max-steps", 4)
    more = ["--resume", "--lr", 1e9, "--max-grad-norm", 0, "--log-every", log_every]
    with pytest.raises(UserError, match="is not saved: choose a lower --lr"):
        in_process("run", *flags, *more)
    assert training.checkpoint["position"]["step"] >= 4
    assert all(value.isfinite().all() for value in training.checkpoint["model"].values())
    assert not (training.folder / "summary.json").exists()


def test_without_tensorboard_a_flag_helps(in_process, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="pip install tensorboard, or --no-tensorboard"):
        in_process("run", "--model", "linear")
    in_process("other", *FEW)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job(training):
    """torchrun's report says which it was, and how it ended."""
    ended = training.run("ddp", *LONG, FAULT="1:8:SIGKILL")
    assert ended.status == 1
    (line,) = said_by_ranks(ended)
    assert line.startswith("train_ddp.py: error: rank 0: ")
    assert BROKE in line
    assert "Signal 9 (SIGKILL) received by PID" in ended.stderr
    assert training.checkpoint["position"]["step"] == 6
    training.succeed("ddp", *LONG, "--max-steps", 8, "--resume")
    assert training.summary["resumed_from"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stalls_ends_the_job_after_the_timeout(rank, training):
    process = training.start("ddp", *LONG, "--timeout", 8, FAULT=f"{rank}:8:SIGSTOP")
    if rank == 0:  # rank 1 says nothing until torchrun has ended rank 0, which may take 30 s
        ended = finish(process, 100)
    else:
        first = process.stderr.readline()
        while process.poll() is None and "error: rank 0: " not in first:
            first = process.stderr.readline()
        os.kill(rank_pids()[1], signal.SIGKILL)
        ended = finish(process, 100)
        assert BROKE in first
    assert ended.status == 1
    assert training.checkpoint["position"]["step"] == 6
    assert len([line for line in said_by_ranks(ended) if "error" in line]) <= 1, ended.stderr


@pytest.mark.slow
def test_a_mistake_in_the_code_of_a_rank_has_its_traceback_alone(training):
    ended = training.run("ddp", *LONG, FAULT="1:8:wrong on purpose")
    assert ended.status == 1
    lines = said_by_ranks(ended)
    assert lines.count("Traceback (most recent call last):") == 1
    assert lines.count("ArithmeticError: wrong on purpose") == 1
    assert all(BROKE in line for line in lines if "error: rank 0" in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lr"], "rank 1 has --lr 1.2, rank 0 has 0.2: start every rank with the same command"),
        (["--dataset", "tests.user_code:other_labels"], "rank 1 has the labels of data set 0 "),
    ],
)
def test_ranks_that_differ_do_not_train(flags, words, training):
    port, processes = free_port(), []
    for rank in (0, 1):
        own = [*flags, f"{rank}.2"] if flags == ["--lr"] else flags
        processes.append(training.start_rank(rank, 2, port, *FEW, *own))
    for process in processes:
        ended = finish(process)
        (line,) = said_by_ranks(ended)
        assert ended.status == 2
        assert words in line
    assert not training.folder.exists()


@pytest.mark.slow
def test_an_error_in_a_loader_worker_says_where_it_was_raised(training):
    flags = ["--dataset", "tests.user_code:broken", "--batch-size", 10, "--num-workers", 1]
    ended = training.run("ddp", *FEW, *flags, "--max-steps", 9)
    assert ended.status == 1
    lines = [line for line in said_by_ranks(ended) if BROKE not in line]
    assert len(lines) == 1, ended.stderr
    assert "KeyError: 'no image 43' (" in lines[0]
    before, _, _ = (ROOT / "tests" / "user_code.py").read_text().partition("raise KeyError")
    number = 1 + before.count("\n")
    assert lines[0].endswith(f"tests/user_code.py, line {number}, in a loader worker)")


@pytest.mark.slow
def test_a_graph_that_leaves_parameters_unused(training):
    flags = [*FEW, "--model", "tests.user_code:Partial"]
    ended = training.run("ddp", *flags)
    assert ended.status == 1
    (line,) = said_by_ranks(ended)
    assert "did not receive grad" in line
    assert "pass --find-unused-parameters" in line
    training.succeed("ddp", *flags, "--find-unused-parameters", "--resume")


@pytest.fixture
def small_disk(training):
    """A disk that has room for one checkpoint of mlp and a half."""
    training.folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", training.folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, and the right to mount")
    yield training
    subprocess.run(["umount", "-l", training.folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_a_full_disk_costs_what_was_not_saved(technique, small_disk):
    flags = ["--model", "mlp", "--no-tensorboard", "--save-every-steps", 5]
    ended = small_disk.run(technique, *flags)
    assert ended.status == 1
    lines = [line for line in said_by_ranks(ended) if BROKE not in line]
    (line,) = lines
    assert line.endswith("checkpoints/last.pt: No space left on device")
    assert small_disk.checkpoint["position"]["step"] == 5
    subprocess.run(["mount", "-o", "remount,size=30m", small_disk.folder], check=True)
    small_disk.succeed(technique, *flags, "--resume")
    assert small_disk.summary["resumed_from"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["mnist", "tests.user_code:float_digits"])
def test_a_full_dev_shm_is_named(dataset, training):
    """As in a container, where it has 64 MB."""
    if run("unshare", "-m", "true").status:
        pytest.skip("needs root, and the right to mount")
    flags = [*FEW, "--num-workers", 1, "--dataset", dataset]
    command = " ".join(str(word) for word in training.command("single", *flags))
    words = f"mount -t tmpfs -o size=100k tmpfs /dev/shm && exec {command}"
    ended = run("unshare", "-m", "sh", "-c", words, timeout=60)
    (line,) = said_by_ranks(ended)
    assert ended.status == 1
    assert "No space left on device (28): give /dev/shm more room" in line


@pytest.mark.slow
def test_a_loader_worker_that_is_killed_ends_the_run(training):
    """If memory is short, the kernel kills one of them."""
    process = training.start("single", *LONG, "--num-workers", 1)
    wait_until((training.folder / "checkpoints" / "last.pt").exists, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    ended = finish(process)
    (line,) = said_by_ranks(ended)
    assert ended.status == 1
    assert "is the memory or /dev/shm full? Try --num-workers 0" in line
