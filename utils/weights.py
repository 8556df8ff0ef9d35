"""Weights in files, read safely, compared before use, and identified by a hash."""

import hashlib
import zipfile
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


def read_tensors(path: Path) -> Any:
    """Read a file of tensors and plain values, and verify it first.

    ``torch.load`` accepts a file with a flipped bit without a warning. The archive's own checksums
    find it.

    Raises:
        CheckpointError: the file is damaged, or holds more than tensors and plain values.
        OSError: there is no such file.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    raise zipfile.BadZipFile("checksum")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError):
        raise
    except Exception as error:  # a damaged archive fails in torch, zlib and pickle alike
        # Not torch's own message, which advises weights_only=False. That would run the code.
        raise CheckpointError(
            f"{path} is damaged, or holds more than tensors and plain values, which can run code"
            f" when it is loaded ({type(error).__name__})"
        ) from error


def load_state(model: nn.Module, state: dict[str, Any], path: Path) -> None:
    """Copy all weights of a checkpoint into the model that it was saved from.

    Raises:
        CheckpointError: a name or a shape differs. PyTorch would say so in several lines.
    """
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        problem = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{path} does not fit --model: {problem}") from None


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
        name: given[name]
        for name in own
        if isinstance(given.get(name), Tensor) and given[name].shape == own[name].shape
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
    """Return the SHA-256 of all parameters and buffers, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        values = tensor.detach().cpu().contiguous()
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
