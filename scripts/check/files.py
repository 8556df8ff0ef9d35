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
from typing import Any

import record
import torch
from record import around, state

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
plainly = record.Nested()  # while the check itself touches files


def _real(path: Any, use: str = "r") -> str:
    """Return the absolute path without links, the last of which may be meant itself."""
    with plainly:
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        real = os.path.join(os.path.realpath(folder), name)
        return real if use == "n" else os.path.realpath(real)


def _is_own(real: str) -> bool:
    return f"{real}/".startswith((f"{state.root}/", "/dev/", "/proc/"))


def inside(path: Any, use: str) -> Any:
    """Return where the check wants a path: the same, or its twin in the copy."""
    if plainly.depth or not isinstance(path, str | bytes | os.PathLike):
        return path
    real = _real(path, use)
    twin = f"{state.root}/outside{real}"
    with plainly:
        has_twin = os.path.lexists(twin)
        if _is_own(real) or (use == "r" and (os.path.isdir(real) or not has_twin)):
            return path
        if not has_twin:
            if not _is_own(_real(path, "n")):  # as a link in the copy is
                record.tell("redirected", what=os.path.dirname(real))
            os.makedirs(os.path.dirname(twin), exist_ok=True)
            if os.path.isfile(real) and os.path.getsize(real) < LARGE:
                shutil.copyfile(real, twin)
    return twin


def name_of(path: Any, use: str = "r") -> str:
    """Return a path as the verdict shows it, the same on all ranks, and for a twin."""
    return _real(path, use).removeprefix(f"{state.root}/outside").removeprefix(f"{state.root}/")


def redirected(uses: str, real: Any, *args: Any, **keywords: Any) -> Any:
    paths = [inside(path, use) for path, use in zip(args, uses, strict=False)]
    return real(*paths, *args[len(uses) :], **keywords)


for _name, _uses in USES.items():
    around(os, name=_name)(functools.partial(redirected, _uses))


@around(shutil)
def rmtree(real: Any, path: Any, *args: Any, **keywords: Any) -> None:
    """Remove what the script wrote. Of what lies elsewhere, only the twin."""
    path = inside(path, "n")
    with plainly:  # since it works relative to a folder's number
        real(path, ignore_errors=True)


@around(os, name="open")
def open_number(real: Any, path: Any, flags: int, *args: Any, **keywords: Any) -> Any:
    return real(inside(path, "w" if flags & WRITING else "r"), flags, *args, **keywords)


@around(builtins, io, name="open")
def open_file(real: Any, file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
    if plainly.depth or isinstance(file, int):
        return real(file, mode, *args, **keywords)
    path, name = inside(file, "w" if set(mode) & set("wax+") else "r"), name_of(file)
    if record.called_by_script() and not name.startswith(("/dev/", "/proc/")):
        if mode[0] in "wx":
            record.tell("every rank saves", level="WARN", same=(name, state.node), path=name)
        elif mode[0] == "r":
            record.tell("load", level="WARN", path=name)
    return real(path, mode, *args, **keywords)


@around(torch)
def save(real: Any, obj: Any, f: Any, *args: Any, **keywords: Any) -> None:
    """Save in one piece: ranks that save one file at once are a finding, not an accident here."""
    if not isinstance(f, str | os.PathLike):
        return real(obj, f, *args, **keywords)
    parts = [p for p in (obj, *getattr(obj, "values", list)()) if isinstance(p, dict) and p]
    if any(all(str(key).startswith("module.") for key in part) for part in parts):
        record.tell("module. in keys")
    name, path = name_of(f), os.fspath(inside(f, "w"))
    _saved.add(name)
    record.tell("every rank saves", same=(name, state.node), path=name)
    with plainly:
        real(obj, f"{path}.part{state.rank}", *args, **keywords)
        os.replace(f"{path}.part{state.rank}", path)


@around(torch)
def load(real: Any, f: Any, map_location: Any = None, *args: Any, **keywords: Any) -> Any:
    if isinstance(f, str | os.PathLike):
        record.tell("load", path=name_of(f))
        f = inside(f, "r")
    return real(f, map_location if callable(map_location) else "cpu", *args, **keywords)


@around(fcntl)
def flock(real: Any, file: Any, operation: int) -> None:
    """Note locks, as those of the package filelock."""
    real(file, operation)
    state.locks += -1 if operation & fcntl.LOCK_UN else 1


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
    if event in REMOVING and not plainly.depth:
        paths, folders = args[: REMOVING[event]], args[REMOVING[event] :]
        if any(folder != -1 for folder in folders):
            raise PermissionError("the check changes no files relative to a folder's number")
        changed = [_real(path, "n") for path in paths]
        if event == "os.rename" and name_of(paths[0]) in _saved:
            record.tell("renamed", path=name_of(paths[1], "n"))
    elif event == "open" and isinstance(args[0], str) and args[2] and args[2] & WRITING:
        changed = [_real(args[0])]
    for real in changed:
        if not _is_own(real):
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
        return
    rights = 0x7FF2 if version > 2 else 0x3FF2  # write, remove, make, move, and truncate
    ruleset = call(444, struct.pack("Q", rights), 8, 0)
    for folder in (state.root, "/dev", "/proc"):
        call(445, ruleset, 1, struct.pack("=Qi", rights, os.open(folder, os.O_PATH)), 0)
    libc.prctl(38, 1, 0, 0, 0)  # without new privileges, as the next call wants it
    call(446, ruleset, 0)
