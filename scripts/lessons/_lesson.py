"""What the lessons share: the question, a guess, ranks as processes, a time limit, and the claim.

The docstring of a lesson is the question, its setting, the possible answers, and then what explains
the answer.
"""

import argparse
import importlib
import os
import pickle
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# The lessons need no GPU. With one, a rank that is forked after a backward could compute no other.
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("LESSON_GPUS", "")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints when it starts

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# What to print at the end to a user who has guessed.
_verdict = ""
# Seconds for the ranks. They need two to ten; a busy machine needs more, and nothing may hang.
TIME_LIMIT = 60


def start(doc: str | None, answer: str) -> None:
    """Begin a lesson: print the question, and with ``--predict`` ask for a guess.

    Args:
        doc: the lesson's docstring, with possible answers in lines that begin with a), b) and c).
        answer: the letter of the right one.
    """
    global _verdict
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true", help="guess the answer first")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends all processes, without a traceback
    torch.set_num_threads(1)  # so that the ranks can share the cores
    # DDP's constructor imports this, which takes seconds: once here, not in every rank.
    if hasattr(sys.modules["__main__"], "DistributedDataParallel"):
        importlib.import_module("torch._dynamo")
    question, *paragraphs = (doc or "").split("\n\n")
    print(question + "\n")
    if args.predict:
        for paragraph in paragraphs:
            print(paragraph + "\n")
            if paragraph.startswith("a) "):
                break
        guess = input("Your guess (a letter): ").strip()[:1].lower()
        is_right = "right" if guess == answer else "wrong"
        choices = [line for line in paragraph.splitlines() if line.startswith(f"{answer}) ")]
        _verdict = f"Your guess, {guess}), was {is_right}. The answer is {choices[0]}"
        print()


def claim(text: str) -> None:
    """End a lesson with what its asserts have shown, and with whether the guess was right."""
    print(f"\nShown: {text}")
    if _verdict:
        print(_verdict)


def run(
    work: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float | None = 30.0,
    may_fail: bool = False,
) -> list[Any]:
    """Call ``work(rank, world_size, *args)`` in ``world_size`` processes; return their results.

    Args:
        timeout: seconds that a collective waits. None for processes without a process group.
        may_fail: return the error of a rank as a string, instead of raising it.
    """
    context = mp.get_context("fork")  # the ranks need not import torch again
    barrier = context.Barrier(world_size)
    results = []
    started = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            pipe, theirs = context.Pipe(duplex=False)
            arguments = (theirs, barrier, folder, timeout, work, rank, world_size, *args)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((process, pipe))
        for rank, (process, pipe) in enumerate(started):
            if not pipe.poll(TIME_LIMIT):  # the ranks are daemons: they end with this process
                raise TimeoutError(f"rank {rank} gave no answer within {TIME_LIMIT} s")
            try:
                result, error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                process.join()
                result = None
                said = Path(folder, f"stderr{rank}").read_text().strip()
                error = f"the process ended with status {process.exitcode}. {said}"
            if error and not may_fail:
                raise RuntimeError(error)
            results.append(error or result)
        for process, _ in started:
            process.join(5)
            process.kill()  # after an error the end of the process group may wait for a lost rank
    return results


def error_of(call: Callable[[], Any]) -> str:
    """Return the type of the error that a call raises and the last line of what it says."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1].strip()}"
    return ""


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _rank(
    pipe: Any, barrier: Any, folder: str, timeout: float | None, work: Any, *args: Any
) -> None:
    rank, world_size = args[:2]
    result = None
    error = ""
    # C++ prints why it aborts a process. The lesson shows it where it belongs.
    with open(f"{folder}/stderr{rank}", "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    barrier.wait()  # a short timeout must not include the time to start
    try:
        if timeout is not None:
            limit = timedelta(seconds=timeout)
            dist.init_process_group("gloo", f"file://{folder}/store", limit, world_size, rank)
            barrier.wait()  # no rank leaves before the others have their connections
        result = work(*args)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    # As bytes: a tensor itself would be sent as shared memory, which ends with this process.
    pipe.send_bytes(pickle.dumps((result, error)))
    if dist.is_initialized():
        dist.destroy_process_group()
