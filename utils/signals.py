"""Stop requests: finish the step, save, and leave."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from utils.errors import UserError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# A terminal sends Ctrl-C to every process, and launchers pass it on. So one may arrive twice.
SAME_CTRL_C_SECONDS = 1.0
INTERRUPT_SECONDS = 2.0  # limit for ``before_interrupt``, since a file system may hang


class Stopped(UserError):
    """A stop signal came before there was anything to save."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} while waiting")
        self.number = number
        self.exit_status = 128 + number


_received = 0
_before_interrupt: Callable[[], None] | None = None


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

    A second Ctrl-C, more than a second after the first signal, ends the process at once.
    """
    # Python calls a handler only between two of its instructions, and a backward of half a minute
    # is one instruction. CPython writes to this pipe at once, and in the order of the signals.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue  # nohup: the run is to outlive its terminal
        signal.signal(number, _leave_it_to_the_thread)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def before_interrupt(function: Callable[[], None] | None) -> None:
    """Let another thread call a function before a second Ctrl-C ends the process.

    Args:
        function: replaces the previous function, and None removes it. After ``INTERRUPT_SECONDS``
            the process ends even if the function has not returned.
    """
    global _before_interrupt
    _before_interrupt = function


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing. CPython writes to the pipe only if there is a handler in Python."""


def _watch(reader: int) -> None:
    global _received
    first = 0.0
    while True:
        number = os.read(reader, 1)[0]
        if number not in STOP_SIGNALS:
            continue
        if not _received:
            _received, first = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - first > SAME_CTRL_C_SECONDS:
            _end_at_once()


def _end_at_once() -> None:
    status = 128 + signal.SIGINT
    threading.Timer(INTERRUPT_SECONDS, os._exit, (status,)).start()
    if multiprocessing.parent_process() is None:  # one line is enough for all ranks of --nprocs
        with suppress(OSError):
            os.write(2, f"{Path(sys.argv[0]).name}: interrupted\n".encode())
    if _before_interrupt is not None:
        with suppress(Exception):
            _before_interrupt()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)
