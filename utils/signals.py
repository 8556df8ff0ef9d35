"""Stop requests: finish the step, save, and leave."""

import signal
import time
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# A terminal sends Ctrl-C to every process, and launchers pass it on: one may arrive twice.
SAME_CTRL_C_SECONDS = 1.0


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


def _note(number: int, frame: FrameType | None) -> None:
    global _received, _when
    if not _received:
        _received, _when = number, time.monotonic()
    elif number == signal.SIGINT and time.monotonic() - _when > SAME_CTRL_C_SECONDS:
        raise KeyboardInterrupt
