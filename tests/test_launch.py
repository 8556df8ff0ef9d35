"""The ways to start train_ddp.py, and what a wrong one says. test_failures.py has torchrun's."""

import socket
import sys

import pytest

from tests.processes import finish, free_port, run, said_by_ranks

FEW = ["--model", "linear", "--max-steps", 3, "--no-tensorboard"]
STATIC = ["--nnodes", 1, "--node_rank", 0, "--master_addr", "127.0.0.1"]
C10D = ["--nnodes", "1:2", "--rdzv_backend", "c10d", "--rdzv_conf", "last_call_timeout=1"]

pytestmark = pytest.mark.slow


def error_line(ended):
    """Return the one line that the script has printed as its error."""
    assert ended.status == 1, ended.text
    (line,) = said_by_ranks(ended)
    return line


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("launch", STATIC),  # passes --local-rank to the script
        ("launch", [*STATIC, "--use_env"]),
        ("run", STATIC),
        ("run", C10D),
    ],
    ids=["launch", "launch --use_env", "static", "elastic"],
)
def test_other_launchers_of_pytorch(module, words, training):
    port = ["--master_port", free_port()]
    if words is C10D:
        port = ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    launcher = [sys.executable, "-m", f"torch.distributed.{module}", *words, *port]
    ended = run(*launcher, "--nproc_per_node", 2, *training.arguments("ddp", *FEW))
    assert ended.status == 0, ended.text
    assert training.summary["world_size"] == 2


def test_ranks_that_are_started_by_hand(training):
    port = free_port()
    processes = [training.start_rank(rank, 2, port, *FEW) for rank in (1, 0)]
    assert [finish(process).status for process in processes] == [0, 0]
    assert training.summary["world_size"] == 2


def test_a_rank_that_never_comes(training):
    """Rank 0 says how many came, and rank 1 does not wait longer than --timeout either."""
    port = free_port()
    processes = [training.start_rank(rank, 3, port, *FEW, "--timeout", 8) for rank in (0, 1)]
    first, second = map(finish, processes)
    assert "2/3 clients joined" in error_line(first)
    for ended in (first, second):
        assert "was each rank started, with its own RANK and the same" in error_line(ended)


def test_a_port_that_is_taken_and_a_main_process_that_is_not_there(training):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = training.start_rank(0, 2, other.getsockname()[1], *FEW)
        alone = training.start_rank(1, 2, free_port(), *FEW, "--timeout", 6)
        ended = finish(taken)
    assert "another program uses this port: choose another MASTER_PORT" in error_line(ended)
    ended = finish(alone)
    assert "does rank 0 run at this MASTER_ADDR and MASTER_PORT?" in error_line(ended)
