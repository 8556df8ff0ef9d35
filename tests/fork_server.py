"""Programs that begin as forks of a process with torch: 0.1 s of CPU, not the 4 to 6 of imports.

A server is started once for each process of pytest. It imports torch and does nothing else, so that
a fork inherits no thread and no lock. For each request it forks, and the fork runs a script or a
module by ``runpy``, as Python would. Three things differ from a start of Python:

- A fork's parent is its server, which is therefore also asked how the fork has ended.
- torchrun gets a server of its own, which is forked before torchrun starts a thread. When torchrun
  dies, this server ends, and so the kernel tells the ranks that their parent has died.
- Ranks that a script starts itself, by the methods spawn and forkserver, are forks of the script.

/proc shows the server's command and environment for all its forks. So each fork writes down its own
in a file in memory, which stays open as long as the fork lives, and in its loader workers.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import itertools
import json
import math
import multiprocessing
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
from concurrent import futures

# Variables that are read before a script's first line, but for those that a server takes over, and
# those that torchrun reads or gives its ranks.
EARLY = re.compile(
    "(PYTHON|PYTORCH|LC_|LANG|LOGLEVEL|LD_|MALLOC|GLIBC|G?OMP_|KMP_|MKL_|OPENBLAS|ATEN_|TORCH)"
    "(?!PATH$|ELASTIC_|_NCCL_|INDUCTOR_CACHE_DIR|_DISABLE_SHARE_RDZV)"
)
# Without torchvision, which the scripts do not need, and torch.distributed.run, the main program.
PRELOADED = """
    torch._dynamo torch.nn.parallel torch.optim torch.utils.data torch.profiler
    torch.utils.tensorboard tqdm PIL.Image PIL.ImageDraw
    torch.distributed.launcher.api torch.distributed.argparse_util torch.distributed.optim
    torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
    torch.distributed.elastic.rendezvous.dynamic_rendezvous torch.distributed.algorithms.join
    torch.multiprocessing
