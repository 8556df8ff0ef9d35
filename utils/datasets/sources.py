"""The data sets that ``--dataset`` names: where their files come from, and their checksums."""

from pathlib import Path
from typing import NamedTuple

from utils.errors import UserError

TRAIN_SIZE, TEST_SIZE = 60_000, 10_000  # of each set below

RAW_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class DataError(UserError):
    """A data set that is missing, damaged or of the wrong kind. The message says what to do."""

    exit_status = 2


class Source(NamedTuple):
    """Where a data set comes from.

    Mean and standard deviation are those of the training pixels, scaled to 0..1. Each is a number,
    or one number for each channel.
    """

    folder: str
    mean: float | tuple[float, ...] = 0.0
    std: float | tuple[float, ...] = 1.0
    mirrors: tuple[str, ...] = ()


MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
FASHION_MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
SOURCES = {
    "mnist": Source("MNIST", 0.1307, 0.3081, MNIST_MIRRORS),
    "fashion-mnist": Source("FashionMNIST", 0.2860, 0.3530, FASHION_MIRRORS),
    "synthetic": Source("Synthetic", 0.1503, 0.3081),
}


# The SHA-256 of each unpacked raw file, by its path below --data-dir. `sha256sum -c` reads the same
# file.
_LINES = Path(__file__).with_name("SHA256SUMS").read_text().splitlines()
CHECKSUMS = {path: checksum for checksum, path in map(str.split, _LINES)}
