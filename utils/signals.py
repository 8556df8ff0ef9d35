"""Stop requests: finish the step, save, and leave."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A terminal sends Ctrl-C to every process, and launchers pass it on: one may arrive twice.
SAME_CTRL_C_SECONDS = 1.0
INTERRUPT_SECONDS = 2.0  # to end in the orderly way after a second Ctrl-C


class StopRequest:
    """Note a stop signal, so that the batch loop can end after a whole optimizer step.

    Args:
        agree: gives the largest of a number over all ranks; DDP passes a collective, since all
            ranks have to end at the same step.
    """

    def __init__(self, agree: Callable[[int], int] = lambda number: number) -> None:
        self.agree = agree
        self.signal: int | None = None  # what all ranks agreed on

    def poll(self) -> bool:
        """Tell whether any process was asked to stop. Collective where ``agree`` is."""
        self.signal = self.agree(_received) or None
        return self.signal is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.signal).name if self.signal else ""


_received = 0
_when = 0.0


def received() -> int:
    """Return the stop signal that this process got, or 0; every wait looks at it."""
    return _received


def install_handlers() -> None:
    """Note the stop signals from now on; called before anything slow.

    A second Ctrl-C, a second or more after the first signal, ends the process at once.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, _note)
    # Python calls a handler between two of its instructions, and a backward of half a minute is
    # one. What CPython writes here comes at once.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(reader, writer), daemon=True).start()


def _insist(reader: socket.socket, writer: socket.socket) -> None:
    """End the process at the second Ctrl-C, if it has not ended by itself soon after."""
    first = None
    while True:
        for number in reader.recv(1):
            if number not in STOP_SIGNALS:
                continue
            if first is None:
                first = time.monotonic()
            elif number == signal.SIGINT and time.monotonic() - first > SAME_CTRL_C_SECONDS:
                time.sleep(INTERRUPT_SECONDS)
                os.write(2, b"interrupted\n")
                os._exit(130)


def _note(number: int, frame: FrameType | None) -> None:
    global _received, _when
    if not _received:
        _received, _when = number, time.monotonic()
    elif number == signal.SIGINT and time.monotonic() - _when > SAME_CTRL_C_SECONDS:
        raise KeyboardInterrupt
