"""What the lessons share: ranks as real processes, a time limit, and checked claims."""

import argparse
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

# Seconds. A lesson takes five to fifteen. On a busy machine it takes longer, and none may hang.
TIME_LIMIT = 120.0
ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "scripts/check/findings.txt"
sys.path.insert(0, str(ROOT))  # for lessons that import the project's modules
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the ranks inherit it: no C++ stacks
# Ranks are forks of a server that has imported torch already, so they start in milliseconds.
context = multiprocessing.get_context("forkserver")


@dataclass
class Outcome:
    """How a rank ended: the value that its function returned, or the first line of its error."""

    rank: int
    value: Any = None
    error: str = ""


def start(main: Callable[[], dict[str, bool]], ask: str = "") -> None:
    """Run a lesson, print its claims, and exit with 0 if its run showed all of them, else with 1.

    With ``--predict`` ask a question first, and wait for the reader's answer. In the end name the
    findings of scripts/check/check.py that the lesson explains.

    Args:
        main: returns each claim, and whether the run showed it.
        ask: what a reader may guess before a lesson makes its mistake.
    """
    lesson = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=lesson.__doc__)
    parser.add_argument("--predict", action="store_true", help="guess first, in a break_ lesson")
    args = parser.parse_args()
    # DDP's constructor imports torch._dynamo, which takes seconds: once here, not in every rank.
    wraps = hasattr(lesson, "DistributedDataParallel")
    context.set_forkserver_preload(["torch._dynamo" if wraps else "torch"])
    try:
        guess = input(f"{ask}\nYour guess, then Enter: ") if args.predict and ask else ""
        _setup_process()
        claims = main()
    except (KeyboardInterrupt, EOFError):
        sys.exit(130)
    print()
    for claim, shown in claims.items():
        print(f"{'shown' if shown else 'NOT SHOWN'}: {claim}")
    # level | finding | lesson | what to do
    rows = (line.split(" | ") for line in FINDINGS.read_text().splitlines())
    if found := [row[1] for row in rows if row[2:3] == [Path(str(lesson.__file__)).stem]]:
        print(f"scripts/check/check.py says {found} where a script of your own gets this wrong.")
    if guess:
        print(f"\nyour guess was: {guess}")
    sys.exit(0 if claims and all(claims.values()) else 1)


def error_of(call: Callable[[], Any]) -> str:
    """Return what a traceback ends with if the call raises an error, else nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def count_sends(model: DistributedDataParallel) -> list[int]:
    """Return a list to which DDP adds a 1 for each bucket of gradients that it sends."""
    sent: list[int] = []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(1)
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]

    model.register_comm_hook(None, count)
    return sent


def run_ranks(
    work: Callable[..., Any], world_size: int, *args: Any, timeout: float | None = 30.0
) -> list[Outcome]:
    """Call ``work(rank, world_size, *args)`` in ``world_size`` processes; return how each ended.

    All begin together. A collective waits for ``timeout`` seconds. If it is None, there is no
    process group.
    """
    outcomes, started = [], []
    barrier = context.Barrier(world_size, timeout=TIME_LIMIT)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world_size):
            pipe, theirs = context.Pipe(duplex=False)
            arguments = (theirs, barrier, folder, timeout, work, rank, world_size, *args)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            started.append((process, pipe))
        for rank, (process, pipe) in enumerate(started):
            try:
                outcomes.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                process.join(timeout=5)
                outcomes.append(Outcome(rank, error=f"the process died ({process.exitcode})"))
        for process, _ in started:
            process.join(timeout=5)
            process.kill()
    return outcomes


def values(work: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Do the same with ranks that must not fail; return what each returned."""
    outcomes = run_ranks(work, world_size, *args)
    assert not any(outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def show(
    told: str, work: Callable[..., Any], case: str, ranks: int = 2, timeout: float = 30.0
) -> list[Outcome]:
    """Call ``work(rank, world_size, case)``, and print its value (as in ``told``) or its error."""
    outcomes = run_ranks(work, ranks, case, timeout=timeout)
    print(f"{case}:")
    for outcome in outcomes:
        print(f"  rank {outcome.rank}: {outcome.error[:180] or told.format(outcome.value)}")
    return outcomes


def _setup_process() -> None:
    """Bound this process's time, and give it one thread, so that ranks can share the cores."""
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    torch.set_num_threads(1)


def _rank(
    pipe: Any, barrier: Any, folder: str, timeout: float | None, work: Any, *args: Any
) -> None:
    _setup_process()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all: a rank ends silently
    rank, size = args[:2]
    # A lesson may set a short timeout, which must not include the time to start up.
    barrier.wait()
    if timeout is not None:
        store, limit = dist.FileStore(f"{folder}/store", size), timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        # A rank with little work must not leave before the others have their connections.
        barrier.wait()
    values: list[Any] = [None]
    error = error_of(lambda: values.append(work(*args)))
    # As bytes: a tensor itself would be sent as shared memory, which ends with this process.
    pipe.send_bytes(pickle.dumps(Outcome(rank, values[-1], error.partition("\n")[0])))
    if dist.is_initialized():
        dist.destroy_process_group()
