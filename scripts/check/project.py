"""Copy the script's project, and make the numbers of its training small.

A number is bounded by its name: where the code or a file of settings writes it, where the command
gives it, and where argparse returns it.
"""

import itertools
import os
import re
import shutil
from pathlib import Path
from typing import Any

CODE = {".py", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt"}
SETTINGS = {".yaml", ".yml", ".json", ".toml"}  # files in which numbers are bounded
SKIPPED = {"__pycache__", "node_modules"}
LINKED = {".git"}  # so that `git rev-parse` works, as many scripts call it
SMALL = 2**20  # bytes of the largest file that is copied
ENTRIES = 5000  # entries that are visited
NO_PROJECTS = (Path.home(), Path("/"), Path("/tmp"))
MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")  # names in a project's own folder

COUNT = "(num|n|nr|no|nb|max|total|train|training|end|final)_?(of_|train_|training_)?"
# A name with "steps" has to say that they are steps of training: num_steps may be a diffusion's.
TRAINING = "((num|n|nb)_)?(max|total|train|training|end|final)_?(num_|train_|training_)?"
STEPS = "(steps?|iters?|iterations?)"
INTERVALS = "every|freq(uency)?|interval"
# A batch's own size, and not the size of all of them together, from which scripts compute others.
BATCHES = r"(?!total|global|effective)(.*_)?(batch_?size|bsz?)"
EPOCHS = f"({COUNT})?epochs?"
BOUNDS = {  # what a number is called, and the most that it may be
    rf"warm_?up(_?(epochs?|{STEPS}))?": 1,
    EPOCHS: 2,
    f"{TRAINING}{STEPS}|(num|n|nr|no|nb)_?(of_)?(iters?|iterations?)|iterations": 12,
    f"({COUNT})?(steps?|iters?|iterations?|batches)_per_epoch": 4,
    r".*accum.*": 2,
    BATCHES: 4,
    rf"(save|ckpt|checkpoint|eval|val|test)\w*({INTERVALS}|epochs?|batches|{STEPS})": 2,
}
changed: dict[str, str] = {}  # what was bounded, by its name
WHOLE = r"(\d+(?:\.0*)?)(?![\w.]|\s*\*)"
# NAME = 3, NAME: int = 3, "NAME": 3, and the end of a loop over epochs.
WRITTEN = re.compile(rf"""\b(\w+)((?:["']\s*:|\s*(?::\s*(?:int|float)\s*)?=)\s*){WHOLE}""")
LOOP = re.compile(r"(\bfor ep\w* in .*?\brange\()(\d+)(?=\))")
# NAME: 3 in YAML, "NAME": 3 in JSON, NAME = 3 in TOML, and --NAME=3 in a command.
SETTING = re.compile(rf"""\b([\w-]+)(["']?\s*[:=]\s*){WHOLE}""")


def bound(world: int, is_small: bool) -> None:
    """Set the bounds for a number of ranks, by which scripts may divide. Large runs have none."""
    BOUNDS[BATCHES] = 2 * world
    if not is_small:
        BOUNDS.clear()


def bounded(name: str, value: Any) -> Any:
    """Return a number of the training, by its name, as small as the check wants it."""
    is_number = type(value) is int or (type(value) is float and value.is_integer())
    for pattern, most in BOUNDS.items() if is_number else ():
        if re.fullmatch(pattern, name.replace("-", "_"), re.I):
            # One epoch becomes two: the second one shows whether it has another order.
            is_one = pattern == EPOCHS and value == 1 and name.lower().endswith("epochs")
            small = type(value)(2 if is_one else min(value, most))
            if small != value:
                changed[name] = f"{name} {value} to {small}"
            return small
    return value


def _replaced(found: re.Match[str]) -> str:
    number = float(found[3]) if "." in found[3] else int(found[3])
    return f"{found[1]}{found[2]}{bounded(found[1], number)}"


def bounded_code(text: str) -> str:
    """Return Python code with its numbers bounded. A loop over one epoch stays as it is."""
    text = WRITTEN.sub(_replaced, text)
    return LOOP.sub(lambda found: found[1] + str(bounded("epoch", int(found[2]))), text)


def bounded_arguments(arguments: list[str]) -> list[str]:
    """Return a command's arguments with the numbers bounded that follow a name."""
    found = [SETTING.sub(_replaced, argument) for argument in arguments]
    for at, (name, value) in enumerate(itertools.pairwise(arguments), start=1):
        if name.startswith("--") and value.isdecimal():
            found[at] = str(bounded(name[2:], int(value)))
    return found


def text_of(path: Path) -> str:
    """Return the text of a file, or an empty one if it is not there, or its process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def home_of(script: Path, folder: Path) -> Path:
    """Return the folder to copy: the project in which the script lies, else the current folder."""
    is_below = script.is_relative_to(folder) and folder not in NO_PROJECTS
    for place in script.parents:
        is_project = any((place / mark).exists() for mark in MARKS)
        if is_project and place not in NO_PROJECTS:
            return folder if is_below and place.is_relative_to(folder) else place
    return folder if is_below else script.parent


def copy(source: Path, target: Path, wanted: list[Path]) -> None:
    """Copy code and settings, and link the rest: data, large files, and folders of many entries.

    ``wanted`` are paths whose folders have to be copied. ../data and ../../../data lead from the
    copy to where they lead from the folder itself.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    left = ENTRIES
    folders = [(source, target)]
    for old, new in folders:  # a list that grows meanwhile
        new.mkdir()
        for entry in os.scandir(old):
            path = new / entry.name
            left -= 1
            is_environment = os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
            if entry.name in SKIPPED or is_environment or not os.access(entry.path, os.R_OK):
                continue
            leads_on = any(place.is_relative_to(entry.path) for place in wanted)
            is_copied = entry.name not in LINKED and (left > 0 or leads_on)
            if entry.is_dir(follow_symlinks=False) and is_copied:
                folders.append((Path(entry.path), path))
            elif entry.is_file() and path.suffix in CODE and entry.stat().st_size <= SMALL:
                shutil.copyfile(entry.path, path)
                if path.suffix in SETTINGS:
                    path.write_text(SETTING.sub(_replaced, text_of(path)))
            elif entry.is_file() or entry.is_dir():
                path.symlink_to(os.path.realpath(entry.path))
    for real, copied in list(zip(source.parents, target.parents, strict=False))[:3]:
        for beside in itertools.islice(real.iterdir() if real.name else (), ENTRIES):
            if not (copied / beside.name).exists() and beside != source:
                (copied / beside.name).symlink_to(beside)
