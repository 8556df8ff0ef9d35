"""Keep all writing inside the copy of the script's folder, and note who writes and reads what."""

import builtins
import contextlib
import io
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from typing import Any

import record
import torch
from record import around, state

READS = ("stat", "lstat", "access", "listdir", "scandir")
# Those that follow a link to a file of the user's, those that do not, and those of two paths.
FOLLOW = ("utime", "chmod", "truncate")
PAIRS = ("rename", "replace", "link", "symlink")
WRITES = (*FOLLOW, *PAIRS, "mkdir", "rmdir", "remove", "unlink")
GUARDED = ("os.remove", "os.rmdir", "os.rename", "shutil.rmtree")  # also relative to a folder's fd
FREE = ("/dev/", "/proc/")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
LARGE = 2**24  # bytes of a file that is not copied before it is changed
OWN_HOSTS = ("localhost", socket.gethostname(), "", None, "0.0.0.0", "::1", "::")
PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_saved: set[str] = set()
_busy = 0
_moved = False  # whether anything was written outside yet


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    global _busy
    _busy += 1
    try:
        yield
    finally:
        _busy -= 1


def _copied(source: str, target: str) -> None:
    if os.path.isfile(source) and os.path.getsize(source) < LARGE:
        shutil.copyfile(source, target)


def inside(path: Any, write: bool = False, follow: bool = False) -> Any:
    """Return where the check wants a path: the same, or its twin in the copy."""
    global _moved
    if _busy or not isinstance(path, str | bytes | os.PathLike) or not (write or _moved):
        return path
    with plainly():
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        real = os.path.join(os.path.realpath(folder), name)
        if real.startswith((state.root, *FREE)):
            target = os.path.realpath(real)
            if follow and os.path.islink(real) and not target.startswith((state.root, *FREE)):
                os.unlink(real)
                _copied(target, real)
            return path
        twin = os.path.join(state.root, "outside", real.lstrip("/"))
        if not write:
            return twin if os.path.lexists(twin) else path
        _moved = True
        record.tell_once("redirected", folder)
        os.makedirs(os.path.dirname(twin), exist_ok=True)
        if not os.path.lexists(twin):
            _copied(real, twin)
        return twin


def name_of(path: Any) -> str:
    """Return a path as the verdict shows it, the same on all ranks."""
    with plainly():
        full = os.path.realpath(os.path.abspath(os.fsdecode(path)))
    return os.path.relpath(full, state.root) if full.startswith(state.root) else full


def _wrap(name: str) -> None:
    def function(real: Any, path: Any = ".", *args: Any, **keywords: Any) -> Any:
        if name in PAIRS and args and not _busy:
            args = (inside(args[0], write=True), *args[1:])
            if name in ("rename", "replace") and name_of(path) in _saved:
                record.tell("renamed", path=name_of(args[0]))
        here = path if name == "symlink" else inside(path, name in WRITES, name in FOLLOW)
        return real(here, *args, **keywords)

    around(os, name=name)(function)


for each in (*READS, *WRITES):
    _wrap(each)


@around(shutil)
def rmtree(real: Any, path: Any, *args: Any, **keywords: Any) -> Any:
    """Remove what the script wrote. Of what lies elsewhere, only the twin."""
    twin = inside(path, write=True)
    return real(twin, *args, **keywords) if twin == path or os.path.lexists(twin) else None


@around(os, name="open")
def open_number(real: Any, path: Any, flags: int, *args: Any, **keywords: Any) -> Any:
    writes = bool(flags & WRITING)
    return real(inside(path, writes, writes), flags, *args, **keywords)


@around(builtins, io, name="open")
def open_file(real: Any, file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
    if _busy or isinstance(file, int):
        return real(file, mode, *args, **keywords)
    writes = any(letter in mode for letter in "wax+")
    path, name = inside(file, writes, writes), name_of(file)
    if record.called_by_script() and not name.startswith(FREE):
        if mode[0] in "wx":
            record.tell("every rank writes", same=(name, state.node), path=name)
        elif mode[0] == "r":
            record.tell("load", path=name, sure=False)
    return real(path, mode, *args, **keywords)


@around(torch)
def save(real: Any, obj: Any, f: Any, *args: Any, **keywords: Any) -> None:
    """Save in one piece: ranks that write one file at once are a finding, not an accident here."""
    path: Any = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
    if not isinstance(path, str | os.PathLike):
        return real(obj, f, *args, **keywords)
    parts = [p for p in (obj, *getattr(obj, "values", list)()) if isinstance(p, dict) and p]
    if any(all(str(key).startswith("module.") for key in part) for part in parts):
        record.tell_once("module. in keys")
    name = name_of(path)
    _saved.add(name)
    record.tell("every rank saves", same=(name, state.node), path=name)
    if path is not f:
        return real(obj, f, *args, **keywords)
    path = inside(path, write=True, follow=True)
    part = f"{os.fspath(path)}.part{state.rank}"
    with plainly(), open(part, "wb") as file:
        real(obj, file, *args, **keywords)
    with plainly():
        os.replace(part, path)


@around(torch)
def load(real: Any, f: Any, *args: Any, **keywords: Any) -> Any:
    if isinstance(f, str | os.PathLike):
        f = inside(f)
        record.tell("load", path=name_of(f), sure=True)
    return real(f, *args, **keywords)


def _audit(event: str, args: Any) -> None:
    """Refuse what no redirection catches: programs, the network, and writing elsewhere."""
    if event in PROGRAMS:
        record.tell_once("left out", "other programs that the script starts")
        raise OSError("the check starts no other programs")
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = args[event == "socket.connect"]
        if event == "socket.connect":
            host = host[0] if isinstance(host, tuple) else None
        if host not in OWN_HOSTS and not str(host).startswith("127."):
            raise OSError(f"the check uses no network (asked for {host})")
    writes = event == "open" and isinstance(args[2], int) and args[2] & WRITING
    if _busy or not (writes or event in GUARDED) or not isinstance(args[0], str | bytes):
        return
    with plainly():
        if writes:
            full = os.path.realpath(os.fsdecode(args[0]))
        else:
            base = os.readlink(f"/proc/self/fd/{args[-1]}") if args[-1] not in (None, -1) else ""
            full = os.path.realpath(os.path.dirname(os.path.join(base, os.fsdecode(args[0]))))
    if not full.startswith((state.root, *FREE)):
        raise PermissionError(f"the check writes only into its own copy, not to {full}")


sys.addaudithook(_audit)
