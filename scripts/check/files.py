"""Keep all writing inside the copy of the script's folder, and note who writes and reads what."""

import builtins
import ctypes
import fcntl
import functools
import io
import os
import shutil
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

import bounds
import record
import torch
from record import replaces, state

# What each path of a function is for: to read or to write what a link leads to, or to change the
# name alone.
USES = dict.fromkeys(("stat", "lstat", "access", "listdir", "scandir"), "r")
USES |= dict.fromkeys(("chmod", "utime", "truncate"), "w")
USES |= dict.fromkeys(("mkdir", "rmdir", "remove", "unlink"), "n")
USES |= {"rename": "nn", "replace": "nn", "link": "rn", "symlink": "rn"}
REMOVING = {"os.remove": 1, "os.rmdir": 1, "os.rename": 2}  # their paths, before folders' numbers
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
LARGE = 2**24  # bytes of a file that is not copied before it is changed
OWN_HOSTS = ("localhost", socket.gethostname(), "", None, "0.0.0.0", "::1", "::")
PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_saved: set[str] = set()
_asked: dict[str, int] = {}  # whether files are there: the clock of the last time
unwatched = record.Nested()  # while the check itself touches files


def _real(path: Any, use: str = "r") -> str:
    """Return the absolute path without links, the last of which may be meant itself."""
    with unwatched:
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        real = os.path.join(os.path.realpath(folder), name)
        return real if use == "n" else os.path.realpath(real)


def _is_in_copy(real: str) -> bool:
    return f"{real}/".startswith((f"{state.root}/", "/dev/", "/proc/"))


def place_of(path: Any, use: str) -> Any:
    """Return where the check wants a path: the same, or its twin in the copy."""
    if unwatched.depth or not isinstance(path, str | bytes | os.PathLike):
        return path
    real = _real(path, use)
    twin = f"{state.root}/outside{real}"
    with unwatched:
        has_twin = os.path.lexists(twin)
        if _is_in_copy(real) or (use == "r" and (os.path.isdir(real) or not has_twin)):
            return path
        if not has_twin:
            if not _is_in_copy(_real(path, "n")):  # as a link in the copy is
                record.tell("redirected", what=os.path.dirname(real))
            os.makedirs(os.path.dirname(twin), exist_ok=True)
            if os.path.isfile(real) and os.path.getsize(real) < LARGE:
                shutil.copyfile(real, twin)
    return twin


def name_of(path: Any, use: str = "r") -> str:
    """Return a path as the verdict shows it, the same on all ranks, and for a twin."""
    return _real(path, use).removeprefix(f"{state.root}/outside").removeprefix(f"{state.root}/")


def redirected(uses: str, real: Any, *args: Any, **keywords: Any) -> Any:
    paths = [place_of(path, use) for path, use in zip(args, uses, strict=False)]
    if uses == "r" and not unwatched.depth and args and isinstance(args[0], str | os.PathLike):
        _asked[name_of(args[0])] = state.clock
    return real(*paths, *args[len(uses) :], **keywords)


for _name, _uses in USES.items():
    replaces(os, name=_name)(functools.partial(redirected, _uses))


@replaces(shutil)
def rmtree(real: Any, path: Any, *args: Any, **keywords: Any) -> None:
    """Remove what the script wrote. Of what lies elsewhere, only the twin."""
    path = place_of(path, "n")
    with unwatched:  # since it works relative to a folder's number
        real(path, ignore_errors=True)


@replaces(os, name="open")
def open_number(real: Any, path: Any, flags: int, *args: Any, **keywords: Any) -> Any:
    return real(place_of(path, "w" if flags & WRITING else "r"), flags, *args, **keywords)


@replaces(builtins, io, name="open")
def open_file(real: Any, file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
    if unwatched.depth or isinstance(file, int):
        return real(file, mode, *args, **keywords)
    path, name = place_of(file, "w" if set(mode) & set("wax+") else "r"), name_of(file)
    if record.called_by_script() and mode[0] == "r" and not _is_of_system(name):
        _tell_load(name, level="WARN")
    return real(path, mode, *args, **keywords)


def _is_of_system(name: str) -> bool:
    """Whether a file is a device, or lies in a hidden folder, as a cache does."""
    hidden = any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))
    return hidden or name.startswith(("/dev/", "/proc/"))


def _tell_load(name: str, **facts: Any) -> None:
    # Who has asked whether the file is there, or has slept, may have waited for it.
    if _asked.get(name) == state.clock or state.slept == state.clock:
        facts["level"] = "WARN"
    record.tell("load", path=name, **facts)


@replaces(time)
def sleep(real: Any, seconds: float) -> None:
    state.slept = state.clock
    real(seconds)


