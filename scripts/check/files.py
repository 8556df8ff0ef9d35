"""Keep all writing inside the copy of the script's folder, and note which rank writes what."""

import builtins
import contextlib
import ctypes
import fcntl
import functools
import io
import logging
import math
import os
import re
import shutil
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import Any

import record
import torch
from record import replaces, state

# What a function does with each of its paths: it reads what is there, or writes it.
USES = dict.fromkeys(("stat", "lstat", "access", "statvfs"), "r")
USES |= dict.fromkeys(("mkdir", "rmdir", "remove", "unlink", "truncate", "utime", "chmod"), "w")
USES |= {"rename": "ww", "replace": "ww", "symlink": "rw", "link": "rw"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OWN_HOSTS = ("localhost", socket.gethostname(), "", None, "0.0.0.0", "::1", "::")
looks: set[str] = set()  # lines that look for a folder
makes: set[str] = set()  # lines that make it then: the same, or the next ones
unwatched = record.Nested()  # while the check itself uses files


def _tell_clock(name: str) -> None:
    """Tell of a name with the time of the last minute: another rank may read another time."""
    # Rank 0 may have sent the name, or a parent may have given it to its processes.
    is_shared = state.has_broadcast or state.mode == "spawn"
    for ago in (0, 60) if not is_shared else ():
        now = time.localtime(time.time() - ago)
        pattern = time.strftime(r"((%m|%b)\W?%d|%d\W?(%m|%b)).{0,6}%H\D?%M", now)
        if re.search(pattern, name) and not re.search(rf"rank\D?{state.rank}(?!\d)", name):
            record.tell("named by the clock", same=re.sub(r"\d+", "", name), name=name)


def place_of(path: Any, use: str) -> Any:
    """Return the path that the script gets instead: the same one, or its twin in the copy."""
    if unwatched.depth or not state.process or not isinstance(path, str | bytes | os.PathLike):
        return path
    with unwatched:
        real = os.path.realpath(os.fsdecode(path))
        _tell_clock(name_of(real))
        twin = f"{state.root}/outside{real}"
        is_inside = f"{real}/".startswith((f"{state.place}/", "/dev/", "/proc/"))
        if is_inside or (use != "w" and not os.path.lexists(twin)):
            return path
        if use == "w" and not os.path.lexists(twin):
            record.tell("redirected", what=os.path.dirname(real))
            os.makedirs(os.path.dirname(twin), exist_ok=True)
            if os.path.isfile(real):
                shutil.copyfile(real, twin)
            elif os.path.isdir(real):
                os.makedirs(twin)
    return twin


def name_of(path: Any) -> str:
    """Return a path as the verdict shows it. A file and its twin have the same name."""
    with unwatched:
        real = os.path.realpath(os.fsdecode(path))
    real = real.removeprefix(f"{state.root}/outside")  # the twin of what lies outside
    if real.startswith(f"{state.place}/"):  # perhaps beside the copy
        return os.path.relpath(real, state.root)
    return real.removeprefix(f"{state.home}/")


def _redirected(uses: str, real: Any, *args: Any, **keywords: Any) -> Any:
    line = next(record.frames(), "") if looks and not unwatched.depth else ""
    if keywords.get("dir_fd") is not None:  # a name in a folder that is open
        return real(*args, **keywords)
    paths = [place_of(path, use) for path, use in zip(args, uses, strict=False)]
    if line in looks:
        with unwatched:  # it may be there from another run of the script
            made = os.path.getctime(paths[0]) if os.path.exists(paths[0]) else math.inf
        is_new = state.began < made < math.inf
        record.tell("every rank makes a folder", same=line, missing=not is_new)
    try:
        return real(*paths, *args[len(uses) :], **keywords)
    except FileExistsError:
        # All ranks play the one parent that makes it. And a race is a finding, and no accident.
        if real.__name__ == "mkdir" and (state.is_parent or line in makes):
            return None
        raise


for _name, _uses in USES.items():
    replaces(os, name=_name)(functools.partial(_redirected, _uses))


@replaces(shutil)
def rmtree(real: Any, path: Any, *args: Any, **keywords: Any) -> None:
    if next(record.frames(), "") and not unwatched.depth:
        record.tell("every rank deletes", same=name_of(path), path=name_of(path))
    real(path, *args, **keywords)


class Entries:
    """The entries of a folder and of its twin, used as what ``os.scandir`` returns."""

    def __init__(self, found: Iterable[Any]) -> None:
        self.found = iter(found)

    def __next__(self) -> Any:
        return next(self.found)

    def __enter__(self) -> Any:
        return self

    __iter__ = __enter__

    def __exit__(self, *error: object) -> None:
        pass


@replaces(os)
def scandir(real: Any, path: Any = ".") -> Any:
    """List a folder with what was written into its twin."""
    twin = place_of(path, "r")
    with unwatched:
        folders = [folder for folder in (path, twin) if os.path.isdir(folder)]
    if twin is path or not folders:
        return real(twin)
    return Entries({entry.name: entry for folder in folders for entry in real(folder)}.values())


@replaces(os)
def listdir(real: Any, path: Any = ".") -> list[Any]:
    if type(path) is int or path is None:  # the number of an open folder, or the current one
        return real(path)
    return [entry.name for entry in os.scandir(path)]


@replaces(os, name="open")
def open_number(real: Any, path: Any, flags: int, *args: Any, **keywords: Any) -> Any:
    return real(place_of(path, "w" if flags & WRITING else "r"), flags, *args, **keywords)


@replaces(builtins, io, name="open")
def open_file(real: Any, file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
    path = place_of(file, "w" if set(mode) & set("wax+") else "r")
    opened = real(path, mode, *args, **keywords)
    if mode[0] in "wxa" and path is not None and isinstance(file, str | os.PathLike):
        name = name_of(file)
        # The handlers of the ranks may have levels at which only one of them writes: see emit.
        caller = sys._getframe(2).f_globals.get("__name__")
        is_own = name.endswith("lock") or caller == "logging"
        is_own |= bool(re.search(r"(^|/)(\.[^./]|__py)|^\.$", name))
        if re.search(rf"(rank|part|gpu|proc)\w*?_?{state.rank}\b", name):  # of its results, perhaps
            record.tell("writes a part")
        if next(record.frames(), "") and not unwatched.depth and not is_own and name[0] != "/":
            if mode[0] == "a":  # it may stay as it is
                opened.write = functools.partial(_append, opened.write, name)
            else:
                record.tell("every rank saves", level="WARN", same=name, path=name)
    return opened


@replaces(builtins)
def print(real: Any, *args: Any, **keywords: Any) -> None:
    """Be of the type of ``open``: some scripts replace ``print`` only as long as it is so."""
    real(*args, **keywords)


def _append(real: Any, name: str, text: Any) -> int:
    record.tell("every rank logs", level="NOTE", same=name, name=name)
    return real(text)


@replaces(logging.FileHandler)
def emit(real: Any, self: Any, entry: Any) -> None:
    if next(record.frames(), ""):
        name = name_of(self.baseFilename)
        level = "NOTE" if self.mode == "a" else "WARN"
        record.tell("every rank logs", level=level, same=name, name=name)
    real(self, entry)


with contextlib.suppress(ImportError):
    import pyarrow

    @replaces(pyarrow)
    def memory_map(real: Any, path: Any, *args: Any, **keywords: Any) -> Any:
        """Read what a rank has written, as datasets of Hugging Face do."""
        return real(place_of(path, "r"), *args, **keywords)


@replaces(torch)
def save(real: Any, obj: Any, f: Any, *args: Any, **keywords: Any) -> None:
    """Save in one piece: ranks that save one file at once are a finding, not an accident here."""
    name = name_of(f) if isinstance(f, str | os.PathLike) else ""
    record.tell("saved")
    if not name:
        return real(obj, f, *args, **keywords)
    path = os.fspath(place_of(f, "w"))
    record.tell("every rank saves", same=name, path=name)
    with unwatched:
        real(obj, f"{path}.part{state.rank}", *args, **keywords)
        os.replace(f"{path}.part{state.rank}", path)


@replaces(torch)
def load(real: Any, f: Any, map_location: Any = None, *args: Any, **keywords: Any) -> Any:
    if isinstance(f, str | os.PathLike):
        f = place_of(f, "r")
        if not state.is_parent:  # it may go on when its ranks have ended
            record.tell("load", path=name_of(f))
    loaded = real(f, map_location if callable(map_location) else "cpu", *args, **keywords)
    record.tell("loaded", has_tensors=_has_tensors(loaded))
    return loaded


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_has_tensors, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor | torch.nn.Module)


def _audit(event: str, args: Any) -> None:
    """Refuse the network, and note that under a file lock, as of filelock, a rank is alone."""
    if event in ("fcntl.flock", "fcntl.lockf") and args[1] & fcntl.LOCK_EX:
        state.locked_at = state.clock
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = args if event == "socket.getaddrinfo" else args[1]
        host = address[0] if isinstance(address, tuple) else None
        if host not in OWN_HOSTS and not str(host).startswith("127."):
            raise OSError(f"the check uses no network (asked for {host})")


sys.addaudithook(_audit)


def confine() -> None:
    """Let the kernel refuse writing elsewhere, by C code and by other programs as well.

    Linux 5.19 has this, see https://docs.kernel.org/userspace-api/landlock.html.
    """
    libc = ctypes.CDLL(None)

    def call(number: int, *args: Any) -> int:
        return libc.syscall(*(ctypes.c_long(n) if type(n) is int else n for n in (number, *args)))

    version = call(444, None, 0, 1) if sys.platform == "linux" else 0
    if version < 2:
        what = "what is written outside of the copy (this system has no Landlock to refuse it)"
        return record.tell("left out", what=what)
    rights = 0x7FF2 if version > 2 else 0x3FF2  # write, remove, make, move, and truncate
    ruleset = call(444, struct.pack("Q", rights), 8, 0)
    for folder in (state.place, "/dev", "/proc"):
        call(445, ruleset, 1, struct.pack("=Qi", rights, os.open(folder, os.O_PATH)), 0)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges, which the next call demands
    call(446, ruleset, 0)
