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

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A terminal sends Ctrl-C to every process, and launchers pass it on: one may arrive twice.
SAME_CTRL_C_SECONDS = 1.0
LAST_WORDS_SECONDS = 2.0  # a file system may hang


class Stopped(UserError):
    """A stop signal came before there was anything to save."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} while waiting")
        self.number = number
        self.exit_status = 128 + number


class StopRequest:
    """Tell when to leave the batch loop after a whole optimizer step.

    Args:
        agree: gives the largest of a number over all ranks, since all have to leave at the same
            step. It may give what it was asked one call before: then they leave one step later,
            and a signal in the last step of a run no longer stops it.

    Attributes:
        signal: the number that all ranks agreed on, or None; once set it stays.
    """

    def __init__(self, agree: Callable[[int], int] = lambda number: number) -> None:
        self.agree = agree
        self.signal: int | None = None

    def poll(self) -> bool:
        """Tell whether any process was asked to stop. Collective where ``agree`` is."""
        if self.signal is None:
            self.signal = self.agree(_received) or None
        return self.signal is not None

    @property
    def name(self) -> str:
        """Return the name of the signal, or nothing."""
        return signal.Signals(self.signal).name if self.signal else ""


_received = 0
_last_words: Callable[[], None] | None = None


def received() -> int:
    """Return the first stop signal that this process got, or 0; every wait looks at it."""
    return _received


def check() -> None:
    """Raise ``Stopped`` if a stop signal came; for a wait that has nothing to save."""
    if _received:
        raise Stopped(_received)


def sleep(seconds: float) -> None:
    """Wait, unless a stop signal came.

    Raises:
        Stopped: it did.
    """
    check()
    time.sleep(seconds)


def install_handlers() -> None:
    """Note the stop signals from now on; called before anything slow.

    A second Ctrl-C, more than a second after the first signal, ends the process at once.
    """
    # Python calls a handler between two of its instructions, and a backward of half a minute is
    # one. What CPython writes to this pipe comes at once, and in the order of the signals.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, _leave_it_to_the_thread)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def before_interrupt(function: Callable[[], None] | None) -> None:
    """Have ``function`` called, from another thread, before a second Ctrl-C ends the process.

    Args:
        function: takes the place of the one before; None for none. What it has not done after
            ``LAST_WORDS_SECONDS`` is left undone.
    """
    global _last_words
    _last_words = function


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: without a handler in Python nothing would be written to the pipe."""


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
    threading.Timer(LAST_WORDS_SECONDS, os._exit, (status,)).start()
    if multiprocessing.parent_process() is None:  # one line will do for all ranks of --nprocs
        with suppress(OSError):
            os.write(2, f"{Path(sys.argv[0]).name}: interrupted\n".encode())
    if _last_words is not None:
        with suppress(Exception):
            _last_words()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)
