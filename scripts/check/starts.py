"""Stand for the ways in which a script starts its ranks itself: mp.spawn and mp.Process."""

import contextlib
import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import record
import torch.multiprocessing as mp
from record import replaces, state

torch_spawn = sys.modules["torch.multiprocessing.spawn"]  # which the function's name hides
before_a_rank: list[Callable[[], None]] = []
_started: list[BaseProcess] = []  # by the script: each is a rank


def _is_of_script(item: Any) -> bool:
    """Whether a function, class or module is the script's own."""
    names = (getattr(item, "__module__", None), getattr(item, "__name__", None))
    files = (getattr(sys.modules.get(str(name)), "__file__", None) for name in names)
    return any(str(file).startswith(state.root) for file in files)


def makes_group(item: Any, seen: set[int] | None = None) -> bool:
    """Whether a function can come to init_process_group, as far as its names tell."""
    seen = set() if seen is None else seen
    while isinstance(item, functools.partial):
        item = item.func
    item = inspect.unwrap(item) if callable(item) else item
    if id(item) in seen or not _is_of_script(item):
        return False
    seen.add(id(item))
    if inspect.isclass(item):
        return any(makes_group(value, seen) for value in vars(item).values())
    code = getattr(item, "__code__", None)
    codes = [code] if code else []
    for one in codes:  # which grows meanwhile
        codes += [inner for inner in one.co_consts if isinstance(inner, types.CodeType)]
    used = {name for one in codes for name in one.co_names}
    if "init_process_group" in used:
        return True
    space = getattr(item, "__globals__", {})
    found = [space[name] for name in used if name in space]
    modules = [value for value in found if isinstance(value, types.ModuleType)]
    found += [getattr(module, name, None) for module in modules for name in used]
    return any(makes_group(value, seen) for value in found)


def _run_as_rank(processes: list[Any]) -> None:
    """Be one of the processes that the script starts. Rank 0 is their parent afterwards, too."""
    if state.mode != "spawn" or len(processes) != state.each:
        record.again(len(processes) * state.nodes, "spawn")
    state.is_parent = False
    for prepare in before_a_rank:
        prepare()
    process = processes[state.rank % state.each]
    process._args = _sent([item._args for item in processes])[state.rank % state.each]
    process.run()
    if state.rank:
        record.leave("ended")
    state.is_parent = True


def _sent(arguments: Any) -> Any:
    """Return what a host's first rank has: what its parent drew by chance goes to all of them."""
    path = Path(state.root, f".arguments{state.node}")
    if state.rank % state.each == 0:
        with contextlib.suppress(Exception):  # something that has no copy, such as a queue
            path.write_bytes(pickle.dumps(arguments))
    record.call("the start of the ranks")
    with contextlib.suppress(Exception):
        return pickle.loads(path.read_bytes())
    return arguments


@replaces(mp, torch_spawn)
def spawn(real: Any, fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **keywords: Any) -> Any:
    """Stand for ``mp.spawn``: this process is the rank with its number."""
    _run_as_rank([mp.Process(target=fn, args=(index, *args)) for index in range(nprocs)])
    return types.SimpleNamespace(join=lambda *args, **keywords: True, processes=[])


replaces(mp, torch_spawn, name="start_processes")(spawn)


@replaces(BaseProcess)
def start(real: Any, self: Any) -> None:
    """Start a helper. A rank waits until all of them are known."""
    target = self._target or type(self).run
    if state.groups or not record.called_by_script() or not makes_group(target):
        return real(self)
    self._popen = MagicMock(**{"poll.return_value": 0})
    _started.append(self)


@replaces(BaseProcess)
def join(real: Any, self: Any, timeout: Any = None) -> None:
    run_started()
    real(self, timeout)


def run_started() -> None:
    """Be one of the ranks that the script has started by now."""
    processes = list(_started)
    _started.clear()
    if processes:
        _run_as_rank(processes)
