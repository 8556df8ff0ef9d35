"""Stop requests: finish the step, save, and leave."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from utils.errors import UserError, call_before_end, has_begun, report, run_exit_handlers

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# A terminal sends Ctrl-C to every process, and launchers pass it on. So one may arrive twice.
SAME_CTRL_C_SECONDS = 1.0
PR_SET_PDEATHSIG = 1  # prctl(2)
END_SECONDS = 2.0  # limit for ``before_end`` and exit handlers: a file system may hang
STOPPED = "stopped by "  # with which the message of ``Stopped`` begins


class Stopped(UserError):
    """A stop signal came before there was anything to save."""

    def __init__(self, number: int) -> None:
        super().__init__(f"{STOPPED}{signal.Signals(number).name} while waiting")
        self.number = number
        self.exit_status = 128 + number


class Interrupted(UserError):
    """A second Ctrl-C. One line is enough for all ranks of --nprocs."""

    exit_status = 128 + signal.SIGINT


_received = 0
_is_installed = False


def received() -> int:
    """Return the first stop signal that this process got, or 0. Every wait checks it."""
    return _received


def check() -> None:
    """Raise ``Stopped`` if a stop signal came. For a wait that has nothing to save."""
    if _received:
        raise Stopped(_received)


def sleep(seconds: float) -> None:
    """Wait, or raise ``Stopped`` if a stop signal came."""
    check()
    time.sleep(seconds)


def install_handlers() -> None:
    """Note the stop signals from now on. Called before anything slow.

    A second Ctrl-C, more than a second after the first signal, ends the process at once. Calling
    this again changes nothing.
    """
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    # Python calls a handler only between two of its instructions, and a backward of half a minute
    # is one instruction. For a second Ctrl-C meanwhile there is a thread. CPython writes the number
    # of each signal to its pipe at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup: the run is to outlive its terminal
        signal.signal(number, _note)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def die_with_parent(number: int) -> None:
    """Ask the kernel for a signal when the parent dies. Otherwise this process would go on alone.

    Args:
        number: of the signal. It comes when the *thread* ends that started this process.
    """
    with suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:  # it died before the request
        os._exit(1)


def _note(number: int, _: FrameType | None = None) -> None:
    global _received
    _received = _received or number


def _watch(reader: int) -> None:
    first = 0.0
    while True:
        number = os.read(reader, 1)[0]
        if number in STOP_SIGNALS:
            _note(number)  # the main thread may be unable to
            is_child = multiprocessing.parent_process() is not None
            if number == signal.SIGINT and not first and has_begun() and not is_child:
                name = os.path.basename(sys.argv[0])
                text = "stopping after this step; again: at once, unsaved"
                print(f"{name}: {text}", file=sys.stderr, flush=True)
            first = first or time.monotonic()
            if number == signal.SIGINT and time.monotonic() - first > SAME_CTRL_C_SECONDS:
                error = Interrupted("interrupted by a second Ctrl-C")
                error.reported_elsewhere = is_child
                end_at_once(error)


def end_at_once(error: UserError) -> NoReturn:
    """End this process with an error, from another thread than the main one, which waits in C++."""
    threading.Timer(END_SECONDS, os._exit, (error.exit_status,)).start()
    with suppress(Exception):
        report(error)
        call_before_end(error)
    for child in multiprocessing.active_children():
        child.kill()
    run_exit_handlers()
    os._exit(error.exit_status)
