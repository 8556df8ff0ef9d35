"""Callables that a flag names as ``module:name``: a model or data in a module of the user's own."""

import argparse
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection
from typing import Any

from utils.errors import UsageError, describe

FORM = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")
LISTED = 8  # names of a module at most
LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")})


def is_own(text: str) -> bool:
    """Return whether a flag's value names a callable of the user's own."""
    return ":" in text


def name_in(known: Collection[str], file: str, example: str) -> Callable[[str], str]:
    """Return an argparse type: one of the ``known`` names, or ``module:name``.

    Nothing is imported yet.

    Args:
        file: where the known names stand, for a message.
        example: a value of the second kind.
    """

    def parse(text: str) -> str:
        if text in known or FORM.fullmatch(text):
            return text
        raise argparse.ArgumentTypeError(
            f"{text[:50]!r} is none of {', '.join(known)} (in {file}), nor a module and a callable"
            f" in it, such as {example}"
        )

    return parse


def call(flag: str, text: str, *args: Any) -> Any:
    """Import the module of ``module:name``, and return what the callable returns for ``args``.

    The module is also looked for in the current folder, which stays the last place where Python
    looks: the module may import others when it is called, and so may a loader worker.

    Args:
        flag: for messages.
        text: the flag's value.

    Raises:
        UsageError: there is no such module or callable, its import fails, or it takes other
            arguments. An error in the call itself passes as it is.
    """
    module_name, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise UsageError(
                f"{flag} {text}: there is no module {missing} in {os.getcwd()}, nor among the"
                " installed ones: is it misspelt, or in another folder?"
            ) from None
        raise UsageError(f"{flag} {text}: {_find_line(error)}: {describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        where = getattr(module, "__file__", None) or "a folder"
        raise UsageError(
            f"{flag} {text}: {module_name} ({where}) has no {name} to call, but"
            f" {', '.join(_callables_of(module)) or 'nothing else either'}"
        )
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        given = ", ".join(map(repr, args)) or "no arguments"
        raise UsageError(f"{flag} {text} is called with {given}: {error}") from None
    except ValueError:  # written in C, it tells no signature
        pass
    return function(*args)


def _callables_of(module: Any) -> list[str]:
    """Return the names of what a module defines itself, or, if that is nothing, has imported."""
    found = {k: v for k, v in vars(module).items() if callable(v) and not k.startswith("_")}
    own = [k for k, v in found.items() if getattr(v, "__module__", None) == module.__name__]
    return (own or [*found])[:LISTED]


def _find_line(error: Exception) -> str:
    """Return the last line outside of the libraries that led to an error of an import."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)[1:]
    frames = [frame for frame in frames if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}"
