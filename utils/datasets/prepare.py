"""One file of tensors for each data set: made once, verified, and mapped by every process."""

import errno
import io
import os
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils import signals
from utils.datasets.digits import draw_digits
from utils.datasets.fetch import download
from utils.datasets.idx import read_raw
from utils.datasets.sources import SOURCES, TEST_SIZE, TRAIN_SIZE, DataError
from utils.files import FileLock, Locked, replace_file

PREPARED_NAME = "prepared-v3.pt"
LOCK_TIMEOUT = 600.0  # seconds; its holder may be downloading


def prepare(name: str, data_dir: str) -> Path:
    """Return the prepared file of a data set, verified; make it where there is none.

    It lies beside the raw files or, where that folder cannot be written, in the user's cache. Who
    takes the file lock makes it, the others wait.

    Args:
        name: a key of ``SOURCES``.
        data_dir: folder in torchvision's layout.

    Raises:
        DataError: the data is missing or damaged, or no folder can be written.
    """
    source = SOURCES[name]
    folder = Path(data_dir) / source.folder
    homes: list[Path] = [folder]
    problems: list[str] = []
    with suppress(RuntimeError):  # a container's user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        homes.append(cache / "mnist-data-parallel" / source.folder)
    for home in homes:
        path = home / PREPARED_NAME
        if _is_sound(path, name):
            return path
        try:
            os.fspath(path).encode()
            home.mkdir(parents=True, exist_ok=True)
            # Root may write anywhere; a folder without a write bit is meant to stay as it is.
            if not home.stat().st_mode & 0o222:
                raise PermissionError(errno.EACCES, "read-only", str(home))
            with FileLock(home / ".lock", LOCK_TIMEOUT):
                if not _is_sound(path, name):
                    if path.exists():
                        print(f"{path} is damaged: making it anew", file=sys.stderr)
                    _write(path, name, _make(name, folder, home / "raw"))
                    signals.sleep(
                        0
                    )  # who waited for this may have been told to stop, and so may we
            return path
        except Locked as holder:
            raise DataError(
                f"waited {LOCK_TIMEOUT:.0f} s for {holder} to prepare the data: end it, or pass"
                f" another --data-dir ({home / '.lock'})"
            ) from None
        except OSError as error:
            problems.append(f"{error.filename or home} ({error.strerror or error})")
        except UnicodeEncodeError:
            problems.append(f"{home} (not in UTF-8, so that PyTorch cannot open it)")
    raise DataError(f"no folder to prepare the data in: {', '.join(problems)}; pass --data-dir")


def load_prepared(path: Path) -> dict[str, Any]:
    """Map a prepared file into memory.

    Returns:
        ``train_images`` and ``test_images`` uint8 [N, H, W], ``train_labels`` and ``test_labels``
        int64 [N], and ``crc32``, a checksum of these.
    """
    return torch.load(path, mmap=True, weights_only=True, map_location="cpu")


def _make(name: str, folder: Path, download_to: Path) -> dict[str, Tensor]:
    """Return the four tensors of a data set, from raw files or drawn."""
    if name == "synthetic":
        parts = [*draw_digits(TRAIN_SIZE, seed=0), *draw_digits(TEST_SIZE, seed=1)]
    else:
        parts = _read_or_download(name, [folder / "raw", download_to])
    keys = ("train_images", "train_labels", "test_images", "test_labels")
    tensors = dict(zip(keys, parts, strict=True))
    return {k: t.long() if k.endswith("labels") else t for k, t in tensors.items()}


def _read_or_download(name: str, folders: list[Path]) -> list[Tensor]:
    for folder in folders:
        with suppress(FileNotFoundError):
            return read_raw(name, folder)
    download(name, folders[-1])
    return read_raw(name, folders[-1])


def _write(path: Path, name: str, tensors: dict[str, Tensor]) -> None:
    buffer = io.BytesIO()
    torch.save(tensors | {"crc32": _checksum(name, tensors)}, buffer)
    replace_file(path, buffer.getbuffer())


def _checksum(name: str, tensors: dict[str, Tensor]) -> int:
    """Return the CRC-32 of the tensors' bytes, forms and names, and of the data set's name."""
    value = zlib.crc32(name.encode())
    for key, tensor in tensors.items():
        value = zlib.crc32(f"{key} {tensor.dtype} {list(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.contiguous().numpy().data, value)
    return value


def _is_sound(path: Path, name: str) -> bool:
    """Tell whether a prepared file holds what was put into it: 0.03 s for each process."""
    try:
        if not path.is_file():  # a pipe would wait for its other end
            return False
        content = load_prepared(path)
        return content.pop("crc32") == _checksum(name, content)
    except Exception:  # not to be read, or damaged, on which torch.load fails in many ways
        return False
