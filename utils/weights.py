"""Weights in files: read safely, compared before use, and told apart by a hash."""

import hashlib
import pickle
import stat
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import UserError, describe, printable

CONTAINERS = ("model", "model_state_dict", "state_dict", "net")  # keys under which others save
# What can be copied into each other, as far as the numbers fit: no bits, no complex numbers.
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
PREFIXES = ("module.", "_orig_mod.")  # what DP, DDP and torch.compile put before the names


class CheckpointError(UserError):
    """A file of weights that cannot be written, read or trusted; the message says what to do."""


def read_tensors(path: Path) -> Any:
    """Read a file of tensors and plain values, verifying it first.

    ``torch.load`` takes a file with a flipped bit without a word; the archive's own checksums
    find it.

    Raises:
        CheckpointError: missing, damaged, or holding more than tensors and plain values.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for without an end
            raise CheckpointError(f"{path} is not a file")
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    raise CheckpointError(f"{path} is damaged (checksum)")
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        # torch's own message advises weights_only=False, which would run what the file holds.
        raise CheckpointError(
            f"{path} is refused: it is damaged, or holds more than tensors and plain values,"
            " and such a file can run code when it is loaded"
        ) from error
    except Exception as error:  # a damaged archive fails in torch, zlib and pickle alike
        raise CheckpointError(f"{path} cannot be read ({describe(error)})") from error


@dataclass
class WeightReport:
    """Which tensors fit, by name and shape, and what is wrong with the others."""

    loaded: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        skipped = "".join(f"\n  skipped: {printable(problem)}" for problem in self.problems)
        return f"loaded {len(self.loaded)} tensors{skipped}"


def is_plain(value: Any) -> bool:
    """Tell whether a value is a tensor whose numbers lie in memory one by one."""
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return is_dense and not (value.is_quantized or value.is_nested)


def match_weights(own: dict[str, Tensor], given: dict[str, Any]) -> WeightReport:
    """Compare two state dicts by name and shape, without copying anything."""
    report = WeightReport()
    for name, tensor in own.items():
        other = given.get(name)
        if other is None:
            report.problems.append(f"{name} is missing")
        elif not is_plain(other):
            report.problems.append(f"{name} is no plain tensor")
        elif other.is_meta:
            report.problems.append(f"{name} has no values (it was saved from the meta device)")
        elif other.shape != tensor.shape:
            theirs, ours = tuple(other.shape), tuple(tensor.shape)
            report.problems.append(f"{name} has the shape {theirs}, not {ours}")
        elif other.dtype != tensor.dtype and not {other.dtype, tensor.dtype} <= FLOATS:
            report.problems.append(f"{name} is of {other.dtype}, not of {tensor.dtype}")
        else:
            report.loaded.append(name)
    report.problems += [f"{name} is not in the model" for name in given if name not in own]
    return report


def load_weights(model: nn.Module, path: str) -> WeightReport:
    """Copy into ``model`` the weights of a file that fit by name and shape.

    The file may be a checkpoint of this project, a state dict, or a dict that holds one under a
    key of ``CONTAINERS``; what DP, DDP and ``torch.compile`` put before the names is stripped.
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
    report = match_weights(model.state_dict(), given)
    if not report.loaded:
        ours, theirs = (", ".join([*names][:2]) for names in (model.state_dict(), given))
        raise CheckpointError(
            f"nothing in {path} fits the model by name and shape: it has {theirs} ..., the model"
            f" {ours} ... ({report.problems[0]})"
        )
    model.load_state_dict({name: given[name] for name in report.loaded}, strict=False)
    return report


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
