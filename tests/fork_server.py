"""Start Python processes by a fork of one that has torch loaded: 0.1 s of CPU, not 3 to 6.

``install`` replaces the function by which ``subprocess`` and ``multiprocessing`` start programs, so
that ranks of torchrun and of ``spawn`` are forks as well: they cost the most, and multiprocessing's
own fork server could not start them. Other programs start as usual, and so does a Python with
another value of a variable that is read when Python starts or torch is imported.

The server imports and does nothing else, so a fork inherits no locked thread. A fork is a child of
the process that asked: the server forks a helper, the helper forks and ends, and the orphan goes to
the nearest ancestor that takes orphans, the one that asked. So waiting, signals and the death of
the parent are as usual. Each fork leaves a server behind, which its own processes descend from.
"""

import _posixsubprocess
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import multiprocessing.process
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

REAL = {"PYTHON_OF_A_TEST": "real"}  # a variable that makes a process real
# Variables that are read before a script's first line, but for those that torchrun gives its ranks.
EARLY = re.compile(
    "(PYTHON|PYTORCH|LC_|LANG|LOGLEVEL|LD_|MALLOC|GLIBC|G?OMP_|KMP_|MKL_|OPENBLAS|ATEN_|TORCH)"
    "(?!ELASTIC_|_NCCL_|INDUCTOR_CACHE_DIR)"
)
# Without torchvision, which the scripts do not need, and torch.distributed.run, the main program.
PRELOADED = """
    torch._dynamo torch.nn.parallel torch.optim torch.utils.data torch.profiler
    torch.utils.tensorboard tqdm PIL.Image PIL.ImageDraw
    torch.distributed.launcher.api torch.distributed.argparse_util torch.distributed.optim
    torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
    torch.distributed.elastic.rendezvous.dynamic_rendezvous torch.distributed.algorithms.join
    multiprocessing.spawn multiprocessing.resource_tracker torch.multiprocessing
"""
QUIET = [getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "USR1", "USR2")]
ROOM = " " * 2**16  # in which a fork shows readers of /proc its own arguments and environment
LIMIT_SECONDS = 180
PR_SET_CHILD_SUBREAPER, ABOVE = 36, 500  # ABOVE all descriptors that a fork is given

_real_fork_exec = _posixsubprocess.fork_exec
_server, _owner, _early, _lock = None, 0, {}, threading.Lock()


def install(environment):
    """Start a server, unless there is one, and start Python processes by it from now on."""
    if _server:
        return
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, __file__, str(its.fileno()), ROOM],
        env=environment | {"ROOM": ROOM},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[its.fileno()],
        start_new_session=True,
    )
    its.close()
    mine.settimeout(LIMIT_SECONDS)
    assert mine.recv(1), "the fork server did not start: see its error above"
    use(mine, environment)


def use(connection, environment):
    global _server, _owner, _early
    connection.settimeout(LIMIT_SECONDS)  # an error in place of a wait without end
    _server, _owner, _early = connection, os.getpid(), early(environment)
    _posixsubprocess.fork_exec = subprocess._fork_exec = fork_exec


def early(environment):
    return {name: value for name, value in environment.items() if EARLY.match(name)}


def fork_exec(*arguments):
    """Stand in for ``_posixsubprocess.fork_exec``; a child by os.fork() must not ask for it."""
    asked = to_request(arguments) if _owner == os.getpid() else None
    if not asked:
        return _real_fork_exec(*arguments)
    request, descriptors = asked
    prctl = ctypes.CDLL(None).prctl
    with _lock:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(_server, [pickle.dumps(request)], descriptors)
            return int(_server.recv(32))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def to_request(arguments):
    """Return the request and the descriptors to send, or None where it takes a real process."""
    command, programs, close_others, kept, folder, variables = arguments[:6]
    stdin, _, _, stdout, _, stderr, _, error_pipe, _, new_session = arguments[6:16]
    command = [os.fsdecode(part) for part in command]
    folder = os.path.join(os.getcwd(), os.fsdecode(folder or ""))
    pairs = os.environb.items() if variables is None else (v.split(b"=", 1) for v in variables)
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
    is_plain = all(value in (None, -1, True, False) for value in arguments[16:])
    kind, rest = parse(command)
    if (
        not (kind and is_plain and close_others and os.path.isdir(folder))
        or os.fsdecode(programs[0]) != sys.executable
        or (kind == "script" and not os.path.isfile(os.path.join(folder, rest[0])))
        or early(environment) != _early
    ):
        return None
    streams = {n: n if own == -1 else own for n, own in enumerate((stdin, stdout, stderr))}
    descriptors = streams | {number: number for number in kept if number != error_pipe}
    request = (command, environment, folder, bool(new_session), list(descriptors))
    return request, list(descriptors.values())


