"""Keep all writing inside the copy of the script's folder, and note who writes and reads what."""

import builtins
import fcntl
import io
import os
import shutil
import socket
import sys
from typing import Any

import record
import torch
from record import around, state

# What each path of a function is for: to read, or to write.
USES = dict.fromkeys(("stat", "lstat", "access", "listdir", "scandir"), "r")
USES |= dict.fromkeys(("mkdir", "rmdir", "remove", "unlink", "chmod", "utime", "truncate"), "w")
USES |= {"rename": "ww", "replace": "ww", "link": "rw", "symlink": "rw"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
LARGE = 2**24  # bytes of a file that is not copied before it is changed
OWN_HOSTS = ("localhost", socket.gethostname(), "", None, "0.0.0.0", "::1", "::")
PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
OWN = (f"{state.root}/", "/dev/", "/proc/")
_saved: set[str] = set()
plainly = record.Nested()  # while the check itself touches files
_moved = False  # whether anything was written outside yet


def inside(path: Any, write: bool) -> Any:
    """Return where the check wants a path: the same, or its twin in the copy."""
    global _moved
    if plainly.depth or not isinstance(path, str | bytes | os.PathLike) or not (write or _moved):
        return path
    with plainly:
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        real = os.path.join(os.path.realpath(folder), name)
        source, is_link = os.path.realpath(real), f"{real}/".startswith(OWN)
        twin = real if is_link else os.path.join(state.root, "outside", real.lstrip("/"))
        if f"{source}/".startswith(OWN) or not (write or os.path.lexists(twin)):
            return path
        if write and is_link:  # to a file of the user's
            os.unlink(real)
        elif write:
            _moved = True
            record.tell("redirected", what=folder)
            os.makedirs(os.path.dirname(twin), exist_ok=True)
        if not os.path.lexists(twin) and os.path.isfile(source) and os.path.getsize(source) < LARGE:
            shutil.copyfile(source, twin)
        return twin


def name_of(path: Any) -> str:
    """Return a path as the verdict shows it, the same on all ranks."""
    with plainly:
        full = os.path.realpath(os.path.abspath(os.fsdecode(path)))
    return os.path.relpath(full, state.root) if full.startswith(OWN[0]) else full


def _wrap(name: str, uses: str) -> None:
    def function(real: Any, *args: Any, **keywords: Any) -> Any:
        if uses == "ww" and not plainly.depth and name_of(args[0]) in _saved:
            record.tell("renamed", path=name_of(args[1]))
        paths = [inside(path, use == "w") for path, use in zip(args, uses, strict=False)]
        return real(*paths, *args[len(uses) :], **keywords)

    around(os, name=name)(function)


for _name, _uses in USES.items():
    _wrap(_name, _uses)


@around(shutil)
def rmtree(real: Any, path: Any, *args: Any, **keywords: Any) -> None:
    """Remove what the script wrote. Of what lies elsewhere, only the twin."""
    twin = inside(path, write=True)
    with plainly:  # since it works relative to a folder's number
        if twin == path or os.path.lexists(twin):
            real(twin, *args, **keywords)


@around(os, name="open")
def open_number(real: Any, path: Any, flags: int, *args: Any, **keywords: Any) -> Any:
    return real(inside(path, bool(flags & WRITING)), flags, *args, **keywords)


@around(builtins, io, name="open")
def open_file(real: Any, file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
    if plainly.depth or isinstance(file, int):
        return real(file, mode, *args, **keywords)
    path, name = inside(file, any(letter in mode for letter in "wax+")), name_of(file)
    if record.called_by_script() and not name.startswith(OWN):
        if mode[0] in "wx":
            record.tell("every rank saves", level="WARN", same=(name, state.node), path=name)
        elif mode[0] == "r":
            record.tell("load", level="WARN", path=name)
    return real(path, mode, *args, **keywords)


@around(torch)
def save(real: Any, obj: Any, f: Any, *args: Any, **keywords: Any) -> None:
    """Save in one piece: ranks that write one file at once are a finding, not an accident here."""
    if not isinstance(f, str | os.PathLike):
        return real(obj, f, *args, **keywords)
    parts = [p for p in (obj, *getattr(obj, "values", list)()) if isinstance(p, dict) and p]
    if any(all(str(key).startswith("module.") for key in part) for part in parts):
        record.tell("module. in keys")
    name, path = name_of(f), inside(f, write=True)
    _saved.add(name)
    record.tell("every rank saves", same=(name, state.node), path=name)
    part = f"{os.fspath(path)}.part{state.rank}"
    with plainly:
        real(obj, part, *args, **keywords)
        os.replace(part, path)


@around(torch)
def load(real: Any, f: Any, map_location: Any = None, *args: Any, **keywords: Any) -> Any:
    if isinstance(f, str | os.PathLike):
        f = inside(f, write=False)
        record.tell("load", path=name_of(f))
    return real(f, map_location if callable(map_location) else "cpu", *args, **keywords)


@around(fcntl)
def flock(real: Any, file: Any, operation: int) -> None:
    """Note locks, as those of the package filelock."""
    real(file, operation)
    state.locks += -1 if operation & fcntl.LOCK_UN else 1


def _audit(event: str, args: Any) -> None:
    """Refuse what no redirection catches: programs, the network, and writing elsewhere."""
    if event in PROGRAMS:
        record.tell("left out", what="other programs that the script starts")
        raise OSError("the check starts no other programs")
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = args[event == "socket.connect"]
        if event == "socket.connect":
            host = host[0] if isinstance(host, tuple) else None
        if host not in OWN_HOSTS and not str(host).startswith("127."):
            raise OSError(f"the check uses no network (asked for {host})")
    if plainly.depth:
        return
    if event in ("os.remove", "os.rmdir", "os.rename") and args[-1] != -1:
        raise PermissionError("the check changes no files relative to a folder's number")
    if event == "open" and isinstance(args[2], int) and args[2] & WRITING:
        with plainly:
            full = os.path.realpath(os.fsdecode(args[0])) if isinstance(args[0], str) else OWN[0]
        if not f"{full}/".startswith(OWN):
            raise PermissionError(f"the check writes only into its own copy, not to {full}")


sys.addaudithook(_audit)
