"""Weights in files, read safely, compared before use, and identified by a hash."""

import copy
import hashlib
import io
import re
import zipfile
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from utils import distributed
from utils.errors import UsageError, UserError, printable

CONTAINERS = ("model", "model_state_dict", "state_dict", "net")  # keys under which others save
PREFIXES = re.compile(r"^((module|_orig_mod)\.)+")  # which DP, DDP and torch.compile put first


class CheckpointError(UserError):
    """A file of weights that cannot be written, read or trusted. The message says what to do."""


class DamagedFile(CheckpointError):
    """A file that could be read, and whose content is broken."""


def read_tensors(path: Path) -> Any:
    """Read a file of tensors and plain values, and verify it first.

    ``torch.load`` accepts a file with a flipped bit without a warning. The archive's own checksums
    find it.

    Raises:
        DamagedFile: the content is broken.
        CheckpointError: the file holds more than tensors and plain values.
        OSError: the file cannot be read.
    """
    content = io.BytesIO(path.read_bytes())
    try:
        is_whole = zipfile.ZipFile(content).testzip() is None
    except Exception:  # a damaged archive fails in many ways
        is_whole = False
    if not is_whole:
        raise DamagedFile(f"{path} is damaged, or not a file of torch.save")
    content.seek(0)
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        # Not torch's own message, which advises weights_only=False. That would run the code.
        raise CheckpointError(
            f"{path} holds more than tensors and plain values, which can run code when it is loaded"
            f" ({type(error).__name__})"
        ) from error


def to_plain(value: Any, name: str) -> Any:
    """Return a state as ``read_tensors`` can read it: with no numbers and arrays of numpy.

    Args:
        value: anything that ``torch.save`` takes. The result is a copy, except for its tensors.
        name: of the state, for the message.

    Raises:
        UsageError: it holds what would be refused. The message says where.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind in (np.ndarray, np.memmap):
        with suppress(TypeError, ValueError):  # text, objects, another order of bytes
            return torch.tensor(value)
    if kind in (dict, OrderedDict):
        plain = copy.copy(value)  # with the attribute in which a module keeps its version
        plain.clear()
        for key, own in value.items():
            plain[to_plain(key, f"a key of {name}")] = to_plain(own, f"{name}[{key!r}]")
        return plain
    if kind in (list, tuple):
        return kind(to_plain(own, f"{name}[{index}]") for index, own in enumerate(value))
    if kind not in (Tensor, nn.Parameter, str, float, int, bool, type(None)) and not _is_safe(
        value
    ):
        raise UsageError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which could not be read when the"
            " run is resumed: save a number, a text, a tensor, or a list or dict of these"
        )
    return value


def _is_safe(value: Any) -> bool:
    """Try a value of a rare type, such as a Counter, which PyTorch may take."""
    content = io.BytesIO()
    try:
        torch.save(value, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception:  # of pickle or a user's own class
        return False
    return True


def load_state(part: Any, state: dict[str, Any], misfit: str) -> None:
    """Load a part of a checkpoint into the model, the optimizer... that it was saved from.

    Args:
        misfit: what to say if it does not fit. PyTorch would say it in several lines.

    Raises:
        CheckpointError: a name or a shape differs.
    """
    try:
        part.load_state_dict(state)
    except Exception as error:  # of a user's own class it may be any
        problem = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"{misfit}: {problem[-1].strip()}") from error


def load_weights(model: nn.Module, path: str) -> None:
    """Copy into ``model`` the weights of a file that fit by name and shape. Rank 0 reports which.

    The file may be a checkpoint of this project, a state dict, or a dict that has a state dict
    under a key of ``CONTAINERS``. The prefixes of DP, DDP and ``torch.compile`` are removed.
    Everything is compared before anything is copied.

    Raises:
        CheckpointError: the file cannot be read, or nothing in it fits.
    """
    content = read_tensors(Path(path))
    content = content if isinstance(content, dict) else {}
    parts = (content[key] for key in CONTAINERS if isinstance(content.get(key), dict))
    given = {PREFIXES.sub("", str(name)): value for name, value in next(parts, content).items()}
    own = model.state_dict()
    fitting = {
        name: value
        for name, value in given.items()
        if isinstance(value, Tensor) and value.shape == getattr(own.get(name), "shape", None)
    }
    if not fitting:
        ours, theirs = (", ".join([*names][:2]) for names in (own, given))
        raise CheckpointError(
            f"nothing in {path} fits the model by name and shape: it has {theirs} ..., the model"
            f" {ours} ..."
        )
    model.load_state_dict(fitting, strict=False)
    if distributed.rank() == 0:
        print(f"weights loaded {len(fitting)} tensors of {printable(path)}")
        for name in sorted((own | given).keys() - fitting):
            print(f"  skipped: {printable(name)}")


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of a model's state, in the order of its names."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().flatten()
            content = flat.view(torch.uint8).numpy().tobytes()
        else:
            content = repr(value).encode()
        digest.update(name.encode() + content)
    return digest.hexdigest()