def parse(command):
    """Return what kind of program Python is asked to run, and what follows its options."""
    rest = command[1:]
    while rest and rest[0] in ("-u", *subprocess._args_from_interpreter_flags()):
        rest = rest[1:]
    if len(rest) > 1 and rest[0] in ("-c", "-m"):
        return rest[0], rest[1:]
    return "script" if rest and rest[0][0] != "-" else None, rest


def serve(connection):
    """Fork for the process at the other end, and end with it; return in each fork what to run."""
    while True:
        message, received, *_ = socket.recv_fds(connection, 2**20, 64)
        if not message:
            os._exit(0)
        if helper := os.fork():
            for number in received:
                os.close(number)
            os.waitpid(helper, 0)
            continue
        helper = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == helper:
            time.sleep(0.001)
        request = pickle.loads(message)
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine = moved(mine)
        if os.fork() == 0:
            for number in (connection.detach(), mine.detach(), *received):
                os.close(number)
            connection = moved(its)
            continue
        its.close()
        become(*request, received)
        use(mine, request[1])
        connection.send(str(os.getpid()).encode())  # nobody sends a signal sooner
        connection.close()
        return request[0]


def moved(connection):
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, ABOVE))


def become(command, environment, folder, new_session, descriptors, received):
    if new_session:
        os.setsid()
    sources = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, ABOVE) for number in received]
    for number in received:
        os.close(number)
    for source, target in zip(sources, descriptors, strict=True):
        os.dup2(source, target)
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # Where /proc shows arguments and environment, see proc(5), stat.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    texts = command, [f"{name}={value}" for name, value in environment.items()]
    for parts, begin, end in zip(texts, fields[45:49:2], fields[46:49:2], strict=True):
        shown, size = b"".join(os.fsencode(part) + b"\0" for part in parts), int(end) - int(begin)
        ctypes.memmove(int(begin), shown[: size - 1].ljust(size, b"\0"), size)
    for number in QUIET:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.process.ORIGINAL_DIR = folder


def run_as_main(command):
    kind, rest = parse(command)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.argv = ["-c", *rest[1:]] if kind == "-c" else rest
    sys.path.insert(0, "" if kind == "-c" else os.getcwd())
    if kind == "-m":
        return runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    if kind == "script":
        sys.path[0] = os.path.dirname(os.path.realpath(rest[0]))
        main.__file__ = os.path.abspath(rest[0])
        rest = [Path(rest[0]).read_bytes()]
    exec(compile(rest[0], getattr(main, "__file__", "<string>"), "exec"), main.__dict__)


def end(status):
    """End as the interpreter does, but for taking all of torch to pieces, which lasts a second."""
    is_interrupted = status == -signal.SIGINT
    if isinstance(status, str):
        status = print(status, file=sys.stderr) or 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()  # all that is older than the program is frozen
    with contextlib.suppress(OSError, ValueError):  # full, or closed
        sys.stdout.flush()
    if is_interrupted:  # the interpreter ends by the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 0xFF)


def main():
    connection = moved(socket.socket(fileno=int(sys.argv[1])))
    del sys.path[0]  # this file's folder
    for number in QUIET:  # what ends a session does not end the server in it
        signal.signal(number, signal.SIG_IGN)
    for name in PRELOADED.split():
        __import__(name)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread: leave it out"
    gc.freeze()  # no collection in a fork copies pages of what is here already
    connection.send(b"1")
    command = serve(connection)
    try:
        run_as_main(command)
        status = 0
    except SystemExit as request_to_end:
        status = request_to_end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(status)


if __name__ == "__main__":
    main()
