"""What the tests of single functions share: parsed flags, and functions in forked processes."""

import multiprocessing
import os
import signal
import sys
import tempfile
from datetime import timedelta
from unittest import mock

import torch.distributed as dist

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
        handler = signal.getsignal(signal.SIGTERM)
        try:
            return parse_args(technique, "A description.")
        finally:
            signal.signal(signal.SIGTERM, handler)  # the report of an error sets another


def fork(function, *args):
    """Start a function in a process of its own."""
    process = FORK.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def ended(process, timeout=60):
    """Return the exit status of a forked process, which has to end within ``timeout`` seconds."""
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"still running after {timeout} s")
    return process.exitcode


def on_ranks(function, world_size=2, timeout=30.0):
    """Return what ``function(rank)`` returns, or raises, on each rank of a group over gloo."""
    pipes = [FORK.Pipe() for _ in range(world_size)]
    with tempfile.NamedTemporaryFile() as store:

        def run(rank):
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store.name}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
            )
            try:
                result = function(rank)
            except Exception as error:
                result = error
            pipes[rank][1].send(result)

        for process in [fork(run, rank) for rank in range(world_size)]:
            ended(process)
    return [receive.recv() if receive.poll() else None for receive, _ in pipes]
