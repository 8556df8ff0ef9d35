"""Output that may fail while the training goes on."""

import io
import os
import sys
from contextlib import suppress
from typing import Any


class _LossyFile(io.FileIO):
    """A descriptor that drops what nobody reads, instead of ending the training.

    With a closed pipe (``| head -1``) or a full disk behind a redirection, any ``print`` would
    fail.
    """

    def write(self, content: Any) -> int:
        with suppress(OSError):
            return super().write(content)
        return len(content)


def protect() -> None:
    """Let training go on when nobody reads its output, or when a terminal cannot show a name.

    Call it before anything opens a file, because that file would get a closed descriptor's number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed by the shell
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None or type(stream) is io.TextIOWrapper:  # not a program's own
            file = io.BufferedWriter(_LossyFile(number, "w", closefd=False))
            encoding = stream.encoding if stream else "utf-8"
            setattr(sys, name, io.TextIOWrapper(file, encoding, "backslashreplace", None, True))
