"""Numbers of a script's training, by their names, as small as the check wants them.

They are bounded where they are written, in code, in a configuration or in a command, and where
argparse returns them. Lines keep their numbers.
"""

import re
from typing import Any

COUNT = "(num|n|nr|no|nb|max|total|train|training|end|final)_?(of_|train_|training_)?"
# A name of steps has to tell that they are steps of training: num_steps may be those of diffusion.
TRAINING = "((num|n|nb)_)?(max|total|train|training|end|final)_?(num_|train_|training_)?"
STEPS = "(steps?|iters?|iterations?)"
NUMBERS = {  # what a number is called, and the most that it may be
    rf"warm_?up(_?(epochs?|{STEPS}))?": 1,
    f"({COUNT})?epochs?": 2,
    f"{TRAINING}{STEPS}|(num|n|nr|no|nb)_?(of_)?(iters?|iterations?)|iterations": 12,
    f"({COUNT})?(steps?|iters?|iterations?|batches)_per_epoch": 4,
    r".*accum.*": 2,
    r"(.*_)?(batch_?size|bsz?)": 8,
    r"(save|ckpt|checkpoint|eval|val|test)\w*(every|freq|interval|epochs?)": 1,
}
WHOLE = r"(\d+(?:\.0*)?)(?![\w.]|\s*\*)"
# NAME = 3, NAME=3, NAME: int = 3, "NAME": 3, and the end of a loop over epochs.
WRITTEN = re.compile(rf"""\b(\w+)((?:["']\s*:|\s*(?::\s*(?:int|float)\s*)?=)\s*){WHOLE}""")
LOOP = re.compile(r"(\bfor ep\w* in .*?\brange\()(\d+)(?=\))")
# NAME: 3 in YAML, "NAME": 3 in JSON, NAME = 3 in TOML.
SETTING = re.compile(rf"""\b([\w-]+)(["']?\s*[:=]\s*){WHOLE}""")
COUNTER = re.compile(
    "(start_|current_|last_|cur_)?(epochs?(_run)?|global_step|step|iter|iteration)"
)


def bounded(name: str, value: Any) -> Any:
    """Return a number of the training, by its name, as small as the check wants it."""
    is_number = type(value) is int or (type(value) is float and value.is_integer())
    for pattern, most in NUMBERS.items() if is_number else ():
        if re.fullmatch(pattern, name.replace("-", "_"), re.I):
            # One epoch becomes two: the second shows whether its order differs from the first's.
            is_one = (most, value) == (2, 1) and name.lower().endswith("epochs")
            return type(value)(2 if is_one else min(value, most))
    return value


def _replaced(found: re.Match[str]) -> str:
    number = float(found[3]) if "." in found[3] else int(found[3])
    return f"{found[1]}{found[2]}{bounded(found[1], number)}"


def bounded_code(text: str) -> str:
    """Return Python code with its numbers bounded. A loop over one epoch stays as it is."""
    text = WRITTEN.sub(_replaced, text)
    return LOOP.sub(lambda found: found[1] + str(bounded("epoch", int(found[2]))), text)


def bounded_settings(text: str) -> str:
    """Return a file of settings (YAML, JSON, TOML) with its numbers bounded."""
    return SETTING.sub(_replaced, text)


def bounded_arguments(arguments: list[str]) -> list[str]:
    """Return arguments with their numbers bounded: --epochs 90, --epochs=90, epochs=90."""
    found = []
    for before, item in zip(["", *arguments], arguments, strict=False):
        name, equals, value = item.rpartition("=")
        name = name if equals else before
        is_named = bool(equals) or before.startswith("--")
        if is_named and value.isdecimal():
            last = name.lstrip("-").rpartition(".")[2]
            item = f"{name}=" if equals else ""
            item += str(bounded(last, int(value)))
        found.append(item)
    return found


def begun_again(value: Any) -> Any:
    """Return what a checkpoint holds, with the epoch and the step that it had reached set to 0.

    The check has shortened the training, so that it would be over before it goes on.
    """
    if not isinstance(value, dict):
        return value
    for name, number in value.items():
        if type(number) is int and number and COUNTER.fullmatch(str(name).lower()):
            value[name] = 0
    return value
