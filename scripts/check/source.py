"""Run the script's own files with fewer epochs, smaller batches, and nothing that shows them.

Numbers are bounded by their names: where they are written, and where argparse returns them. Lines
keep their numbers.
"""

import argparse
import importlib.machinery as machinery
import importlib.util
import re
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import record
import torch
from record import around, state

COUNT = "(num|n|nr|no|max|total|nb|train|training|end|final)_?(of_|train_|training_)?"
NUMBERS = {  # what a number is called, and the most that it may be
    r"warm_?up(_?(epochs?|steps?|iters?|iterations?))?": 1,
    f"({COUNT})?epochs?": 2,
    f"({COUNT})(steps?|iters?|iterations?)|iterations": 12,
    r".*accum.*": 2,
    r"(.*_)?(batch_?size|bsz?)": 8,
    r"(save|ckpt|checkpoint|eval|val|test)\w*(every|freq|interval|epochs?)": 1,
}
# NAME = 3, NAME=3, NAME: int = 3, "NAME": 3, and the end of a loop over epochs.
WRITTEN = re.compile(r"""\b(\w+)((?:["']\s*:|\s*(?::\s*int\s*)?=)\s*)(\d+)\b(?![\w.]|\s*\*)""")
LOOP = re.compile(r"(\bfor ep\w* in .*?\brange\()(\d+)(?=\))")
FOREIGN = "pytorch_lightning|lightning|accelerate|deepspeed|horovod|colossalai|ray"
TRACKERS = ["torch.utils.tensorboard", "tensorboardX", "wandb", "visdom", "comet_ml", "neptune"]
TRACKERS += ["mlflow", "mlflow.pytorch", "swanlab"]


def bounded(name: str, value: Any) -> Any:
    """Return a number of the training, by its name, as small as the check wants it."""
    for pattern, most in NUMBERS.items() if type(value) is int else ():
        if re.fullmatch(pattern, name.replace("-", "_"), re.I):
            # One epoch becomes two: the second shows whether its order differs from the first's.
            is_one = (most, value) == (2, 1) and name.lower().endswith("epochs")
            return 2 if is_one else min(value, most)
    return value


def compiled(data: Any, path: str) -> types.CodeType:
    """Compile a file of the script, with its numbers bounded."""
    text = importlib.util.decode_source(data)
    if found := re.search(rf"^(?:import|from) ({FOREIGN})\b", text, re.M):
        record.leave("not judged", message=f"it uses {found[1]}, which is not judged")
    text = WRITTEN.sub(lambda m: m[1] + m[2] + str(bounded(m[1], int(m[3]))), text)
    text = LOOP.sub(lambda m: m[1] + str(bounded("epoch", int(m[2]))), text)  # 1 stays 1
    return compile(text, path, "exec", dont_inherit=True)


@around(machinery.SourceFileLoader)
def source_to_code(real: Any, self: Any, data: Any, path: Any, **keywords: Any) -> Any:
    is_own = str(path).startswith(state.root)
    return compiled(data, str(path)) if is_own else real(self, data, path, **keywords)


def tracker(name: str) -> MagicMock:
    """Return a stand-in for a package that logs a training, such as TensorBoard."""

    def open_one(*args: Any, **keywords: Any) -> MagicMock:
        record.tell("every rank logs", same=name, name=name)
        return MagicMock()

    module = MagicMock(__path__=[], __spec__=machinery.ModuleSpec(name, None), __name__=name)
    for opener in ("init", "SummaryWriter", "Visdom", "start_run", "Experiment"):
        getattr(module, opener).side_effect = open_one
    return module


@around(argparse.ArgumentParser)
def parse_known_args(real: Any, self: Any, args: Any = None, namespace: Any = None) -> Any:
    args = list(sys.argv[1:] if args is None else args)
    given = {str(item).partition("=")[0] for item in args}
    for spelled in ("--local_rank", "--local-rank") if state.mode == "torchrun" else ():
        option = self._option_string_actions.get(spelled)
        if option and not given.intersection(option.option_strings):
            args.append(f"{spelled}={state.rank % state.each}")
    found, rest = real(self, args, namespace)
    vars(found).update({name: bounded(name, value) for name, value in vars(found).items()})
    return found, rest


sys.dont_write_bytecode = True
sys.modules |= {name: tracker(name) for name in TRACKERS}
torch.utils.tensorboard = sys.modules["torch.utils.tensorboard"]
