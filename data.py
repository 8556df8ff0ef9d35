"""MNIST, Fashion-MNIST and a drawn stand-in, prepared once and mapped by every process.

The raw files are checked and turned into one file of tensors. Each process maps that file into
memory, so that any number of ranks on a node share a single copy of the images.
"""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import os
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

EVAL_BATCH_SIZE = 500  # fits a CPU's cache; the result does not depend on it
PREPARED_NAME = "prepared-v1.pt"
LOCK_TIMEOUT = 600.0  # seconds; a slow line needs minutes for 11 MB, a dead one must not hold us
PROBE_TIMEOUT = 6.0  # seconds; offline, the whole start has to end within 10
TRAIN_SIZE, TEST_SIZE, IMAGE_SIZE, NUM_CLASSES = 60_000, 10_000, 28, 10
IMAGE_MAGIC, LABEL_MAGIC = 2051, 2049


class DataError(Exception):
    """A data set that cannot be had or cannot be trusted; the message says what to do."""

    exit_status = 2


class Source(NamedTuple):
    """Where a data set comes from; mean and std of its training pixels, scaled to 0..1."""

    folder: str
    mean: float
    std: float
    mirrors: tuple[str, ...] = ()
    sha256: tuple[str, ...] = ()  # of the raw files, in the order of RAW_FILES


RAW_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

