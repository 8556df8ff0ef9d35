"""What a rank writes down for the verdict, and what all modules of a rank share.

A rank counts the collectives that the script calls. What two ranks do at the same count can happen
at the same time, because nothing makes one of them wait for the other.
"""

import contextlib
import functools
import importlib
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

# Loaded here, before any module replaces a function that these use.
LARGE = ("torch._dynamo", "torch.distributed.optim", "torch.distributed.fsdp", "torchvision")
for _name in LARGE:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)


class State:
    """This process among the ranks. There is one script in a process, so there is one state."""

    told: Any = None  # the file in which this rank writes down what it sees
    process = 0  # the id of this process: children that it forks are no ranks
    rank = 0
    world = 2
    nodes = 1
    limit = 120.0
    each = 2  # number of ranks of each host
    node = 0  # number of this host
    home = "no script yet"  # the folder of the project
    root = "no script yet"  # its copy, in which the script runs
    place = "no script yet"  # the folder for this run, in which the copy lies
    mode = "torchrun"  # or "all", for the variables of all launchers, or "spawn"
    samples = 16  # of each rank in an epoch
    began = 0.0  # when the script began, in seconds
    is_small = True  # whether numbers are made smaller
    finds_unused = False  # whether wrappers look for parameters that a forward did not use
    guard = 0  # the line of the script at which it asks whether it is the main module
    is_parent = False  # true in mode "spawn", until the script has started the ranks
    clock = 0  # number of collectives of all ranks that the script has called
    locked_at = -1  # the clock at which the script took a file lock last
    has_broadcast = False  # whether the script has called a broadcast
    groups = 0  # number of process groups that it has made
    steps = 0  # number of optimizer steps
    changed: Any = None  # numbers that the check has made smaller, by their names


state = State()
at_the_end: list[Callable[[], None]] = []
observers: list[Callable[[Any, Any, Any], None]] = []  # of torch's functions
_lock = threading.RLock()
_exit = os._exit  # which the script calls, too


class Nested:
    """Counts how many blocks of one kind are running inside one another."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


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


def place(file: str, line: int | None) -> str:
    """Return a line of the script as the verdict names it."""
    return f"{os.path.relpath(file, state.root)}:{line}"


def calls() -> Iterator[Any]:
    """Yield the frames of the script that are running, the innermost one first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(state.root):
            yield frame
        frame = frame.f_back


def is_import(frame: Any) -> bool:
    """Whether a spawned process runs this, too: a module's lines, and those before main's guard."""
    is_guarded = frame.f_globals["__name__"] == "__main__" and frame.f_lineno >= state.guard
    return frame.f_code.co_name == "<module>" and not is_guarded


def frames() -> Iterator[str]:
    """Yield the lines of the script that are running, the innermost one first."""
    return (place(frame.f_code.co_filename, frame.f_lineno) for frame in calls())


def tell(kind: str, **facts: Any) -> None:
    """Write down an event. With a fact ``same`` it is a finding if two ranks share it at once."""
    is_alone = state.is_parent or state.locked_at == state.clock
    if os.getpid() != state.process or ("same" in facts and is_alone):
        return
    event = {"kind": kind, "rank": state.rank, "node": state.node, "clock": state.clock}
    event["at"] = state.steps
    event["line"] = next(frames(), "")
    with _lock:
        state.told.write(json.dumps(event | facts, default=str) + "\n")


def leave(how: str, **facts: Any) -> NoReturn:
    """End this process. It is no exception, because the script could catch that."""
    for finish in at_the_end if os.getpid() == state.process else ():
        finish()
    tell("end", how=how, changed=", ".join(state.changed.values()), **facts)
    with contextlib.suppress(Exception):  # the script may have replaced sys.stdout
        sys.stdout.flush()
    time.sleep(1 if state.groups else 0)  # the other ranks may still read what this rank has sent
    _exit(how not in ("ended", "cut"))


def again(ranks: int, mode: str) -> NoReturn:
    """Leave, because the script wants another number of processes, or starts them itself."""
    started = f"it starts {ranks} processes: give it arguments with which it starts {state.world}"
    leave("again", wants={"world": ranks, "mode": mode}, message=f"{started}, or give --ranks")


def refuse(what: str, owner: Any, name: str) -> None:
    """Let this function end the run, because the check does not judge what it does."""

    def end(*args: Any, **keywords: Any) -> None:
        if state.steps:
            leave("cut", message=f"what follows after its training: it uses {what}")
        leave("not judged", message=f"it uses {what}, which is not judged")

    setattr(owner, name, end)
