"""What the tests of single functions share: parsed flags, and functions in forked processes."""

import importlib
import multiprocessing
import os
import sys
from unittest import mock

import torch.distributed as dist

from tests.processes import LIMIT, free_port
from utils.cli import parse_args

FORK = multiprocessing.get_context("fork")  # quick, because torch is loaded already


def parse(*flags, technique="single", without=(), **environment):
    """Return the flags of a script, parsed as if a launcher had started it as one process.

    ``environment`` adds to the variables of the launcher, and ``without`` removes some of them.
    """
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"} | environment
    argv = [f"train_{technique}.py", *map(str, flags)]
    with mock.patch.object(sys, "argv", argv), mock.patch.dict(os.environ, launched):
        for name in without:
            del os.environ[name]
        return parse_args(technique, "A description.")


def train_of(text):
    """Return the function ``train`` of the changed text of train_ddp.py."""
    variables = {"__name__": "changed"}
    exec(compile(text, "train_ddp.py", "exec"), variables)
    return variables["train"]


def fork(function, *args):
    """Start a function in a process of its own, which ``ended`` waits for."""
    process = FORK.Process(target=function, args=args)
    process.start()
    return process


def ended(*processes, timeout=LIMIT):
    """Return the exit status of each process. One that is still running is killed."""
    try:
        for process in processes:
            process.join(timeout)
            assert process.exitcode is not None, f"still running after {timeout} s"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def fork_ranks(function, world_size):
    """Start ``function(rank)`` for each rank, in processes with the variables of a launcher."""
    importlib.import_module("torch._dynamo")  # by DDP, which would need seconds on each rank
    variables = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}

    def run(rank):
        own = variables | {"RANK": rank, "LOCAL_RANK": rank}
        os.environ |= {name: str(value) for name, value in own.items()}
        function(rank)

    return [fork(run, rank) for rank in range(world_size)]


def on_ranks(function, world_size=2):
    """Return what ``function(rank)`` returns, or raises, in a forked process for each rank."""
    pipes = [FORK.Pipe() for _ in range(world_size)]

    def call(rank):
        try:
            result = function(rank)
        except Exception as error:
            result = error
        pipes[rank][1].send(result)

    ended(*fork_ranks(call, world_size))
    return [receive.recv() if receive.poll() else None for receive, _ in pipes]


def in_group(function, world_size=2):
    """Like ``on_ranks``, for a function that needs a process group."""

    def connect_and_call(rank):
        dist.init_process_group("gloo")
        return function(rank)

    return on_ranks(connect_and_call, world_size)
