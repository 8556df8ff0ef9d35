"""One rank of a check: a process that has torch loaded and forks for each script that it runs."""

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import types
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import devices
import files
import numpy as np
import record
import shares
import source
import torch
import torch.multiprocessing as mp
import training
from record import state

OWN = ("devices", "files", "record", "shares", "source", "training")
PRELOADED = ["torch._dynamo", "torch.distributed.optim", "torch.distributed.fsdp"]
SEEDS = torch.seed, random.seed, np.random.seed
_started: list[Any] = []


def connect(address: str) -> Connection:
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    return Connection(channel.detach())


def serve(address: str, rank: int) -> None:
    for name in PRELOADED:
        __import__(name)
    with contextlib.suppress(ImportError):
        __import__("torchvision")
    connection = connect(address)
    connection.send((rank, os.getpid()))
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if not child:
            connection.close()
            run(address, request)
        os.waitpid(child, 0)


def run(address: str, request: dict[str, Any]) -> None:
    """Run the script as this rank, and never return."""
    for name in ("root", "rank", "world", "nodes", "mode"):
        setattr(state, name, request[name])
    state.connection = connect(address)
    state.connection.send((state.rank, os.getpid()))
    state.is_parent = state.mode == "spawn"
    out = os.open(f"{state.root}/.out{state.rank}", os.O_WRONLY | os.O_CREAT)
    for number, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
        os.dup2(target, number)
    stacks = open(f"{state.root}/.stack{state.rank}", "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=False)
    for name in request["unset"]:
        os.environ.pop(name, None)
    os.environ.update(request["environment"])
    path, home = request["script"], os.path.dirname(os.path.abspath(__file__))
    os.chdir(request["folder"])
    node = state.rank // (state.world // state.nodes)
    sys.argv = [path, *(item.replace("{node}", str(node)) for item in request["arguments"])]
    first = request["folder"] if request["module"] else os.path.dirname(path)
    sys.path[:] = [first, *(item for item in sys.path if item != home)]
    torch.set_num_threads(1)
    for seeding in SEEDS:
        seeding()
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    main.__package__ = request["module"].rpartition(".")[0] or None
    for name in OWN:
        sys.modules.pop(name, None)
    sys.modules["__main__"] = main
    for module in (source, shares, devices, files, training):
        module.install()
    os._exit = _leaves  # type: ignore[assignment]
    if state.mode == "spawn":
        _install_processes()
    try:
        with open(path, "rb") as file:
            code = source.compiled(file.read(), path)
        exec(code, main.__dict__)
        if _started:
            _run_started()
    except SystemExit as leaving:
        _leaves(leaving.code)
    except BaseException as error:
        _failed(error)
    record.leave("ended", line="")


def _leaves(code: Any) -> NoReturn:
    if code in (None, 0):
        record.leave("ended", line="")
    record.leave("error", message=f"it ended with exit status {code}", line="")


def _failed(error: BaseException) -> None:
    """Report an exception, with the script's own line. What it means is the verdict's affair."""
    traceback.print_exception(error)
    places = [(str(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((str(error.filename), error.lineno))
    own = [(name, line) for name, line in places if name.startswith(state.root)]
    path = getattr(error, "filename", None)
    record.leave(
        "error",
        kind_of=type(error).__name__,
        missing=error.name if isinstance(error, ModuleNotFoundError) else "",
        message=f"{type(error).__name__}: {error}"[:2000],
        path=files.name_of(path) if isinstance(error, OSError) and isinstance(path, str) else "",
        wrappers=[{"events": w.events, "names": w.trainable} for w in training.wrappers],
        line=f"{os.path.relpath(own[-1][0], state.root)}:{own[-1][1]}" if own else "",
    )


def _each() -> int:
    return state.world // state.nodes


def _started_ranks(count: int) -> None:
    if count != _each():
        record.leave("ranks", wanted=count * state.nodes)
    state.is_parent = False


def _spawn(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **keywords: Any) -> Any:
    """Stand for ``mp.spawn``: this process is the rank with its number."""
    _started_ranks(nprocs)
    path = f"{state.root}/.arguments"
    with files.plainly():  # there is one parent, and what it drew by chance goes to all ranks
        if state.rank == 0:
            with open(path, "wb") as file, contextlib.suppress(Exception):  # such as a queue
                file.write(pickle.dumps(args))
        record.call("the start of the ranks")
        with open(path, "rb") as file:
            sent = file.read()
    for seeding in SEEDS:
        seeding()
    fn(state.rank % _each(), *(pickle.loads(sent) if sent and state.rank else args))
    return _ended()


def _ended() -> Any:
    if state.rank:
        record.leave("ended", line="")
    state.is_parent = True
    return types.SimpleNamespace(join=lambda *args, **keywords: True, processes=[])


class _Process:
    """Stands for a process that the script starts itself, which is then a rank."""

    real: Any = multiprocessing.Process

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        if cls is _Process and not record.called_by_script():
            return _Process.real(*args, **keywords)
        return super().__new__(cls)

    def __init__(
        self, group: Any = None, target: Any = None, name: Any = None, args: Any = (), **more: Any
    ) -> None:
        self.target, self.args, self.kwargs = target, args, more.get("kwargs") or {}
        self.name, self.daemon, self.exitcode, self.pid = name, more.get("daemon"), 0, os.getpid()

    def run(self) -> None:
        if self.target:
            self.target(*self.args, **self.kwargs)

    def start(self) -> None:
        _started.append(self)

    def join(self, timeout: Any = None) -> None:
        if _started:
            _run_started()

    def is_alive(self) -> bool:
        return False

    def terminate(self) -> None:
        return None

    kill = close = terminate


class _Barrier:
    """Stands for a barrier of the processes that the script starts."""

    def __init__(self, parties: int, *args: Any, **keywords: Any) -> None:
        self.parties = parties

    def wait(self, timeout: Any = None) -> int:
        record.call("a barrier of the processes")
        return state.rank


def _run_started() -> None:
    started = list(_started)
    _started.clear()
    _started_ranks(len(started))
    started[state.rank % _each()].run()
    _ended()


def _install_processes() -> None:
    for module in (mp, sys.modules["torch.multiprocessing.spawn"]):
        module.spawn = module.start_processes = _spawn  # type: ignore[attr-defined]
    for module in (mp, multiprocessing):
        module.Process = _Process  # type: ignore[attr-defined]
        module.set_start_method = lambda *args, **keywords: None  # type: ignore[attr-defined]
        module.Barrier = _Barrier  # type: ignore[attr-defined]
    for name in ("SpawnContext", "ForkContext", "ForkServerContext"):
        getattr(multiprocessing.context, name).Process = _Process


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
