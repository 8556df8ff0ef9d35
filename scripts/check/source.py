"""Run the script's own files with fewer epochs, smaller batches, and no package that only shows.

Numbers are bounded by their names: where they are written, and where argparse, YAML or JSON return
them. Lines keep their numbers.
"""

import argparse
import ast
import importlib.machinery as machinery
import json
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
    if type(value) is not int or not isinstance(name, str):
        return value
    for pattern, most in NUMBERS:
        if pattern.match(name.replace("-", "_")):
            one_epoch = most == 2 and value == 1 and name.lower().endswith("epochs")
            return 2 if one_epoch else min(value, most)
    return value


def _named(node: Any) -> list[tuple[Any, Any]]:
    """Return what a node of the source names, with the values."""
    pairs: list[tuple[Any, Any]] = []
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            pairs = list(zip(names, values, strict=False))
        case ast.Assign():
            pairs = [(target, node.value) for target in node.targets]
        case ast.AnnAssign():
            pairs = [(node.target, node.value)]
        case ast.keyword():
            pairs = [(node, node.value)]
        case ast.arguments():
            plain = [*node.posonlyargs, *node.args][::-1]
            pairs = list(zip(plain, node.defaults[::-1], strict=False))
            pairs += zip(node.kwonlyargs, node.kw_defaults, strict=True)
        case ast.Dict():
            pairs = list(zip(node.keys, node.values, strict=True))
    keys = ("id", "attr", "arg", "value")
    return [(next((n for k in keys if (n := getattr(a, k, ""))), ""), b) for a, b in pairs]


def _bound_range(node: ast.For) -> None:
    """Let a loop over epochs end after two, if its end is written there."""
    name = getattr(node.target, "id", "")
    for part in ast.walk(node.iter) if re.match(r"ep(och)?s?(_?\w+)?$|t$", name) else ():
        if isinstance(part, ast.Call) and getattr(part.func, "id", "") in ("range", "trange"):
            ends: Any = part.args[:2]
            if ends and all(type(getattr(end, "value", None)) is int for end in ends[-1:]):
                first = getattr(ends[0], "value", 0) if len(ends) == 2 else 0
                ends[-1].value = min(ends[-1].value, (first or 0) + 2)


def compiled(data: Any, path: str) -> types.CodeType:
    tree = ast.parse(data, path)
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            if found := FOREIGN.get(name.split(".")[0]):
                record.leave("not judged", reason=f"it uses {found}, which is not judged")
    for part in ast.walk(tree):
        if isinstance(part, ast.For):
            _bound_range(part)
        for name, value in _named(part):
            if isinstance(value, ast.Constant):
                value.value = bounded(name, value.value)
    return compile(tree, path, "exec", dont_inherit=True)


class Loader(machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        if str(path).startswith(state.root):
            return compiled(data, str(path))
        return super().source_to_code(data, path)


class Finder:
    """Find the stand-ins of packages that only show, wherever a script imports them."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        top = name.split(".")[0]
        shows = top in SHOWS and machinery.PathFinder.find_spec(top) is None
        if shows or top in TRACKERS or name == "torch.utils.tensorboard":
            return machinery.ModuleSpec(name, Finder, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: Any) -> Any:
        module = MagicMock(__path__=[], __spec__=spec, __name__=spec.name)
        kind = "TensorBoard" if "tensorboard" in spec.name else spec.name
        for name in ("init", "SummaryWriter", "Visdom", "start_run", "Experiment"):
            getattr(module, name).side_effect = lambda *args, **keywords: _tracker(kind)
        return module

    @staticmethod
    def exec_module(module: Any) -> None:
        return None


def _tracker(name: str) -> MagicMock:
    if not state.is_parent:
        record.emit("tracker", name=name)
    return MagicMock()


def install() -> None:
    sys.dont_write_bytecode = True
    sys.modules.pop("torch.utils.tensorboard", None)
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    extensions = (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES)
    sys.path_hooks.insert(0, machinery.FileFinder.path_hook(extensions, (Loader, [".py"])))
    sys.path_importer_cache.clear()
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        for spelled in ("--local_rank", "--local-rank"):
            wants = spelled in self._option_string_actions and state.mode == "torchrun"
            if wants and not any(str(item).startswith(spelled) for item in args):
                args.append(f"{spelled}={state.rank % (state.world // state.nodes)}")
        found, rest = parse(self, args, namespace)
        for name, value in list(vars(found).items()):
            setattr(found, name, bounded(name, value))
        return found, rest

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    _bound_result(json, "load")
    if machinery.PathFinder.find_spec("yaml"):
        for name in ("load", "safe_load", "full_load"):
            _bound_result(__import__("yaml"), name)


def _bound_result(package: Any, name: str) -> None:
    real = getattr(package, name)

    def bound(value: Any, key: Any = "") -> Any:
        if isinstance(value, dict):
            return type(value)((k, bound(v, k)) for k, v in value.items())
        return bounded(key, value)

    def load(*args: Any, **keywords: Any) -> Any:
        found, by_script = real(*args, **keywords), record.called_by_script()
        return bound(found) if by_script else found

    setattr(package, name, load)
