"""What tests/altered.py changes in a script. ``install`` of each module takes ALTER."""

import os


def is_chosen(variable="ALTER_RANK"):
    """Return whether this is the rank; asked once the ranks have met, and RANK is set."""
    return os.environ.get("RANK", "0") == os.environ.get(variable, "0")


def tell(text):
    os.write(1, f"{text}\n".encode())  # one write, so that the lines of several ranks do not mix


def instead(module, name, function):
    """Replace a function by ``function``, which gets the one before as its first argument."""
    before = getattr(module, name)

    def call(*args, **kwargs):
        return function(before, *args, **kwargs)

    setattr(module, name, call)
