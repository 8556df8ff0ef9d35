"""Weights in files, read safely, compared before use, and identified by a hash."""

import hashlib
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils import distributed
from utils.errors import UserError, describe, printable

CONTAINERS = ("model", "model_state_dict", "state_dict", "net")  # keys under which others save
PREFIXES = ("module.", "_orig_mod.")  # what DP, DDP and torch.compile put before the names


class CheckpointError(UserError):
    """A file of weights that cannot be written, read or trusted. The message says what to do."""


def read_tensors(path: Path) -> Any:
    """Read a file of tensors and plain values, and verify it first.

    ``torch.load`` accepts a file with a flipped bit without a warning. The archive's own checksums
    find it.

    Raises:
        CheckpointError: the file is missing or damaged, or holds more than tensors and plain
            values.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    raise CheckpointError(f"{path} is damaged (checksum)")
        return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder: name a file in it, such as last.pt") from None
    except pickle.UnpicklingError as error:
        # torch's own message advises weights_only=False, but that would run code in the file.
        raise CheckpointError(
            f"{path} is refused: it is damaged, or holds more than tensors and plain values,"
            " and such a file can run code when it is loaded"
        ) from error
    except Exception as error:  # a damaged archive fails in torch, zlib and pickle alike
        # What torch says of some files ends with the advice to run their code.
        reason = describe(error).partition(" Please")[0].partition(" Re-running")[0]
        raise CheckpointError(f"{path} cannot be read ({reason})") from error


def match_weights(own: dict[str, Tensor], given: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Compare two state dicts by name and shape, without copying anything.

    Returns:
        The names that fit, and what is wrong with the others.
    """
    fitting, problems = [], []
    for name, tensor in own.items():
        other = given.get(name)
        if not isinstance(other, Tensor):
            problems.append(f"{name} is missing")
        elif other.shape != tensor.shape:
            theirs, ours = tuple(other.shape), tuple(tensor.shape)
            problems.append(f"{name} has the shape {theirs}, not {ours}")
        else:
            fitting.append(name)
    return fitting, problems + [f"{name} is not in the model" for name in given if name not in own]


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
    fitting, problems = match_weights(model.state_dict(), given)
    if not fitting:
        ours, theirs = (", ".join([*names][:2]) for names in (model.state_dict(), given))
        raise CheckpointError(
            f"nothing in {path} fits the model by name and shape: it has {theirs} ..., the model"
            f" {ours} ... ({problems[0]})"
        )
    model.load_state_dict({name: given[name] for name in fitting}, strict=False)
    if distributed.rank() == 0:
        print(f"weights loaded {len(fitting)} tensors of {printable(path)}")
        for problem in problems:
            print(f"  skipped: {printable(problem)}")


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