@replaces(torch)
def save(real: Any, obj: Any, f: Any, *args: Any, **keywords: Any) -> None:
    """Save in one piece: ranks that save one file at once are a finding, not an accident here."""
    if not isinstance(f, str | os.PathLike):
        return real(obj, f, *args, **keywords)
    parts = [obj, *obj.values()] if isinstance(obj, Mapping) else [obj]
    parts = [part for part in parts if isinstance(part, Mapping) and part]
    if any(all(str(key).startswith("module.") for key in part) for part in parts):
        record.tell("module. in keys")
    name, path = name_of(f), os.fspath(place_of(f, "w"))
    _saved.add(name)
    record.tell("every rank saves", same=name, path=name, how="torch.save")
    with unwatched:
        real(obj, f"{path}.part{state.rank}", *args, **keywords)
        os.replace(f"{path}.part{state.rank}", path)


@replaces(torch)
def load(real: Any, f: Any, map_location: Any = None, *args: Any, **keywords: Any) -> Any:
    is_older = False
    if isinstance(f, str | os.PathLike):
        name = name_of(f)
        _tell_load(name)
        f, is_older = place_of(f, "r"), name not in _saved
        with unwatched:
            is_older = os.path.exists(f) and os.path.getmtime(f) < state.began
    found = real(f, map_location if callable(map_location) else "cpu", *args, **keywords)
    return bounds.begun_again(found) if is_older else found


def _lock(real: Any, file: Any, operation: int, *args: Any) -> Any:
    """Note locks, as those of the package filelock. Closing the file ends them, too."""
    result = real(file, operation, *args)
    descriptor = file if isinstance(file, int) else file.fileno()
    found = os.fstat(descriptor)
    record.locks.pop(descriptor, None)
    if operation & fcntl.LOCK_EX:
        record.tell("lock file", path=name_of(f"/proc/self/fd/{descriptor}"))
        record.locks[descriptor] = (found.st_dev, found.st_ino)
    return result


replaces(fcntl, name="flock")(_lock)
replaces(fcntl, name="lockf")(_lock)


def _tell_write(path: str, flags: int) -> None:
    """Tell that a file is written from its beginning: by the script, or by what it calls."""
    name = name_of(path)
    is_new = flags & WRITING and flags & (os.O_TRUNC | os.O_EXCL)
    if is_new and next(record.frames(), "") and not _is_of_system(name):
        record.tell("every rank saves", level="WARN", same=name, path=name, how="open")


def _audit(event: str, args: Any) -> None:
    """Refuse what no redirection catches: programs, the network, and changes elsewhere."""
    if event in PROGRAMS:
        record.tell("left out", what="other programs that the script starts")
        raise OSError("the check starts no other programs")
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = args if event == "socket.getaddrinfo" else args[1]
        host = address[0] if isinstance(address, tuple) else None
        if host not in OWN_HOSTS and not str(host).startswith("127."):
            raise OSError(f"the check uses no network (asked for {host})")
    changed = []
    if event in REMOVING and not unwatched.depth:
        paths, folders = args[: REMOVING[event]], args[REMOVING[event] :]
        if any(folder != -1 for folder in folders):
            raise PermissionError("the check changes no files relative to a folder's number")
        changed = [_real(path, "n") for path in paths]
        if event == "os.rename" and name_of(paths[0]) in _saved:
            record.tell("renamed", path=name_of(paths[1], "n"))
    elif event == "open" and isinstance(args[0], str) and args[2] and args[2] & WRITING:
        changed = [_real(args[0])]
        if not unwatched.depth:
            _tell_write(args[0], args[2])
    for real in changed:
        if not _is_in_copy(real):
            raise PermissionError(f"the check writes only into its own copy, not to {real}")


sys.addaudithook(_audit)


def confine() -> None:
    """Let the kernel refuse changes elsewhere by C code, which asks no Python function.

    Linux 5.19 has this, see https://docs.kernel.org/userspace-api/landlock.html.
    """
    libc = ctypes.CDLL(None)

    def call(number: int, *args: Any) -> int:
        return libc.syscall(*(ctypes.c_long(n) if type(n) is int else n for n in (number, *args)))

    version = call(444, None, 0, 1) if sys.platform == "linux" else 0
    if version < 2:
        what = "what C code writes outside of the copy (this system has no Landlock to refuse it)"
        return record.tell("left out", what=what)
    rights = 0x7FF2 if version > 2 else 0x3FF2  # write, remove, make, move, and truncate
    ruleset = call(444, struct.pack("Q", rights), 8, 0)
    for folder in (state.root, "/dev", "/proc"):
        call(445, ruleset, 1, struct.pack("=Qi", rights, os.open(folder, os.O_PATH)), 0)
    libc.prctl(38, 1, 0, 0, 0)  # without new privileges, as the next call wants it
    call(446, ruleset, 0)
