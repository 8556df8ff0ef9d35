"""What a rank tells the launcher: events, its own findings, each collective before it begins.

The launcher answers a collective once all ranks have announced theirs. So a rank that calls another
one, or none, is seen at once, without a timeout.
"""

import contextlib
import functools
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

# Loaded once for all scripts, and before the check replaces any function.
for _name in ("torch._dynamo", "torch.distributed.optim", "torch.distributed.fsdp", "torchvision"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)


class Nested:
    """Counts the blocks of one kind that are under way."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


class State:
    """This process among the ranks. There is one script in a process, so there is one state."""

    connection: Any = None
    rank, world, nodes = 0, 2, 1
    each, node = 2, 0  # ranks of each host, and the host of this one
    root = "no script yet"  # the copy in which the script runs
    mode = "torchrun"  # or "spawn"
    is_parent = False  # before mp.spawn has started the ranks
    clock = 0  # collectives that this rank has completed
    locks = 0  # of files, which this rank holds: no other rank is there at the same time
    cut = False  # the launcher wants an end at the next optimizer step
    groups = 0


state = State()
quietly = Nested()  # inside a collective, whose own collectives are not announced
at_the_end: list[Callable[[], None]] = []
_lock = threading.RLock()
exit_now = os._exit


def around(*owners: Any, name: str = "") -> Any:
    """Put a function around the one of its name in each owner. It gets that one first."""

    def replace(new: Any) -> Any:
        real = getattr(owners[0], name or new.__name__)

        @functools.wraps(real)
        def function(*args: Any, **keywords: Any) -> Any:
            return new(real, *args, **keywords)

        for owner in owners:
            setattr(owner, name or new.__name__, function)
        return function

    return replace


def arguments(real: Any, *args: Any, **keywords: Any) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    return inspect.signature(real).bind(*args, **keywords).arguments


def frames() -> Iterator[str]:
    """Yield file and line of the script's own frames, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(state.root):
            name = os.path.relpath(frame.f_code.co_filename, state.root)
            yield f"{name}:{frame.f_lineno}"
        frame = frame.f_back


def called_by_script() -> bool:
    """Whether the script itself called the replaced function that asks, not a library."""
    return sys._getframe(3).f_code.co_filename.startswith(state.root)


def tell(kind: str, **facts: Any) -> None:
    """Send an event. A kind of findings.txt is a finding: with ``same`` if two ranks share that."""
    if state.is_parent and "same" in facts:
        return
    clock = state.clock + (state.rank + 1) / 100 if state.locks else state.clock
    event = {"kind": kind, "rank": state.rank, "clock": clock, "line": next(frames(), "")}
    with _lock:
        state.connection.send(event | facts)


def call(name: str, ranks: list[int] | None = None, /, **facts: Any) -> None:
    """Announce a collective, and wait until all its ranks have announced theirs."""
    what = f"{name}({', '.join(f'{key}={value}' for key, value in facts.items())})"
    with _lock:
        tell("call", what=what, facts=facts, ranks=ranks or list(range(state.world)))
        answer = state.connection.recv()
    if answer == "stop":
        leave("stopped")
    state.clock += 1
    state.cut = state.cut or answer == "cut"


def leave(how: str, **facts: Any) -> NoReturn:
    """End this process. No exception, since the script could catch it."""
    for finish in at_the_end:
        finish()
    tell("end", how=how, **facts)
    with contextlib.suppress(Exception):  # the script may have replaced it
        sys.stdout.flush()
    exit_now(0)


def again(ranks: int, mode: str) -> NoReturn:
    """Leave, since the script wants other processes than it was given."""
    told = f"it starts {ranks} processes: give it arguments with which it starts {state.world}"
    leave("again", wants=(ranks, mode), message=f"{told}, or give --ranks")
