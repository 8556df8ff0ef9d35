"""Output that may fail without the training."""

import io
import os
import sys
from contextlib import suppress
from typing import Any


class _LossyFile(io.FileIO):
    """A descriptor that loses what nobody takes, instead of ending the training.

    A closed pipe (``| head -1``) or a full disk behind a redirection fails at any ``print``.
    """

    def write(self, content: Any) -> int:
        with suppress(OSError):
            return super().write(content)
        return len(content)


def protect() -> None:
    """Let the training outlive whoever reads its output, and print names that no terminal can.

    Called before anything opens a file, which would take the place of a closed descriptor.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed by the shell
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or type(stream) is io.TextIOWrapper:  # none that a program has put there
            file = io.BufferedWriter(_LossyFile(number, "w", closefd=False))
            encoding = stream.encoding if stream else "utf-8"
            setattr(sys, name, io.TextIOWrapper(file, encoding, "backslashreplace", None, True))
