"""What a rank tells the launcher: events, and each collective before it begins.

The launcher answers a collective once all ranks have announced theirs. So a rank that calls another
one, or none, is seen at once, without a timeout.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn


class State:
    """This process among the ranks. There is one script in a process, so there is one state."""

    connection: Any = None
    rank, world, nodes = 0, 2, 1
    root = ""  # of the copy in which the script runs
    mode = "torchrun"  # or "spawn"
    is_parent = False  # before mp.spawn has started the ranks
    clock = 0  # collectives that this rank has completed
    cut = False  # the launcher wants an end at the next optimizer step
    quiet = 0  # inside a collective, whose own collectives are not announced
    groups = 0
    at_the_end: Callable[[], None] | None = None


state = State()
_lock = threading.RLock()
_exit = os._exit
_seen: set[Any] = set()


def frames() -> Iterator[str]:
    """Yield file and line of the script's own frames, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(state.root):
            name = os.path.relpath(frame.f_code.co_filename, state.root)
            yield f"{name}:{frame.f_lineno}"
        frame = frame.f_back


def line() -> str:
    return next(frames(), "")


def called_by_script() -> bool:
    """Whether the function that asks was called directly by the script, not by a library."""
    return sys._getframe(2).f_code.co_filename.startswith(state.root)


def emit(kind: str, **facts: Any) -> None:
    event = {"kind": kind, "rank": state.rank, "clock": state.clock, "line": line(), **facts}
    with _lock:
        state.connection.send(("event", event))


def emit_once(kind: str, key: Any = None, **facts: Any) -> None:
    if (kind, key) not in _seen:
        _seen.add((kind, key))
        emit(kind, **facts)


def left_out(what: str) -> None:
    emit_once("left out", what, what=what)


def call(name: str, ranks: list[int] | None = None, **signature: Any) -> None:
    """Announce a collective, and wait until all its ranks have announced theirs."""
    with _lock:
        ranks = list(range(state.world)) if ranks is None else ranks
        state.connection.send(("call", name, tuple(ranks), signature, line()))
        answer = state.connection.recv()
    if answer == "stop":
        leave("stopped")
    state.clock += 1
    state.cut = state.cut or answer == "cut"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    state.quiet += 1
    try:
        yield
    finally:
        state.quiet -= 1


def leave(how: str, **facts: Any) -> NoReturn:
    """End this process. No exception, since the script could catch it."""
    if state.at_the_end:
        state.at_the_end()
    emit("end", how=how, **facts)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    _exit(0)
