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
    process = 0  # the number of this process: children that it forks are no ranks
    rank, world, nodes = 0, 2, 1
    each, node = 2, 0  # ranks of each host, and the host of this one
    root = "no script yet"  # the copy in which the script runs
    mode = "torchrun"  # or another launcher, or "spawn"
    is_parent = False  # before mp.spawn has started the ranks
    clock = 0  # collectives that this rank has completed
    began = 0.0  # the time at which the script began
    slept = -1  # the clock at which the script slept last, as in a loop that waits for a file
    cut = False  # the launcher wants an end at the next optimizer step
    groups = 0
    steps = 0  # of optimizers


state = State()
in_collective = Nested()  # whose own collectives are not announced
optimizers: dict[int, Any] = {}  # which have made a step
at_the_end: list[Callable[[], None]] = []
locks: dict[int, tuple[int, int]] = {}  # of files, by their descriptors: the files' identities
_lock = threading.RLock()
exit_now = os._exit


def replaces(*owners: Any, name: str = "") -> Any:
    """Replace the function of this name in each owner. The new one gets the old one first."""

    def replace(new: Any) -> Any:
        real = getattr(owners[0], name or new.__name__)

        @functools.wraps(real)
        def function(*args: Any, **keywords: Any) -> Any:
            return new(real, *args, **keywords)

        for owner in owners:
            setattr(owner, name or new.__name__, function)
        return function

    return replace


def by_name(real: Any, *args: Any, **keywords: Any) -> dict[str, Any]:
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


def is_locked() -> bool:
    """Whether this rank holds a lock of a file. Closing the file has released it."""
    for descriptor, identity in list(locks.items()):
        try:
            found = os.fstat(descriptor)
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != identity:
            del locks[descriptor]
    return bool(locks)


def tell(kind: str, **facts: Any) -> None:
    """Send an event. A kind of findings.txt is a finding: with ``same`` if two ranks share that."""
    if os.getpid() != state.process or (state.is_parent and "same" in facts):
        return
    # Under a lock no other rank is there at the same time.
    clock = state.clock + (state.rank + 1) / 100 if is_locked() else state.clock
    event = {"kind": kind, "rank": state.rank, "node": state.node, "clock": clock}
    event["line"] = next(frames(), "")
    with _lock:
        state.connection.send(event | facts)


def call(name: str, ranks: list[int] | None = None, /, **facts: Any) -> None:
    """Announce a collective, and wait until all its ranks have announced theirs."""
    if os.getpid() != state.process:
        return
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
    if os.getpid() != state.process:
        exit_now(1)
    for finish in at_the_end:
        finish()
    tell("end", how=how, **facts)
    with contextlib.suppress(Exception):  # the script may have replaced it
        sys.stdout.flush()
    exit_now(0)


def again(ranks: int, mode: str, message: str = "") -> NoReturn:
    """Leave, since the script wants other processes, or another launcher, than it was given."""
    started = f"it starts {ranks} processes: give it arguments with which it starts {state.world}"
    leave("again", wants=(ranks, mode), message=message or f"{started}, or give --ranks")


def refuse(what: str, owner: Any, name: str) -> None:
    """End the run where the script calls this, which is not judged."""
    message = f"it uses {what}, which is not judged"
    setattr(owner, name, lambda *args, **keywords: leave("not judged", message=message))
