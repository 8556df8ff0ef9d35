"""One rank of a check: a process that has torch loaded and forks for each script that it runs."""

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
import types
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock

import devices
import files
import numpy as np
import record
import shares
import source
import torch
import torch.multiprocessing as mp
import training
from record import around, state

OWN = (devices, files, record, shares, source, training)
torch_spawn = sys.modules["torch.multiprocessing.spawn"]  # which the function's name hides
_started: list[BaseProcess] = []  # by the script: each is a rank


def serve(connection: Connection) -> None:
    """Run one script after another, each in a process of its own."""
    connection.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            request = connection.recv()
            if not os.fork():
                run(connection, request)
            os.wait()
            connection.send({"kind": "over"})


def run(connection: Connection, request: dict[str, Any]) -> NoReturn:
    """Run the script as this rank."""
    vars(state).update(request, connection=connection)
    state.each = state.world // state.nodes
    state.node, local = divmod(state.rank, state.each)
    state.is_parent = state.mode == "spawn"
    out = os.open(f"{state.root}/.out{state.rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    files.confine()
    faulthandler.dump_traceback_later(0.9 * request["limit"])
    signal.alarm(int(request["limit"]) + 60)  # if nobody is left who would end this process
    launched: dict[str, Any] = {"RANK": state.rank, "WORLD_SIZE": state.world, "LOCAL_RANK": local}
    launched |= {"LOCAL_WORLD_SIZE": state.each, "GROUP_RANK": state.node, "NODE_RANK": state.node}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": request["port"]}
    launched["TORCHELASTIC_RUN_ID"] = "check"
    for name, value in launched.items() if state.mode == "torchrun" else ():
        os.environ[name] = str(value)
    os.environ["TMPDIR"] = state.root
    del os.environ["CUDA_VISIBLE_DEVICES"]
    os.chdir(f"{state.root}/{request['folder']}")
    path, module = f"{state.root}/{request['script']}", request["module"]
    sys.argv = [path, *(item.replace("{node}", str(state.node)) for item in request["arguments"])]
    sys.path[0] = os.getcwd() if module else os.path.dirname(path)
    for own in OWN:  # the script may have modules of these names
        del sys.modules[own.__name__]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__, main.__package__ = path, module.rpartition(".")[0] or None
    os._exit = _leave  # type: ignore[assignment]
    _seed()
    try:
        exec(source.compiled(Path(path).read_bytes(), path), vars(main))
        _run_started()
    except SystemExit as leaving:
        _leave(leaving.code)
    except BaseException as error:
        _fail(error)
    _leave(0)


def _leave(code: Any) -> NoReturn:
    if code in (None, 0):
        record.leave("ended")
    record.leave("error", message=f"it ended with exit status {code}")


def _seed() -> None:
    for seeding in (torch.seed, random.seed, np.random.seed):
        seeding()  # type: ignore[operator]


def _fail(error: BaseException) -> NoReturn:
    """Report an exception, with the script's own line. What it means is the verdict's affair."""
    traceback.print_exception(error)
    message, line = f"{type(error).__name__}: {error}"[:2000], ""
    if isinstance(error, ModuleNotFoundError):
        message = f"it needs the package {error.name}, which is not installed here"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(state.root):
            line = f"{os.path.relpath(frame.filename, state.root)}:{frame.lineno}"
    calls = [item.calls for item in training.wrappers]
    record.leave("error", message=message, calls=calls, line=line)


def _run_as_rank(processes: list[Any]) -> None:
    """Be one of the processes that the script starts. Rank 0 is their parent afterwards, too."""
    if state.mode != "spawn" or len(processes) != state.each:
        record.again(len(processes) * state.nodes, "spawn")
    state.is_parent = False
    _seed()
    process = processes[state.rank % state.each]
    process._args = _sent([own._args for own in processes])[state.rank % state.each]
    process.run()
    if state.rank:
        record.leave("ended")
    state.is_parent = True


def _sent(given: Any) -> Any:
    """Return what a host's first rank has: what its parent drew by chance goes to all of them."""
    path = Path(state.root, f".given{state.node}")
    if state.rank % state.each == 0:
        with contextlib.suppress(Exception):  # something that has no copy, such as a queue
            path.write_bytes(pickle.dumps(given))
    record.call("the start of the ranks")
    with contextlib.suppress(Exception):
        return pickle.loads(path.read_bytes())
    return given


@around(mp, torch_spawn)
def spawn(real: Any, fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **keywords: Any) -> Any:
    """Stand for ``mp.spawn``: this process is the rank with its number."""
    _run_as_rank([mp.Process(target=fn, args=(index, *args)) for index in range(nprocs)])
    return types.SimpleNamespace(join=lambda *args, **keywords: True, processes=[])


around(mp, torch_spawn, name="start_processes")(spawn)


@around(BaseProcess)
def start(real: Any, self: Any) -> None:
    if state.groups or not record.called_by_script():
        return real(self)
    self._popen = MagicMock(**{"poll.return_value": 0})
    _started.append(self)


@around(BaseProcess)
def join(real: Any, self: Any, timeout: Any = None) -> None:
    _run_started()
    real(self, timeout)


def _run_started() -> None:
    processes = list(_started)
    _started.clear()
    if processes:
        _run_as_rank(processes)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
