"""The ways to start train_ddp.py, and what a wrong one says. test_failures.py has torchrun's."""

import socket
import sys

import pytest

from tests.processes import error_line, finish, free_port, succeed

FEW = ["--model", "linear", "--max-steps", 3, "--no-tensorboard"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("module", ["launch", "run"])
def test_the_launchers_of_pytorch_train(module, training):
    """torch.distributed.launch passes --local-rank to the script, and the other one is elastic."""
    where = f"--master_addr 127.0.0.1 --master_port {free_port()}"
    if module == "run":
        where = f"--nnodes 1:2 --rdzv_backend c10d --rdzv_endpoint 127.0.0.1:{free_port()}"
        where += " --rdzv_conf last_call_timeout=1"
    launcher = [sys.executable, "-m", f"torch.distributed.{module}", *where.split()]
    succeed(*launcher, "--nproc_per_node", 2, *training.arguments("ddp", *FEW))
    assert training.summary["world_size"] == 2


def test_a_rank_that_never_comes_is_missed_in_one_line(training):
    """Rank 0 says how many came, and rank 1 does not wait longer than --timeout either."""
    port = free_port()
    processes = [training.start_rank(rank, 3, port, *FEW, "--timeout", 20) for rank in (0, 1)]
    first, second = map(finish, processes)
    assert "2/3 clients joined" in error_line(first)
    for ended in (first, second):
        assert "was each rank started, with its own RANK and the same" in error_line(ended)


def test_a_port_that_is_taken_and_a_main_process_that_is_not_there_are_named(training):
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = training.start_rank(0, 2, other.getsockname()[1], *FEW)
        alone = training.start_rank(1, 2, free_port(), *FEW, "--timeout", 6)
        ended = finish(taken)
    assert "another program uses this port: choose another MASTER_PORT" in error_line(ended)
    ended = finish(alone)
    assert "does rank 0 run at this MASTER_ADDR and MASTER_PORT?" in error_line(ended)
