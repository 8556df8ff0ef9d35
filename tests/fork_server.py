"""Start Python processes by a fork of one that has torch loaded: 0.1 s in place of 3 or more.

``install`` puts ``fork_exec`` in the place of the function by which ``subprocess`` and
``multiprocessing`` start programs. Where the program is this Python, a server is asked to fork;
where a forked process could differ from a fresh one, and for every other program, the real
function is called. So nothing else has to know: ``Popen`` stays ``Popen``, and ranks that torchrun
or ``spawn`` starts are forked as well.

What makes a fork like a fresh process:

- The server imports and does nothing else, so there is no thread whose locks a fork could inherit.
- The fork is a child of the process that asked. The server forks a helper, the helper forks and
  ends, and the orphan goes to the nearest ancestor that takes orphans, see prctl(2),
  PR_SET_CHILD_SUBREAPER: for that moment, the one that asked. It can be waited for, and signals
  and the death of the parent arrive as they do otherwise.
- Arguments, environment, working directory, session, descriptors and signal handlers are those
  that were asked for, in ``/proc`` too.
- Where a variable that is read when Python starts or torch is imported differs from the server's,
  the process is a real one.

Resource limits, affinity and umask are the server's. Each fork leaves a server of its own behind,
for what it starts in turn: a server has to be a descendant of the one that asks.
"""

