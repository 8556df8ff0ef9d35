"""One rank of a check: a process that has torch loaded and forks for each script that it runs."""

import contextlib
import faulthandler
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
import types
from multiprocessing import synchronize
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import numpy as np
import record
import torch
import torch.multiprocessing as mp
from record import around, state

OWN = ("source", "shares", "devices", "files", "training")
PRELOADED = ("torch._dynamo", "torch.distributed.optim", "torch.distributed.fsdp", "torchvision")
_processes: list[Any] = []  # those that the script started, each of which is a rank


def serve(connection: Connection) -> None:
    """Run one script after another, each in a process of its own."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            request = connection.recv()
            if not os.fork():
                try:
                    run(connection, request)
                finally:  # an error of the check itself, which is in the script's output
                    traceback.print_exc()
                    record.exit_now(1)
            os.wait()
            connection.send(("over", None))


def run(connection: Connection, request: dict[str, Any]) -> None:
    """Run the script as this rank, and never return."""
    vars(state).update({name: request[name] for name in ("root", "rank", "world", "nodes", "mode")})
    state.each = state.world // state.nodes
    state.node = state.rank // state.each
    state.connection, state.is_parent = connection, state.mode == "spawn"
    out = os.open(f"{state.root}/.out{state.rank}", os.O_WRONLY | os.O_CREAT)
    for number, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
        os.dup2(target, number)
    stacks = open(f"{state.root}/.stack{state.rank}", "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(0.9 * request["limit"], file=stacks)
    signal.alarm(int(request["limit"]) + 60)  # if nobody is left who would end this process
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    given: dict[str, Any]
    given = {"RANK": state.rank, "WORLD_SIZE": state.world, "LOCAL_RANK": state.rank % state.each}
    given |= {"LOCAL_WORLD_SIZE": state.each, "GROUP_RANK": state.node, "NODE_RANK": state.node}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "check"}
    given = {"TMPDIR": state.root} | ({} if state.is_parent else given)
    os.environ.update({name: str(value) for name, value in given.items()})
    os.chdir(request["folder"])
    path, module, home = request["script"], request["module"], os.path.dirname(__file__)
    sys.argv = [path, *(item.replace("{node}", str(state.node)) for item in request["arguments"])]
    first = request["folder"] if module else os.path.dirname(path)
    torch.set_num_threads(1)
    _seed()
    own = {name: importlib.import_module(name) for name in OWN}
    for name in (*OWN, "record"):  # the script may have modules of these names
        del sys.modules[name]
    sys.path[:] = [first, *(item for item in sys.path if item != home)]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    main.__package__ = module.rpartition(".")[0] or None
    sys.modules["__main__"] = main
    os._exit = _leaves  # type: ignore[assignment]
    try:
        exec(own["source"].compiled(Path(path).read_bytes(), path), main.__dict__)
        _run_processes()
    except SystemExit as leaving:
        _leaves(leaving.code)
    except BaseException as error:
        _failed(error, own["training"].wrappers)
    _leaves(0)


def _leaves(code: Any) -> NoReturn:
    if code in (None, 0):
        record.leave("ended")
    record.leave("error", message=f"it ended with exit status {code}")


def _seed() -> None:
    for seeding in (torch.seed, random.seed, np.random.seed):
        seeding()  # type: ignore[operator]


def _failed(error: BaseException, wrappers: list[Any]) -> None:
    """Report an exception, with the script's own line. What it means is the verdict's affair."""
    traceback.print_exception(error)
    places = [(str(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    own = [(name, line) for name, line in places if name.startswith(state.root)]
    message = f"{type(error).__name__}: {error}"[:2000]
    if isinstance(error, ModuleNotFoundError):
        message = f"it needs the package {error.name}, which is not installed here"
    record.leave(
        "error",
        message=message,
        calls=[item.calls for item in wrappers],
        line=f"{os.path.relpath(own[-1][0], state.root)}:{own[-1][1]}" if own else "",
    )


@contextlib.contextmanager
def _as_a_rank(count: int) -> Any:
    """Be the process of this rank. What follows in the parent is left to rank 0."""
    if state.mode != "spawn" or count != state.each:
        record.again(count * state.nodes, "spawn")
    state.is_parent = False
    _seed()
    yield state.rank % count
    if state.rank:
        record.leave("ended")
    state.is_parent = True


def _sent(given: Any) -> Any:
    """Return what a host's first rank has: what its parent drew by chance goes to all of them."""
    path = f"{state.root}/.given{state.node}"
    if state.rank % state.each == 0:
        with open(path, "wb") as file, contextlib.suppress(Exception):  # such as a queue
            pickle.dump(given, file)
    record.call("the start of the ranks")
    with contextlib.suppress(Exception), open(path, "rb") as file:
        return pickle.load(file)
    return given


def spawn(real: Any, fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **keywords: Any) -> Any:
    """Stand for ``mp.spawn``: this process is the rank with its number."""
    with _as_a_rank(nprocs) as index:
        fn(index, *_sent(args))
    return types.SimpleNamespace(join=lambda *args, **keywords: True, processes=[])


around(mp, sys.modules["torch.multiprocessing.spawn"])(spawn)
around(mp, sys.modules["torch.multiprocessing.spawn"], name="start_processes")(spawn)


@around(BaseProcess)
def start(real: Any, self: Any) -> None:
    if state.groups or not record.called_by_script():
        return real(self)
    self._popen = MagicMock(**{"poll.return_value": 0})
    _processes.append(self)


@around(BaseProcess)
def join(real: Any, self: Any, timeout: Any = None) -> None:
    _run_processes()
    real(self, timeout)


@around(synchronize.Barrier, name="wait")
def barrier(real: Any, self: Any, timeout: Any = None) -> int:
    record.call("a barrier of processes")
    return state.rank


def _run_processes() -> None:
    started = list(_processes)
    _processes.clear()
    if started:
        with _as_a_rank(len(started)) as index:
            given = _sent([process._args for process in started])
            started[index]._args = given[index]
            started[index].run()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
