"""Every way to start the scripts, and what a wrong one says."""

import socket
import sys

import pytest

from tests.processes import (
    Training,
    finish,
    free_port,
    run,
    said_by_ranks,
)

FEW = ["--model", "linear", "--max-steps", 3, "--no-tensorboard"]
STATIC = ["--nproc_per_node", 2, "--nnodes", 1, "--node_rank", 0, "--master_addr", "127.0.0.1"]


def error_line(ended, status=1):
    """Return the one line that the script has printed as its error."""
    assert ended.status == status, ended.text
    (line,) = {*said_by_ranks(ended)}  # torchrun's restarts repeat it
    return line


def test_train_ddp_alone_says_how_to_start_it():
    ended = run(sys.executable, "train_ddp.py")
    assert "start it with torchrun: torchrun --standalone" in error_line(ended, 2)


@pytest.mark.slow
def test_one_process_is_not_started_several_times(training):
    command = training.command("ddp", *FEW)
    command[command.index("train_ddp.py")] = "train_single.py"
    ended = run(*command)
    assert "a launcher started several: use train_ddp.py" in error_line(ended)
    assert not training.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.launch"],
        ["torch.distributed.launch", "--use_env"],
        ["torch.distributed.run"],
        ["torch.distributed.run", "--rdzv_backend", "c10d", "--rdzv_endpoint"],
    ],
    ids=["launch", "use_env", "static", "c10d"],
)
def test_every_launcher_of_pytorch(launcher, training):
    module, *flags = launcher
    port = free_port()
    if "c10d" in flags:
        where = ["--nproc_per_node", 2, *flags, f"127.0.0.1:{port}"]
    else:
        where = [*STATIC, "--master_port", port, *flags]
    script = training.command("ddp", *FEW)
    script = script[script.index("train_ddp.py") :]
    ended = run(sys.executable, "-m", module, *where, *script)
    assert ended.status == 0, ended.text
    assert training.summary["world_size"] == 2


@pytest.mark.slow
def test_ranks_that_are_started_by_hand(training):
    port = free_port()
    processes = [training.start_rank(rank, 2, port, *FEW) for rank in (1, 0)]
    assert [finish(process).status for process in processes] == [0, 0]
    assert training.summary["world_size"] == 2


@pytest.mark.slow
def test_a_rank_that_never_comes(training):
    """Rank 0 says how many came, and rank 1 does not wait longer than --timeout either."""
    port = free_port()
    processes = [training.start_rank(rank, 3, port, *FEW, "--timeout", 8) for rank in (0, 1)]
    first, second = (finish(process, 60) for process in processes)
    assert "2/3 clients joined" in error_line(first)
    for ended in (first, second):
        assert "was each rank started, with its own RANK and the same" in error_line(ended)


@pytest.mark.slow
def test_a_port_that_is_taken(training):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ended = finish(training.start_rank(0, 2, other.getsockname()[1], *FEW), 60)
    assert "another program uses this port: choose another MASTER_PORT" in error_line(ended)


@pytest.mark.slow
def test_a_main_process_that_is_not_there(training):
    ended = finish(training.start_rank(1, 2, free_port(), *FEW, "--timeout", 6), 60)
    assert "does rank 0 run at this MASTER_ADDR and MASTER_PORT?" in error_line(ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "variables", "flags", "words"),
    [
        ([], {}, [], "needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun"),
        ([], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, ["--run-dir="], "needs --run-dir"),
    ],
    ids=["store", "run-dir"],
)
def test_restarts_are_refused_if_they_cannot_work(launcher, variables, flags, words, training):
    ended = training.run(
        "ddp", *FEW, *flags, launcher=["--max-restarts", 1, *launcher], **variables
    )
    assert words in error_line(ended)
    assert not training.folder.exists()


@pytest.mark.slow
def test_a_restart_without_a_save_begins_again(digits_dir, tmp_path):
    training = Training(digits_dir, tmp_path / "run")
    flags = ["--model", "tests.user_code:network", "--max-steps", 5, "--no-tensorboard"]
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "FAULT": "0:2:SIGKILL"}
    ended = training.succeed("ddp", *flags, launcher=["--max-restarts", 1], **variables)
    assert "holds no checkpoint yet, so the run begins at step 0" in ended.stderr
    assert training.summary["global_step"] == 5
