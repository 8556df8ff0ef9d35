"""The raw files of MNIST and its relatives, in the IDX format (http://yann.lecun.com/exdb/mnist).

A file begins with two bytes of 0, the type (8 for unsigned bytes) and the number of dimensions.
Then come each dimension, as a big-endian number of four bytes, and the values.
"""

import hashlib
import mmap
from pathlib import Path

import torch
from torch import Tensor

from utils.datasets.sources import CHECKSUMS, DataError


def verify(content: bytes | mmap.mmap, path: Path) -> None:
    """Compare the content of a raw file with the published one, if ``CHECKSUMS`` has its path.

    Raises:
        ValueError: it is a different file.
    """
    expected = CHECKSUMS.get("/".join(path.parts[-3:]))
    if expected and (found := hashlib.sha256(content).hexdigest()) != expected:
        raise ValueError(f"{len(content)} bytes with a wrong SHA-256, {found[:8]}...")


def read(path: Path) -> Tensor:
    """Map a raw file into memory, so that all processes of a machine share a single copy.

    Args:
        path: a file ``.../FOLDER/raw/NAME``. Verifying 47 MB takes 0.1 s.

    Returns:
        uint8, in the shape that the file names.

    Raises:
        DataError: the file cannot be read, is damaged, or is not the published one.
    """
    try:
        with open(path, "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        verify(content, path)
        start = 4 + 4 * content[3]
        shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
        return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)
    except (OSError, ValueError, IndexError, RuntimeError) as error:
        raise DataError(f"{path} is damaged ({error}): delete it to get it again") from None


def to_bytes(values: Tensor) -> bytes:
    """Return the content of a raw file with these values, uint8."""
    header = [0x800 + values.ndim, *values.shape]
    return b"".join(n.to_bytes(4, "big") for n in header) + values.numpy().tobytes()