SOURCES = {
    "mnist": Source(
        "MNIST",
        0.1307,
        0.3081,
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    # No published SHA-256 of the uncompressed files: what is downloaded is held against
    # torchvision's MD5 of the archives, what lies there already against sizes and class counts.
    "fashion-mnist": Source(
        "FashionMNIST",
        0.2860,
        0.3530,
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
    ),
    "synthetic": Source("Synthetic", 0.1503, 0.3081),
}


class ImageSet(Dataset):
    """Images uint8 [N, 28, 28] with labels int64 [N], fetched by the batch.

    ``DataLoader`` calls ``__getitems__`` with the indices of a whole batch where a data set has
    it: one indexing operation instead of a Python call for each image. Pass ``keep_batch`` as the
    loader's ``collate_fn``, since there is nothing left to collate.

    Raises:
        DataError: images or labels of another kind.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        _check("images", images, torch.uint8, "[N, H, W]", images)
        _check("labels", labels, torch.int64, "[N]", images)
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device) -> "ImageSet":
        """Return the whole set on ``device``."""
        return ImageSet(self.images.to(device), self.labels.to(device))

    def __getitem__(self, index: int | slice) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        index = torch.tensor(indices, device=self.images.device)
        # On a CPU it copies whole images, where ``self.images[index]`` goes byte by byte.
        return self.images.index_select(0, index), self.labels.index_select(0, index)


def _check(name: str, given: Any, dtype: torch.dtype, shape: str, images: Any) -> None:
    if not isinstance(given, Tensor):
        raise DataError(f"{name} are a {type(given).__name__}: make them a tensor {dtype} {shape}")
    if given.dtype != dtype or given.ndim != shape.count(",") + 1 or len(given) != len(images):
        raise DataError(
            f"{name} are {given.dtype} {list(given.shape)} for {len(images)} images: they have to"
            f" be {dtype} {shape}"
        )


def keep_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the batch as it is (a ``collate_fn`` that workers can pickle)."""
    return batch


def ignore_stop_signals(worker_id: int) -> None:
    """Let a loader worker outlive a stop request, which the training process answers.

    ``scancel`` and Ctrl-C signal every process; a worker that dies of it would turn the orderly
    stop of its parent into a crash.
    """
    import signal

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def loader_options(dataset: ImageSet, num_workers: int, device: torch.device) -> dict[str, Any]:
    """Return the ``DataLoader`` arguments that training and evaluation share."""
    on_host = dataset.images.device.type == "cpu"
    return {
        "num_workers": num_workers,
        "collate_fn": keep_batch,
        "worker_init_fn": ignore_stop_signals,
        "persistent_workers": num_workers > 0,
        # Only pinned memory can be copied to a GPU while the host goes on.
        "pin_memory": on_host and device.type == "cuda",
    }


class EpochSampler(DistributedSampler):
    """Shuffle an epoch and give each replica its share, from any position on.

    An epoch is ``permutation[start:]`` cut to whole global batches, so there is neither padding
    nor a short batch, and every replica has the same number of them. Taken in turn
    (``rank::num_replicas``), the k-th batches of all replicas together are the k-th global batch,
    whatever the number of replicas. ``DistributedSampler`` itself can start only at 0, pads (or
    drops) by single samples, and cuts by replica, not by batch.

    Args:
        dataset: the training set, N samples.
        global_batch_size: samples that an optimizer step takes over all replicas.
        num_replicas: number of processes that share the epoch.
        rank: number of this process among them.
        seed: the permutation of an epoch depends on ``seed + epoch`` alone.

    Raises:
        DataError: the set has fewer samples than one global batch.
    """

    def __init__(
        self,
        dataset: ImageSet,
        global_batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.global_batch_size = global_batch_size
        self.start = 0
        if len(dataset) < global_batch_size:
            raise DataError(
                f"a global batch of {global_batch_size} is larger than the training set of"
                f" {len(dataset)}: lower --batch-size or --grad-accum-steps"
            )

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and how many of its samples all replicas together have seen."""
        super().set_epoch(epoch)
        self.start = start

    def __len__(self) -> int:
        steps = (len(self.dataset) - self.start) // self.global_batch_size  # type: ignore[arg-type]
        return steps * self.global_batch_size // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        permutation = torch.randperm(len(self.dataset), generator=generator)  # type: ignore[arg-type]
        end = self.start + len(self) * self.num_replicas
        return iter(permutation[self.start : end][self.rank :: self.num_replicas].tolist())


class Preparation:
    """Move a batch to the device, normalise it there, and shift it at random in training.

    Images travel as bytes, a quarter of what they are as floats.

    Args:
        device: where the model computes.
        dataset: a key of ``SOURCES``, for mean and standard deviation.
        augment: whether to shift training images, by up to ``SHIFT`` pixels each way.
    """

    SHIFT = 1

    def __init__(self, device: torch.device, dataset: str, augment: bool = False) -> None:
        self.device = device
        self.mean = SOURCES[dataset].mean * 255
        self.scale = 1 / (SOURCES[dataset].std * 255)
        self.shift = RandomShift(self.SHIFT) if augment else None

    def __call__(
        self, images: Tensor, labels: Tensor, train: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Turn images uint8 [B, 28, 28] into floats [B, 1, 28, 28] with mean 0 and variance 1."""
        images = images.to(self.device, non_blocking=True)
        labels = labels.to(self.device, non_blocking=True)
        if train and self.shift is not None:
            images = self.shift(images)
        # The default dtype rather than float32, so that a test can compare runs in float64.
        pixels = images.unsqueeze(1).to(torch.get_default_dtype())
        return pixels.sub_(self.mean).mul_(self.scale), labels


class RandomShift:
    """Move each image by up to ``shift`` pixels each way, filling with 0.

    Draws from the default generator of the images' device.
    """

    def __init__(self, shift: int) -> None:
        self.shift = shift
        self.padded = torch.empty(0)  # kept, since its margin stays 0

    def __call__(self, images: Tensor) -> Tensor:
        """Return images [B, H, W], moved."""
        count, height, width = images.shape
        margin, pitch = self.shift, width + 2 * self.shift
        shape = (count, height + 2 * margin, pitch)
        if self.padded.shape != shape or self.padded.device != images.device:
            self.padded = images.new_zeros(shape)
        self.padded[:, margin : margin + height, margin : margin + width] = images
        dy, dx = torch.randint(2 * margin + 1, (2, count), device=images.device)
        # A moved image lies in one piece, from its first pixel to its last, with what pads its rows
        # in between: one copy for each image, a third of the time of indexing pixel by pixel.
        size = (height - 1) * pitch + width
        step = self.padded.stride(0)
        first = torch.arange(0, count * step, step, device=images.device)
        first.add_(dx).add_(dy, alpha=pitch)
        pieces = self.padded.flatten().unfold(0, size, 1).index_select(0, first)
        return pieces.as_strided((count, height, width), (size, pitch, 1))


def load_dataset(name: str, data_dir: str) -> tuple[ImageSet, ImageSet]:
    """Load training set (60,000) and test set (10,000), preparing them where no process has yet.

    Safe to call from all processes of a job at once, on a disk of one node or on a shared one:
    whoever takes the file lock prepares, the others wait for it. No process group is needed.

    Args:
        name: a key of ``SOURCES``.
        data_dir: folder in torchvision's layout (``MNIST/raw/...``).

    Raises:
        DataError: the data cannot be had, or is damaged.
    """
    tensors = _open_prepared(prepare(name, data_dir))
    return (
        ImageSet(tensors["train_images"], tensors["train_labels"]),
        ImageSet(tensors["test_images"], tensors["test_labels"]),
    )


def prepare(name: str, data_dir: str) -> Path:
    """Return the prepared file of a data set, making it under a lock where there is none."""
    folder = Path(data_dir) / SOURCES[name].folder
    path = folder / PREPARED_NAME
    if _is_whole(path):
        return path
    home = _writable_folder(folder)
    path = home / PREPARED_NAME
    with _lock(home / ".lock"):
        if not _is_whole(path):
            _write_atomically(path, _make(name, folder, home / "raw"))
    return path


def _writable_folder(folder: Path) -> Path:
    """Return ``folder``, or its stand-in in the user's cache where it cannot be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mnist-data-parallel"
    reasons = []
    for candidate in (folder, cache / folder.name):
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            # Root may write anywhere; a folder without a write bit is meant to stay as it is.
            if not candidate.stat().st_mode & 0o222:
                raise PermissionError(errno.EACCES, "read-only")
            with tempfile.TemporaryFile(dir=candidate):
                return candidate
        except OSError as error:
            reasons.append(f"{candidate} ({error.strerror})")
    raise DataError(f"no folder to prepare the data in: {', '.join(reasons)}; pass --data-dir")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel (or the NFS server) frees it when its holder dies."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    with open(path, "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise DataError(
                        f"waited {LOCK_TIMEOUT:.0f} s for {file.read().strip() or 'a process'} to"
                        f" prepare the data: end it, or pass another --data-dir ({path})"
                    ) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _write_atomically(path: Path, tensors: dict[str, Tensor]) -> None:
    temporary = path.with_suffix(f".tmp-{os.getpid()}")
    try:
        torch.save(tensors, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        raise DataError(f"cannot write {path}: {error}".splitlines()[0]) from error
    finally:
        temporary.unlink(missing_ok=True)


def _open_prepared(path: Path) -> dict[str, Tensor]:
    return torch.load(path, mmap=True, weights_only=True, map_location="cpu")


def _is_whole(path: Path) -> bool:
    """Tell whether the prepared file is there and can be opened; a damaged one is made anew."""
    try:
        tensors = _open_prepared(path)
        return tensors["train_images"].shape == (TRAIN_SIZE, IMAGE_SIZE, IMAGE_SIZE) and tensors[
            "test_images"
        ].shape == (TEST_SIZE, IMAGE_SIZE, IMAGE_SIZE)
    except Exception:  # not there, or damaged, on which torch.load fails in many ways
        return False


def _make(name: str, folder: Path, download_to: Path) -> dict[str, Tensor]:
    """Build the four tensors of a data set, from raw files or by drawing them."""
    if name == "synthetic":
        from utils.digits import draw_digits  # the one data set that is drawn

        parts = [*draw_digits(TRAIN_SIZE, seed=0), *draw_digits(TEST_SIZE, seed=1)]
    else:
        raw = next((d for d in (folder / "raw", download_to) if _has_raw(d)), None)
        if raw is None:
            download(name, download_to)
            raw = download_to
        parts = read_raw(name, raw)
    keys = ("train_images", "train_labels", "test_images", "test_labels")
    tensors = dict(zip(keys, parts, strict=True))
    for key in ("train_labels", "test_labels"):
        tensors[key] = tensors[key].long()
    return tensors


def _has_raw(folder: Path) -> bool:
    return all(any((folder / f"{f}{end}").is_file() for end in ("", ".gz")) for f in RAW_FILES)


def read_raw(name: str, folder: Path) -> list[Tensor]:
    """Parse and check the four IDX files (format: http://yann.lecun.com/exdb/mnist).

    Returns:
        Training images uint8 [60000, 28, 28], labels uint8 [60000]; the same of the test set.

    Raises:
        DataError: a file has a wrong size, header, checksum or label.
    """
    parts = []
    for i, file_name in enumerate(RAW_FILES):
        is_images, count = i % 2 == 0, TRAIN_SIZE if i < 2 else TEST_SIZE
        shape = (count, IMAGE_SIZE, IMAGE_SIZE) if is_images else (count,)
        header = [IMAGE_MAGIC if is_images else LABEL_MAGIC, *shape]
        path = folder / file_name
        try:
            packed = gzip.decompress if not path.is_file() else bytes
            content = packed((path if path.is_file() else Path(f"{path}.gz")).read_bytes())
        except (OSError, EOFError) as error:
            raise _damaged(path, f"cannot be read ({error})") from error
        expected = b"".join(number.to_bytes(4, "big") for number in header)
        if not content.startswith(expected):
            raise _damaged(path, f"does not start with the IDX header of {count} items")
        size = len(expected) + torch.Size(shape).numel()
        if len(content) != size:
            raise _damaged(path, f"has {len(content)} bytes instead of {size}")
        sha256 = SOURCES[name].sha256
        if sha256 and hashlib.sha256(content).hexdigest() != sha256[i]:
            raise _damaged(path, "has a wrong SHA-256")
        values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=len(expected))
        if not is_images and values.max() >= NUM_CLASSES:
            raise _damaged(path, f"has a label of {int(values.max())}, not 0 to 9")
        if not is_images and not sha256 and values.bincount().ne(count // NUM_CLASSES).any():
            raise _damaged(path, f"has not {count // NUM_CLASSES} of class 0 to 9 each")
        parts.append(values.view(shape))
    return parts


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: delete it to have it downloaded again")


def download(name: str, folder: Path) -> None:
    """Fetch the raw files through torchvision into ``folder``, from the first mirror that works.

    Raises:
        DataError: no mirror could be reached, or none had files that passed the checks.
    """
    source = SOURCES[name]
    problems = _probe(source.mirrors)
    try:
        for mirror in (m for m in source.mirrors if problems[m] is None):
            problems[mirror] = _download_from(mirror, name, folder)
            if problems[mirror] is None:
                return
        tried = "; ".join(f"{mirror} ({problem})" for mirror, problem in problems.items())
    except ImportError as error:
        tried = f"torchvision cannot be imported ({str(error).splitlines()[0]})"
    raise DataError(
        f"no {source.folder} in {folder}, and it cannot be downloaded: {tried}. Put"
        f" {', '.join(RAW_FILES)} (or their .gz) there, or use --dataset synthetic"
    )


def _probe(mirrors: tuple[str, ...]) -> dict[str, str | None]:
    """Ask all mirrors at once for a file's header; return each one's problem, or None.

    In threads that may be left behind: a resolver without a network ignores every timeout.
    """
    problems: dict[str, str | None] = dict.fromkeys(mirrors, f"no answer in {PROBE_TIMEOUT:.0f} s")

    def ask(mirror: str) -> None:
        request = urllib.request.Request(f"{mirror}{RAW_FILES[3]}.gz", method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=PROBE_TIMEOUT).close()
            problems[mirror] = None
        except OSError as error:
            problems[mirror] = str(getattr(error, "reason", error))

    threads = [threading.Thread(target=ask, args=(m,), daemon=True) for m in mirrors]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PROBE_TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(problems)


def _download_from(mirror: str, name: str, folder: Path) -> str | None:
    """Download from one mirror; return what went wrong, or None."""
    from torchvision import datasets  # not needed where the data is there: it costs start-up time

    kind = {"mnist": datasets.MNIST, "fashion-mnist": datasets.FashionMNIST}[name]
    # torchvision sets no timeout of its own, and takes any file that is there for a whole one.
    previous = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10.0)
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            local = type(kind.__name__, (kind,), {"mirrors": [mirror]})
            with contextlib.redirect_stdout(None):
                local(scratch, download=True)
            raw = Path(scratch) / SOURCES[name].folder / "raw"
            read_raw(name, raw)
            folder.mkdir(parents=True, exist_ok=True)
            for file_name in RAW_FILES:
                os.replace(raw / file_name, folder / file_name)
        return None
    except (OSError, RuntimeError, DataError) as error:
        return str(error).splitlines()[0]
    finally:
        socket.setdefaulttimeout(previous)