"""
TORCHRUN = "torch.distributed.run"
MARK = "MNIST_TEST_SESSION"  # the variable by which all processes of a test are known
MARK_FILE = 200  # the descriptor of the file in which a fork writes what it runs
LIMIT_SECONDS = 180.0


class Server:
    """A server for this process, with which it ends."""

    def __init__(self, connection):
        connection.settimeout(LIMIT_SECONDS)  # an error in place of a wait without end
        self.connection, self.lock = connection, threading.Lock()
        self.numbers = itertools.count()

    def ask(self, request, descriptors=()):
        """Send a request, and return the answer to it.

        torchrun's handler of SIGTERM raises an exception. The answer for which it did not wait is
        then before that to the next request.
        """
        with self.lock:
            number, answered = next(self.numbers), None
            socket.send_fds(self.connection, [pickle.dumps((number, request))], descriptors)
            while answered != number:
                message = self.connection.recv(1024)
                assert message, "the fork server has died: see its error above"
                answered, answer = pickle.loads(message)
        return answer


class Fork:
    """A program that a server has forked: a part of what ``subprocess.Popen`` is."""

    def __init__(self, server, command, folder, environment, streams):
        self.args, self.server, self.returncode = command, server, None
        self.pid = server.ask((command, os.path.abspath(folder), environment), streams)

    def poll(self):
        if self.returncode is None:
            self.returncode = self.server.ask(self.pid)
        return self.returncode

    def wait(self, timeout=None):
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class PipedFork(Fork):
    """The same with pipes for its output."""

    def __init__(self, server, command, folder, environment):
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        with open(os.devnull) as nothing, open(its_out, "w"), open(its_err, "w"):
            streams = [nothing.fileno(), its_out, its_err]
            super().__init__(server, command, folder, environment, streams)
        self.stdout, self.stderr = open(out), open(err)  # noqa: SIM115
        self.readers = []

    def communicate(self, timeout=None):
        """Return what is left to read, once nobody writes any more."""
        if not self.readers:
            pool = futures.ThreadPoolExecutor(2)
            self.readers = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            pool.shutdown(wait=False)
        if futures.wait(self.readers, timeout).not_done:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        return tuple(reader.result() for reader in self.readers)


def start_server(environment):
    """Start a server that imports torch, with these variables."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen(
            [sys.executable, __file__, str(its.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
    return Server(mine)


def early(environment):
    return {name: value for name, value in environment.items() if EARLY.match(name)}


def script_of(command):
    """Return the part of a command that a fork can run: a script, -m or -c, and its arguments."""
    program, *words = command
    if words[:1] == ["-u"]:
        del words[0]
    can_run = bool(words) and (words[0].endswith(".py") or words[0] in ("-m", "-c"))
    return words if program == sys.executable and can_run else None


def what_runs(folder):
    """Return command and environment of a process by its folder in /proc."""
    with contextlib.suppress(OSError):
        if MARK in os.readlink(folder / "fd" / str(MARK_FILE)):
            return json.loads((folder / "fd" / str(MARK_FILE)).read_text())
    texts = [(folder / name).read_text(errors="replace") for name in ("cmdline", "environ")]
    command, variables = (text.split("\0") for text in texts)
    return command[:-1], dict(v.split("=", 1) for v in variables if "=" in v)


def serve(connection):
    """Answer until the other end closes, and return in each fork the command that it is to run."""
    codes = {}  # the exit status of each fork, once it has ended
    while True:
        message, streams, *_ = socket.recv_fds(connection, 2**20, 3)
        if not message:
            os._exit(0)
        number, request = pickle.loads(message)
        if isinstance(request, int):
            if codes[request] is None:
                ended, status = os.waitpid(request, os.WNOHANG)
                codes[request] = os.waitstatus_to_exitcode(status) if ended else None
            connection.send(pickle.dumps((number, codes[request])))
        elif pid := os.fork():
            codes[pid] = None
        else:
            become(*request, streams)
            connection.send(pickle.dumps((number, os.getpid())))  # nobody sends a signal sooner
            connection.close()
            return request[0]
        for stream in streams:
            os.close(stream)


def become(command, folder, environment, streams):
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # where processes of the method spawn begin
    os.environ.clear()
    os.environ.update(environment)
    file = os.memfd_create(MARK)
    os.write(file, json.dumps((command, environment)).encode())
    os.dup2(file, MARK_FILE, inheritable=False)
    os.close(file)


def serve_torchrun():
    """Give torchrun a server for its ranks; return the command of a rank in each fork of that."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        mine.close()
        os.close(MARK_FILE)  # it is no process of a test
        os.setsid()
        return serve(its)
    its.close()
    server = Server(mine)
    # Imported here, since only a server has torch.
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    start_rank = SubprocessHandler._popen

    def fork_rank(self, command, environment):
        if not script_of(command):
            return start_rank(self, command, environment)
        files = (sys.stdin, self._stdout or sys.stdout, self._stderr or sys.stderr)
        streams = [file.fileno() for file in files]
        return Fork(server, command, os.getcwd(), environment, streams)

    SubprocessHandler._popen = fork_rank
    return None


def fork_own_ranks():
    """Let the ranks that a script starts itself be forks of it."""
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context(method and "fork")

    def forget_handlers():  # or a rank would install none of its own
        if signals := sys.modules.get("utils.signals"):
            signals._is_installed = False

    os.register_at_fork(after_in_child=forget_handlers)
    # The time limit of a lesson is a thread. A fork that sets its own would wait for it.
    os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)


def run(command):
    words = script_of(command)
    if words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        return exec(words[1], vars(main))
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(words[0]))
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def end(status):
    """End as the interpreter does, but for taking all of torch to pieces, which lasts a second."""
    is_interrupted = status == -signal.SIGINT
    if isinstance(status, str):
        status = print(status, file=sys.stderr) or 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # full, or closed
        sys.stdout.flush()
    if is_interrupted:  # the interpreter ends by the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((status or 0) & 0xFF)


def main():
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path[0] = ""  # not this file's folder
    for name in PRELOADED.split():
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread: leave it out"
    gc.freeze()  # no collection in a fork copies pages of what is here already
    command = serve(connection)
    if TORCHRUN in command:
        command = serve_torchrun() or command
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # with CUDA in use, a fork could not use it
        fork_own_ranks()
    try:
        run(command)
        status = 0
    except SystemExit as request_to_end:
        status = request_to_end.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    end(status)


if __name__ == "__main__":
    main()
