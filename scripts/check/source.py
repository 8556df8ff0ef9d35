"""Run the script's own files with fewer epochs, smaller batches, and no package that only shows.

Numbers are bounded by their names: where they are written, and where argparse returns them. Lines
keep their numbers.
"""

import argparse
import ast
import importlib.machinery as machinery
import re
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import record
from record import state

COUNT = "((num|n|nr|no|max|total|nb|train|training|end|final)_?(of_|train_|training_)?)"
NUMBERS = (  # what a number is called, and the most that it may be
    (re.compile(r"warm_?up(_?(epochs?|steps?|iters?|iterations?))?$", re.I), 1),
    (re.compile(f"{COUNT}?epochs?$", re.I), 2),
    (re.compile(f"{COUNT}(steps?|iters?|iterations?)$|iterations$", re.I), 12),
    (re.compile(".*accum", re.I), 2),
    (re.compile("(.*_)?(batch_?size|bsz?)$", re.I), 8),
    (re.compile(r"(save|ckpt|checkpoint|eval|val|test)\w*(every|freq|interval|epochs?)$", re.I), 1),
)
FOREIGN = {  # what starts or wraps a training in a way of its own
    "pytorch_lightning": "Lightning",
    "lightning": "Lightning",
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
    "horovod": "Horovod",
    "colossalai": "Colossal-AI",
    "ray": "Ray",
}
TRACKERS = ["tensorboardX", "wandb", "visdom", "mlflow", "neptune", "comet_ml", "swanlab"]
# What a training can do without, if it is not installed: it returns nothing to compute with.
SHOWS = ["matplotlib", "seaborn", "torchsummary", "torchinfo", "thop", "rich", "prettytable"]
SHOWS += ["gpustat", "pynvml", "coloredlogs", "colorlog", "termcolor", "colorama", "torchviz"]


def bounded(name: Any, value: Any) -> Any:
    """Return a number of the training, by its name, as small as the check wants it."""
    for pattern, most in NUMBERS if type(value) is int and isinstance(name, str) else ():
        if pattern.match(name.replace("-", "_")):
            # One epoch more: a second one shows whether its order differs from the first's.
            one_epoch = most == 2 and value == 1 and name.lower().endswith("epochs")
            return 2 if one_epoch else min(value, most)
    return value


def _named(node: Any) -> list[tuple[Any, Any]]:
    """Return what a node of the source names, with the values."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            return list(zip(names, values, strict=False))
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return [(target, node.value)]
        case ast.keyword():
            return [(node, node.value)]
        case ast.arguments():
            plain = [*node.posonlyargs, *node.args][::-1]
            return list(zip(plain, node.defaults[::-1], strict=False))
        case ast.Dict():
            return list(zip(node.keys, node.values, strict=True))
        case ast.For(target=ast.Name(id=name), iter=ast.Call(args=[end])) if name[:2] == "ep":
            return [(ast.Name("epochs"), end)]
    return []


def compiled(data: Any, path: str) -> types.CodeType:
    """Compile a file of the script, with its numbers bounded."""
    tree = ast.parse(data, path)
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            if found := FOREIGN.get(name.split(".")[0]):
                record.leave("not judged", message=f"it uses {found}, which is not judged")
    for part in ast.walk(tree):
        for place, value in _named(part):
            if isinstance(value, ast.Constant):
                keys = (getattr(place, key, None) for key in ("id", "attr", "arg", "value"))
                value.value = bounded(next(filter(None, keys), None), value.value)
    return compile(tree, path, "exec", dont_inherit=True)


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
        wants = spelled in self._option_string_actions and state.mode == "torchrun"
        if wants and not any(str(item).startswith(spelled) for item in args):
            args.append(f"{spelled}={state.rank % (state.world // state.nodes)}")
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
