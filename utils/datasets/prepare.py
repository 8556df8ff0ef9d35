"""The raw files of a data set. One process downloads, unpacks or draws them, and all map them."""

from pathlib import Path

from utils import signals
from utils.datasets import idx
from utils.datasets.digits import draw_digits
from utils.datasets.fetch import download
from utils.datasets.sources import RAW_FILES, SOURCES, TEST_SIZE, TRAIN_SIZE, DataError
from utils.files import Locked, lock_file, replace_file

LOCK_TIMEOUT = 600.0  # seconds, since the holder of the lock may be downloading


def prepare(name: str, data_dir: str) -> Path:
    """Return the folder of a data set's four raw files, and get those that are missing.

    The process that takes the file lock gets the files, and the others wait. A complete folder is
    only read.

    Args:
        name: a key of ``SOURCES``.
        data_dir: folder in torchvision's layout (``MNIST/raw/...``).

    Raises:
        DataError: the data is missing or damaged, or the folder cannot be written.
        Stopped: a stop signal came while this process waited.
    """
    folder = Path(data_dir, SOURCES[name].folder, "raw")
    if _is_complete(folder):
        return folder
    lock = folder.parent / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(lock_file(lock, LOCK_TIMEOUT)):  # and closes the descriptor, which frees it
            if not _is_complete(folder):
                _draw(folder) if name == "synthetic" else download(name, folder)
    except Locked as holder:
        raise DataError(
            f"waited {LOCK_TIMEOUT:.0f} s for {holder} to prepare the data: end it, or pass another"
            f" --data-dir ({lock})"
        ) from None
    except OSError as error:
        path, reason = error.filename or folder, error.strerror or error
        raise DataError(f"cannot write {path} ({reason}): pass another --data-dir") from None
    signals.check()  # a signal may have come during the work
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / file_name).exists() for file_name in RAW_FILES)


def _draw(folder: Path) -> None:
    parts = [*draw_digits(TRAIN_SIZE, seed=0), *draw_digits(TEST_SIZE, seed=1)]
    for file_name, values in zip(RAW_FILES, parts, strict=True):
        replace_file(folder / file_name, idx.to_bytes(values))
