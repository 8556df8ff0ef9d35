"""Copy the code of the script's project, so that nothing of the user's is changed."""

import itertools
import os
import re
import shutil
from pathlib import Path

import bounds

CODE = {".py", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt"}
SETTINGS = {".yaml", ".yml", ".json", ".toml"}  # in which numbers are bounded
SKIPPED = {".git", "__pycache__", "node_modules"}
SMALL, ENTRIES = 2**20, 5000  # bytes of a file that is copied; entries that are looked at
NO_PROJECTS = (Path.home(), Path("/"), Path("/tmp"))
MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # of a project's folder
# A script that adds the folder above its own to Python's path, for a package there.
LOOKS_UP = re.compile(r"sys\.path\.(?:append|insert)\(.*(?:\.\.|parent|dirname.*dirname)")


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def home_of(script: Path, folder: Path) -> Path:
    """Return the folder to copy: the project in which the script lies, else the current folder."""
    is_below = script.is_relative_to(folder) and folder not in NO_PROJECTS
    for place in script.parents:
        is_project = any((place / mark).exists() for mark in MARKS)
        if is_project and place not in NO_PROJECTS:
            return folder if is_below and place.is_relative_to(folder) else place
    home = folder if is_below else script.parent
    above = home.parent
    if home == script.parent and above not in NO_PROJECTS and LOOKS_UP.search(text_of(script)):
        return above
    return home


def link_around(source: Path, target: Path) -> None:
    """Let ../data and ../../data lead from the copy to where they lead from the folder itself."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for real, copied in list(zip(source.parents, target.parents, strict=False))[:2]:
        listed = os.scandir(real) if real.name and os.access(real, os.R_OK) else ()
        for entry in itertools.islice(listed, ENTRIES):
            if not (copied / entry.name).exists() and entry.path != str(source):
                (copied / entry.name).symlink_to(entry.path)


def copy_code(source: Path, target: Path, *wanted: Path) -> None:
    """Copy what this user may read and is code. Link large files, data, and folders of many.

    The folders that lead to those which are wanted are copied in any case.
    """
    left, folders = ENTRIES, [(source, target)]
    for old, new in folders:  # which grows meanwhile
        new.mkdir()
        for entry in os.scandir(old):
            path, left = new / entry.name, left - 1
            if entry.name in SKIPPED or not os.access(entry.path, os.R_OK):
                continue
            if entry.is_dir(follow_symlinks=False):
                is_environment = os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
                leads_on = any(place.is_relative_to(entry.path) for place in wanted)
                if is_environment:
                    continue
                if left > 0 or leads_on:
                    folders.append((Path(entry.path), path))
                else:
                    path.symlink_to(os.path.realpath(entry.path))
            elif path.suffix in CODE and entry.is_file() and entry.stat().st_size <= SMALL:
                _copy(Path(entry.path), path)
            elif entry.is_file() or entry.is_dir():
                path.symlink_to(os.path.realpath(entry.path))


def _copy(old: Path, new: Path) -> None:
    shutil.copyfile(old, new)
    if old.suffix in SETTINGS:
        try:
            new.write_text(bounds.bounded_settings(old.read_text()))
        except UnicodeDecodeError:  # it stays as it is
            return
