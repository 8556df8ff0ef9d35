"""Weights in files, read safely, compared before use, and identified by a hash."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils import distributed
from utils.errors import UserError, printable

CONTAINERS = ("model", "model_state_dict", "state_dict", "net")  # keys under which others save
PREFIXES = ("module.", "_orig_mod.")  # what DP, DDP and torch.compile put before the names


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
        CheckpointError: the file cannot be read, or holds more than tensors and plain values.
    """
    try:
        content = io.BytesIO(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    is_whole = False
    try:
        is_archive = zipfile.is_zipfile(content)
        if is_archive and zipfile.ZipFile(content).testzip() is not None:
            raise zipfile.BadZipFile("checksum")
        is_whole = is_archive
        content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive fails in torch, zlib and pickle alike
        # Not torch's own message, which advises weights_only=False. That would run the code.
        raise (CheckpointError if is_whole else DamagedFile)(
            f"{path} {'' if is_whole else 'is damaged, or '}holds more than tensors and plain"
            f" values, which can run code when it is loaded ({type(error).__name__})"
        ) from error


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
    for key in CONTAINERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not any(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{path} holds no state dict (a dict of names to tensors)")
    given = {_strip(str(name)): tensor for name, tensor in content.items()}
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


def _strip(name: str) -> str:
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of a model's state, in the order of its names."""
    digest = hashlib.sha256()
    for part in _bytes(model.state_dict()):
        digest.update(part)
    return digest.hexdigest()


def _bytes(value: Any) -> Iterator[bytes]:
    """Yield what a state consists of: tensors, plain values, and containers of both."""
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous()
        yield values.flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict | list | tuple):
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        for name in sorted(parts, key=str):
            yield str(name).encode()
            yield from _bytes(parts[name])
    else:
        yield repr(value).encode()
