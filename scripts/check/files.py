"""Keep all writing inside the copy of the script's folder, and note who writes and reads what."""

import builtins
import contextlib
import functools
import io
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from typing import Any

import record
import torch
from record import state

READS = ["stat", "lstat", "access", "listdir", "scandir"]
WRITES = ["mkdir", "rmdir", "remove", "unlink", "utime", "chmod", "truncate"]
PAIRS = ["rename", "replace", "link", "symlink"]
WRITES += PAIRS
FREE = ("/dev/", "/proc/")
OWN_HOSTS = ("localhost", socket.gethostname(), "", None, "0.0.0.0", "::1", "::")
PROGRAMS = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec")
_real_open, _real_os_open, _real_save, _real_load = open, os.open, torch.save, torch.load
_busy = 0
_moved = False  # whether anything was written outside yet
_saved: set[str] = set()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    global _busy
    _busy += 1
    try:
        yield
    finally:
        _busy -= 1


def inside(path: Any, write: bool = False, keep: bool = False) -> Any:
    """Return where the check wants a path: the same, or its twin in the copy.

    Args:
        write: the path will be written.
        keep: what stands there already is needed, as to append to it.
    """
    global _moved
    if _busy or not isinstance(path, str | bytes | os.PathLike) or not (write or _moved):
        return path
    with plainly():
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        real = os.path.join(os.path.realpath(folder), name)
        if real.startswith(FREE):
            return path
        if real.startswith(state.root):
            target = os.path.realpath(real)
            if write and os.path.islink(real) and not target.startswith(state.root):
                os.unlink(real)
                if keep and os.path.isfile(target):
                    shutil.copyfile(target, real)
            return path
        twin = os.path.join(state.root, "outside", real.lstrip("/"))
        if not write:
            return twin if os.path.lexists(twin) else path
        _moved = True
        record.emit_once("redirected", folder, path=real)
        os.makedirs(os.path.dirname(twin), exist_ok=True)
        if keep and os.path.isfile(real) and not os.path.exists(twin):
            shutil.copyfile(real, twin)
        return twin


def name_of(path: Any) -> str:
    """Return a path as the verdict shows it, the same on all ranks."""
    with plainly():
        full = os.path.realpath(os.path.abspath(os.fsdecode(path)))
    return os.path.relpath(full, state.root) if full.startswith(state.root) else full


def _wrap(name: str, write: bool) -> None:
    real = getattr(os, name)

    @functools.wraps(real)
    def function(path: Any = ".", *args: Any, **keywords: Any) -> Any:
        if name in PAIRS and args and not _busy:
            if name in ("rename", "replace") and name_of(path) in _saved:
                record.emit("save", path=name_of(args[0]), wrapped=False, renamed=True)
            args = (inside(args[0], write), *args[1:])
        return real(inside(path, write and name != "symlink", keep=True), *args, **keywords)

    setattr(os, name, function)


def _open(file: Any, mode: str = "r", *args: Any, **keywords: Any) -> Any:
    if _busy or isinstance(file, int):
        return _real_open(file, mode, *args, **keywords)
    writes = any(letter in mode for letter in "wax+")
    path = inside(file, writes, keep="a" in mode or "+" in mode)
    if record.called_by_script() and not state.is_parent:
        record.emit("write" if writes else "read", path=name_of(path), mode=mode)
    return _real_open(path, mode, *args, **keywords)


def _os_open(path: Any, flags: int, *args: Any, **keywords: Any) -> Any:
    writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return _real_os_open(inside(path, writes, not flags & os.O_TRUNC), flags, *args, **keywords)


def _save(obj: Any, f: Any, *args: Any, **keywords: Any) -> None:
    """Save in one piece: ranks that write one file at once are a finding, not an accident here."""
    buffer = io.BytesIO()
    _real_save(obj, buffer, *args, **keywords)
    path: Any = f if isinstance(f, str | os.PathLike) else getattr(f, "name", None)
    if isinstance(path, str | os.PathLike):
        parts = [p for p in (obj, *getattr(obj, "values", list)()) if isinstance(p, dict) and p]
        wrapped = any(all(str(key).startswith("module.") for key in part) for part in parts)
        path = inside(path, write=True)
        _saved.add(name_of(path))
        record.emit("save", path=name_of(path), wrapped=wrapped)
    if path is not f and not isinstance(f, str | os.PathLike):
        f.write(buffer.getvalue())
        return
    with plainly():
        part = f"{os.fspath(path)}.part{state.rank}"
        with _real_open(part, "wb") as file:
            file.write(buffer.getvalue())
        os.replace(part, path)


def _load(f: Any, *args: Any, **keywords: Any) -> Any:
    if isinstance(f, str | os.PathLike):
        f = inside(f)
        record.emit("read", path=name_of(f), mode="load")
    return _real_load(f, *args, **keywords)


def _audit(event: str, args: Any) -> None:
    """Refuse what no redirection catches: programs, the network, and writing elsewhere."""
    if event in PROGRAMS:
        record.left_out("other programs that the script starts")
        raise OSError("the check starts no other programs")
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = args[event == "socket.connect"]
        if not isinstance(host, tuple) and event == "socket.connect":
            return
        host = host[0] if isinstance(host, tuple) else host
        if host not in OWN_HOSTS and not str(host).startswith("127."):
            raise OSError(f"the check uses no network (asked for {host})")
    if event != "open" or _busy or not isinstance(args[0], str | bytes):
        return
    if isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        with plainly():
            full = os.path.realpath(os.fsdecode(args[0]))
        if not full.startswith((state.root, *FREE)):
            raise PermissionError(f"the check writes only into its own copy, not to {full}")


def install() -> None:
    global _real_load
    _real_load = torch.load  # with its devices mapped
    for name in [*READS, *WRITES]:
        _wrap(name, name in WRITES)
    os.open = _os_open
    builtins.open = io.open = _open  # type: ignore[assignment]
    torch.save, torch.load = _save, _load
    sys.addaudithook(_audit)
