"""Run the script's own files with fewer epochs, smaller batches, and no package that only shows.

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
from record import state

COUNT = "(num|n|nr|no|max|total|nb|train|training|end|final)_?(of_|train_|training_)?"
NUMBERS = [  # what a number is called, and the most that it may be
    (re.compile(name, re.I), most)
    for name, most in (
        (r"warm_?up(_?(epochs?|steps?|iters?|iterations?))?$", 1),
        (f"({COUNT})?epochs?$", 2),
        (f"({COUNT})(steps?|iters?|iterations?)$|iterations$", 12),
        (".*accum", 2),
        ("(.*_)?(batch_?size|bsz?)$", 8),
        (r"(save|ckpt|checkpoint|eval|val|test)\w*(every|freq|interval|epochs?)$", 1),
    )
]
# NAME = 3, NAME=3, NAME: int = 3, "NAME": 3, and the end of a loop over epochs.
WRITTEN = re.compile(r"""\b(\w+)((?:["']\s*:|\s*(?::\s*int\s*)?=)\s*)(\d+)\b(?![\w.]|\s*\*)""")
LOOP = re.compile(r"(\bfor ep\w* in .*?\brange\()(\d+)(?=\))")
FOREIGN = "pytorch_lightning|lightning|accelerate|deepspeed|horovod|colossalai|ray"
TRACKERS = ["tensorboardX", "wandb", "visdom", "mlflow", "neptune", "comet_ml", "swanlab"]
# What training can do without, if it is not installed: it returns nothing to compute with.
SHOWS = ["matplotlib", "seaborn", "torchsummary", "torchinfo", "thop", "rich", "prettytable"]
SHOWS += ["gpustat", "pynvml", "coloredlogs", "colorlog", "termcolor", "colorama", "torchviz"]


def bounded(name: str, value: Any) -> Any:
    """Return a number of the training, by its name, as small as the check wants it."""
    for pattern, most in NUMBERS if type(value) is int else ():
        if pattern.match(name.replace("-", "_")):
            # One epoch more: a second one shows whether its order differs from the first's.
            one_epoch = most == 2 and value == 1 and name.lower().endswith("epochs")
            return 2 if one_epoch else min(value, most)
    return value


def compiled(data: bytes, path: str) -> types.CodeType:
    """Compile a file of the script, with its numbers bounded."""
    text = importlib.util.decode_source(data)
    if found := re.search(rf"^(?:import|from) ({FOREIGN})\b", text, re.M):
        record.leave("not judged", message=f"it uses {found[1]}, which is not judged")
    text = WRITTEN.sub(lambda m: m[1] + m[2] + str(bounded(m[1], int(m[3]))), text)
    text = LOOP.sub(lambda m: m[1] + str(bounded("epoch", int(m[2]))), text)  # 1 stays 1
    return compile(text, path, "exec", dont_inherit=True)


class Loader(machinery.SourceFileLoader):
    """Loads the modules of the script's folder."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        if str(path).startswith(state.root):
            return compiled(data, str(path))
        return super().source_to_code(data, path)


class Finder:
    """Finds the stand-ins of packages that only show, wherever a script imports them."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        top = name.split(".")[0]
        shows = top in SHOWS and machinery.PathFinder.find_spec(top) is None
        if shows or top in TRACKERS or name == "torch.utils.tensorboard":
            return machinery.ModuleSpec(name, Finder, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: Any) -> Any:
        def open_one(*args: Any, **keywords: Any) -> MagicMock:
            record.tell("every rank logs", same=spec.name, name=spec.name)
            return MagicMock()

        module = MagicMock(__path__=[], __spec__=spec, __name__=spec.name)
        for name in ("init", "SummaryWriter", "Visdom", "start_run", "Experiment"):
            getattr(module, name).side_effect = open_one
        return module

    @staticmethod
    def exec_module(module: Any) -> None:
        return None


@record.around(argparse.ArgumentParser)
def parse_known_args(real: Any, self: Any, args: Any = None, namespace: Any = None) -> Any:
    args = list(sys.argv[1:] if args is None else args)
    for spelled in ("--local_rank", "--local-rank"):
        option = self._option_string_actions.get(spelled) if state.mode == "torchrun" else None
        given = {str(item).partition("=")[0] for item in args}
        if option and not given.intersection(option.option_strings):
            args.append(f"{spelled}={state.rank % state.each}")
    found, rest = real(self, args, namespace)
    for name, value in list(vars(found).items()):
        setattr(found, name, bounded(name, value))
    return found, rest


sys.dont_write_bytecode = True
sys.modules.pop("torch.utils.tensorboard", None)
sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
_extensions = (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES)
sys.path_hooks.insert(0, machinery.FileFinder.path_hook(_extensions, (Loader, [".py"])))
sys.path_importer_cache.clear()
