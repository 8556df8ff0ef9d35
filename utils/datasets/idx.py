"""The raw files of MNIST and its relatives, in the IDX format, plain or packed by gzip."""

import gzip
import hashlib
import zlib
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from utils.datasets.sources import CHECKSUMS, RAW_FILES, SOURCES, DataError

MAX_BYTES = 2**26  # of a raw file; the largest has 47 MB, but a small .gz may unpack to terabytes


def read_raw(name: str, folder: Path) -> list[Tensor]:
    """Read and verify the four raw files of a data set.

    Returns:
        Training images uint8 [N, H, W] and labels uint8 [N]; the same of the test set.

    Raises:
        FileNotFoundError: one is not there.
        DataError: one cannot be read, or is not the published one.
    """
    return [
        _read_file(folder / file_name, CHECKSUMS[f"{SOURCES[name].folder}/raw/{file_name}"])
        for file_name in RAW_FILES
    ]


def _read_file(path: Path, sha256: str) -> Tensor:
    is_packed = not path.is_file()  # neither is a pipe, which would keep us waiting
    if is_packed:
        path = path.with_name(f"{path.name}.gz")
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        with open(path, "rb") as file:
            return parse_idx(read_verified(file, is_packed, sha256))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged ({error}): delete it to download it again") from None


def read_verified(file: IO[bytes], is_packed: bool, sha256: str) -> bytes:
    """Return what a raw file holds, unpacked.

    Raises:
        OSError, EOFError, zlib.error: it cannot be read or unpacked, or has another checksum.
    """
    if is_packed:
        with gzip.open(file) as unpacked:
            content = unpacked.read(MAX_BYTES)
    else:
        content = file.read(MAX_BYTES)
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise OSError(
            f"{len(content)} bytes with a wrong SHA-256, {found[:8]}... for {sha256[:8]}..."
        )
    return content


def parse_idx(content: bytes) -> Tensor:
    """Return the array, uint8, of an IDX file (format: http://yann.lecun.com/exdb/mnist).

    Two bytes of 0, the type (8: unsigned bytes), the number of dimensions, each dimension as a
    big-endian number of four bytes, the values.
    """
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(shape)