import _posixsubprocess
import array
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib.machinery
import io
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
# Beginnings of the names of variables that are read when Python starts or torch is imported.
EARLY = ("PYTHON", "LC_", "LANG", "LOGLEVEL", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_")
EARLY += ("MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_", "PYTORCH_", "TORCH")
# What torchrun tells its ranks, and what torch itself sets in a process that compiles.
LATE = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR")
# What most processes here import sooner or later: the first optimizer torch._dynamo, torchrun its
# launcher (itself it wants to be new). Not torchvision: a test shows that the scripts do without.
PRELOADED = """
    torch._dynamo torch.nn.parallel torch.optim torch.utils.data torch.profiler
    torch.utils.tensorboard tqdm PIL.Image PIL.ImageDraw
    torch.distributed.launcher.api torch.distributed.argparse_util torch.distributed.optim
    torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
    torch.distributed.elastic.rendezvous.dynamic_rendezvous torch.distributed.algorithms.join
    multiprocessing.spawn multiprocessing.resource_tracker torch.multiprocessing
    concurrent.futures csv gzip hashlib urllib.request zipfile
"""
# Space in which a fork shows its own arguments and environment to readers of /proc.
ROOM = 2**16
START_TIMEOUT, REPLY_TIMEOUT = 180, 60

_real_fork_exec = _posixsubprocess.fork_exec


class Request(NamedTuple):
    """A Python process to fork: what ``execve`` and ``Popen`` would be told."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    new_session: bool
    ignored_signals: list[int]
    descriptors: list[int]  # the numbers in the new process, in the order in which they are sent


class Server:
    """A connection to the process that forks for this one."""

    def __init__(self, connection: socket.socket, early: dict[str, str]) -> None:
        self.connection = connection
        self.early = early
        self.owner = os.getpid()  # a fork that has inherited this must not use it
        self.lock = threading.Lock()
        connection.settimeout(REPLY_TIMEOUT)

    def fork(self, request: Request, sent: list[int]) -> int:
        """Return the process id of a new child of this process.

        Raises:
            OSError: the server has ended or does not answer.
        """
        with self.lock, takes_orphans():
            send(self.connection, request._asdict(), sent)
            reply, _ = receive(self.connection)
        if not reply:
            raise OSError("the tests' fork server has ended")
        return reply["pid"]


import_seconds = 0.0  # what `import torch` took in the server: how fast the machine is now
_server: Server | None = None
_paused = False


def install(environment: dict[str, str]) -> None:
    """Start a server, unless there is one, and start Python processes by it from now on.

    Raises:
        RuntimeError: it did not start.
    """
    global _server, import_seconds
    if _server:
        return
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(its.fileno()), " " * ROOM]
    subprocess.Popen(
        command,
        env=environment | {"ROOM": " " * ROOM},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
        start_new_session=True,
    )
    its.close()
    mine.settimeout(START_TIMEOUT)
    ready, _ = receive(mine)
    if not ready:
        raise RuntimeError("the tests' fork server did not start: see its error above")
    import_seconds = ready["import_seconds"]
    _server = Server(mine, early(environment))
    put_in_place(fork_exec)


def uninstall() -> None:
    """Start real processes again, and end the server."""
    global _server
    put_in_place(_real_fork_exec)
    if _server:
        _server.connection.close()
    _server = None


@contextlib.contextmanager
def real_processes() -> Iterator[None]:
    """Start real processes inside: for tests of how processes start and end."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def put_in_place(function: Any) -> None:
    _posixsubprocess.fork_exec = function  # multiprocessing, and subprocess before Python 3.11
    subprocess._fork_exec = function  # type: ignore[attr-defined]


def fork_exec(*arguments: Any) -> int:
    """Stand in for ``_posixsubprocess.fork_exec``: same arguments, and the child's id as well."""
    server = None if _paused else _server
    asked = to_request(arguments) if server and server.owner == os.getpid() else None
    if not server or not asked or early(asked[0].environment) != server.early:
        return _real_fork_exec(*arguments)
    return server.fork(*asked)


def to_request(arguments: tuple[Any, ...]) -> tuple[Request, list[int]] | None:
    """Return the request that these arguments of ``fork_exec`` make, and the descriptors to send.

    None where it takes a real process: another program, options of the interpreter, a script that
    is not there, a function to call before, another user or group, closed standard streams.
    """
    command, programs, close_others, kept, folder, variables = arguments[:6]
    stdin, _, _, stdout, _, stderr, _, error_pipe, _, new_session = arguments[6:16]
    command = [os.fsdecode(part) for part in command]
    folder = os.path.join(os.getcwd(), os.fsdecode(folder or ""))
    plain = all(value in (None, -1) or isinstance(value, bool) for value in arguments[16:])
    if os.fsdecode(programs[0]) != sys.executable or not close_others or not plain:
        return None
    kind, _ = parse(command)
    if kind is None or not os.path.isdir(folder):
        return None
    if kind == "script" and not os.path.isfile(os.path.join(folder, script_of(command))):
        return None
    streams = {
        number: number if own == -1 else own for number, own in enumerate((stdin, stdout, stderr))
    }
    descriptors = streams | {number: number for number in kept if number != error_pipe}
    try:
        for number in descriptors.values():
            os.fstat(number)
    except OSError:
        return None
    pairs = os.environb.items() if variables is None else (v.split(b"=", 1) for v in variables)
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
    ignored = [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]
    request = Request(command, environment, folder, bool(new_session), ignored, list(descriptors))
    return request, list(descriptors.values())


def parse(command: list[str]) -> tuple[str | None, list[str]]:
    """Return what kind of program Python is asked to run, and what follows its options."""
    rest = command[1:]
    # PYTHONUNBUFFERED is set for every test; others that this process has, multiprocessing repeats.
    while rest and rest[0] in ("-u", *subprocess._args_from_interpreter_flags()):  # type: ignore
        rest = rest[1:]
    if rest[:1] in (["-c"], ["-m"]) and len(rest) > 1:
        return rest[0], rest[1:]
    if rest and not rest[0].startswith("-"):
        return "script", rest
    return None, rest


def script_of(command: list[str]) -> str:
    return parse(command)[1][0]


def early(environment: Any) -> dict[str, str]:
    """Return the variables that are read before a script's first line."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(EARLY) and not name.startswith(LATE)
    }


@contextlib.contextmanager
def takes_orphans() -> Iterator[None]:
    """Let orphans among this process's descendants become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def send(connection: socket.socket, message: Any, descriptors: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([json.dumps(message).encode()], rights if descriptors else [])


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return a message and the descriptors that came with it; None at the other side's end."""
    message, descriptors, _, _ = socket.recv_fds(connection, 2**20, 64)
    return (json.loads(message) if message else None), descriptors


def serve(connection: socket.socket) -> Request:
    """Fork for who asks, and end with it; return in each fork, which is to run the request."""
    global _server
    while True:
        message, received = receive(connection)
        if message is None:
            os._exit(0)
        request = Request(**message)
        # What arrives before the fork has its own handlers waits for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid, adopted = fork_twice()
        if pid:
            for number in received:
                os.close(number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
            os.close(adopted)
            send(connection, {"pid": pid}, [])
            continue

        connection.close()
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            mine.close()
            for number in (adopted, *received):
                os.close(number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
            connection = its
            continue
        its.close()
        _server = Server(above(mine, request.descriptors), early(request.environment))
        os.read(adopted, 1)  # nothing comes; it ends when the parent is the one that asked
        os.close(adopted)
        become(request, received)
        return request


def fork_twice() -> tuple[int, int]:
    """Fork a grandchild whose parent ends; return its id (there: 0) and a pipe's end.

    The one that is returned here has to be closed to let the grandchild's go on.
    """
    its_end, my_end = os.pipe()
    answer, told = os.pipe()
    helper = os.fork()
    if helper == 0:
        grandchild = os.fork()
        if grandchild:
            os.write(told, str(grandchild).encode())
            os._exit(0)
    for number in (told, my_end if helper == 0 else its_end):
        os.close(number)
    if helper == 0:
        os.close(answer)
        return 0, its_end
    os.waitpid(helper, 0)
    pid = int(os.read(answer, 32))
    os.close(answer)
    return pid, my_end


def above(connection: socket.socket, taken: list[int]) -> socket.socket:
    """Return the connection under a descriptor beyond those that will be used."""
    number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, max(taken) + len(taken) + 1)
    connection.close()
    return socket.socket(fileno=number)


def become(request: Request, received: list[int]) -> None:
    """Take over all that a request says of the process."""
    if request.new_session:
        os.setsid()
    # None of the targets may be the source of another.
    beyond = max(request.descriptors + received) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, beyond) for number in received]
    for number in received:
        os.close(number)
    for number, target in zip(moved, request.descriptors, strict=True):
        os.dup2(number, target)
        os.close(number)
    os.chdir(request.folder)
    os.environ.clear()  # no pointer of the C library goes into the old space after this
    os.environ.update(request.environment)
    show_in_proc(request)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):  # those that the C library keeps for itself
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *request.ignored_signals):
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in request.ignored_signals:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    tempfile.tempdir = None
    # The streams remember what their descriptors were in the server.
    unbuffered = bool(request.environment.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        with contextlib.suppress(OSError):
            mode, size = ("wb", 0 if unbuffered else -1) if number else ("rb", -1)
            stream = io.TextIOWrapper(
                open(number, mode, size, closefd=False),  # noqa: SIM115
                old.encoding,
                old.errors,
                line_buffering=old.line_buffering,
                write_through=unbuffered,
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    multiprocessing.process.ORIGINAL_DIR = request.folder  # type: ignore[attr-defined]


def show_in_proc(request: Request) -> None:
    """Write arguments and environment to where /proc shows them, see proc(5), stat."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, fields[45:49])
    texts = [f"{name}={value}" for name, value in request.environment.items()]
    for begin, end, parts in (
        (arguments, arguments_end, request.arguments),
        (variables, variables_end, texts),
    ):
        shown = b"".join(os.fsencode(part) + b"\0" for part in parts)
        size = end - begin
        ctypes.memmove(begin, shown[: size - 1].ljust(size, b"\0"), size)


def run_as_main(command: list[str]) -> None:
    """Run what follows Python's options as ``__main__``, as the interpreter does.

    See Lib/runpy.py, and Modules/main.c for how arguments and path are set.
    """
    kind, rest = parse(command)
    sys.orig_argv = command
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main.__loader__ = importlib.machinery.BuiltinImporter
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv = rest
        sys.path.insert(0, os.path.dirname(os.path.realpath(rest[0])))
        main.__file__ = os.path.abspath(rest[0])
        main.__cached__ = None  # type: ignore[attr-defined]
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        code = compile(Path(rest[0]).read_bytes(), main.__file__, "exec")
    exec(code, main.__dict__)


def end(status: Any) -> None:
    """End as the interpreter does, but for taking all of torch to pieces, which lasts a second."""
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()  # finalises what the program has made: all that is older is frozen
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit((status or 0) & 0xFF)


def preload() -> float:
    """Import what most processes need; return how many seconds torch took.

    Raises:
        RuntimeError: an import has started a thread, so that no fork would be safe.
    """
    begin = time.monotonic()
    import torch  # noqa: F401

    seconds = time.monotonic() - begin
    for name in PRELOADED.split():
        __import__(name)
    threads = len(os.listdir("/proc/self/task"))
    gc.freeze()  # no collection in a fork copies pages of what is here already
    if threads > 1:
        raise RuntimeError(f"{threads} threads run in the fork server: leave out what starts them")
    return seconds


def main() -> None:
    """Serve, and in a fork run what was asked for."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    del sys.path[0]  # this file's folder
    sys.modules["fork_server"] = sys.modules["__main__"]  # stays when another takes its name
    # A server that a fork has left behind is in the fork's session, and ends when the fork does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    send(connection, {"import_seconds": preload()}, [])
    request = serve(connection)
    put_in_place(fork_exec)
    status: Any = 0
    try:
        run_as_main(request.arguments)
    except KeyboardInterrupt:
        raise  # the interpreter ends by the signal
    except SystemExit as request_to_end:
        status = request_to_end.code
    except BaseException as error:
        # As the interpreter prints it: without the frames of this file.
        trace = error.__traceback__
        while trace and trace.tb_frame.f_globals is globals():
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        status = 1
    end(status)


if __name__ == "__main__":
    main()
