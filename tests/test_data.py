"""Data: what is damaged is refused, what is missing is said, and every sample counts once."""

import gzip
import itertools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import data
from tests.processes import environment, script
from tests.processes import run as run_command


def idx_files(folder: Path) -> Path:
    """Write four raw files of the right form, with as many of each class as Fashion-MNIST has."""
    folder.mkdir(parents=True)
    for name, count in zip(data.RAW_FILES, (60_000, 60_000, 10_000, 10_000), strict=True):
        if "images" in name:
            header, size = [data.IMAGE_MAGIC, count, 28, 28], count * 784
            content = torch.arange(size, dtype=torch.int64).remainder(251).byte()
        else:
            header = [data.LABEL_MAGIC, count]
            content = torch.arange(count).remainder(10).byte()
        raw = b"".join(n.to_bytes(4, "big") for n in header) + content.numpy().tobytes()
        (folder / name).write_bytes(raw)
    return folder


@pytest.fixture(scope="module")
def raw_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return idx_files(tmp_path_factory.mktemp("raw") / "raw")


@pytest.fixture
def raw(raw_template: Path, tmp_path: Path) -> Path:
    """A folder for ``--data-dir`` with raw files of Fashion-MNIST's form."""
    shutil.copytree(raw_template, tmp_path / "FashionMNIST" / "raw")
    return tmp_path / "FashionMNIST" / "raw"


def change(path: Path, position: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] = value
    path.write_bytes(content)


DAMAGE = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "train-images-idx3-ubyte", "bytes"),
    "empty": (lambda p: p.write_bytes(b""), "train-images-idx3-ubyte", "header"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "t10k-images-idx3-ubyte", "bytes"),
    "other shape": (lambda p: change(p, 11, 14), "train-images-idx3-ubyte", "header"),
    "fewer labels": (lambda p: change(p, 6, 0), "train-labels-idx1-ubyte", "header"),
    "label 200": (lambda p: change(p, 500, 200), "train-labels-idx1-ubyte", "label of 200"),
    "class counts": (lambda p: change(p, 500, 1), "t10k-labels-idx1-ubyte", "of class"),
    "not gzip": (
        lambda p: (p.unlink(), p.with_name(p.name + ".gz").write_bytes(b"nonsense")),
        "t10k-labels-idx1-ubyte",
        "cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_raw_files_are_refused(damage: str, raw: Path) -> None:
    spoil, name, message = DAMAGE[damage]
    spoil(raw / name)
    with pytest.raises(data.DataError, match=message) as caught:
        data.prepare("fashion-mnist", str(raw.parent.parent))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (raw.parent / data.PREPARED_NAME).exists()


def test_a_wrong_checksum_is_refused(raw: Path, tmp_path: Path) -> None:
    shutil.copytree(raw, tmp_path / "MNIST" / "raw")  # well-formed, but not MNIST
    with pytest.raises(data.DataError, match="wrong SHA-256"):
        data.prepare("mnist", str(tmp_path))


def test_compressed_raw_files_are_taken(raw: Path) -> None:
    for path in list(raw.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        path.unlink()
    train_set, test_set = data.load_dataset("fashion-mnist", str(raw.parent.parent))
    assert (len(train_set), len(test_set)) == (60_000, 10_000)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200))
def test_any_prepared_file_is_recognised_or_made_anew(content: bytes) -> None:
    """Whatever lies in its place, opening the prepared file ends in a yes or a no."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prepared.pt"
        path.write_bytes(content)
        assert not data._is_whole(path)


def test_a_damaged_prepared_file_is_made_anew(raw: Path) -> None:
    path = data.prepare("fashion-mnist", str(raw.parent.parent))
    path.write_bytes(path.read_bytes()[:1000])
    train_set, _ = data.load_dataset("fashion-mnist", str(raw.parent.parent))
    assert int(train_set.images[0, 0, 1]) == 1


def test_a_read_only_folder_is_left_alone(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    raw.parent.chmod(0o555)
    try:
        path = data.prepare("fashion-mnist", str(raw.parent.parent))
        assert path.is_relative_to(tmp_path / "cache")
        assert [p.name for p in raw.parent.iterdir()] == ["raw"]
    finally:
        raw.parent.chmod(0o755)


def test_processes_that_race_prepare_once(raw: Path) -> None:
    """Eight processes of a node at once: one writes, all read the same."""
    code = (
        "import data, sys; made = data._make\n"
        "def make(*a): print('made'); return made(*a)\n"
        "data._make = make\n"
        "print(int(data.load_dataset('fashion-mnist', sys.argv[1])[0].images[:9].sum()))"
    )
    command = [sys.executable, "-c", code, str(raw.parent.parent)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=".")
        for _ in range(8)
    ]
    printed = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sum("made" in lines for lines in printed) == 1
    assert len({lines[-1] for lines in printed}) == 1
    assert sorted(p.name for p in raw.parent.iterdir()) == [".lock", data.PREPARED_NAME, "raw"]


def test_waiting_for_the_lock_is_bounded_and_names_its_holder(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "LOCK_TIMEOUT", 0.2)
    with data._lock(raw.parent / ".lock"):
        with pytest.raises(data.DataError, match=f"process {os.getpid()} on "):
            data.prepare("fashion-mnist", str(raw.parent.parent))


def test_offline_the_start_ends_soon_with_one_line(tmp_path: Path) -> None:
    """A proxy on a closed port stands in for a machine without a network."""
    dead = "http://127.0.0.1:9"
    result = run_command(
        *script("train_single.py", "--data-dir", tmp_path / "data", "--run-dir", tmp_path / "run"),
        http_proxy=dead,
        https_proxy=dead,
        timeout=30,
    )
    assert result.returncode == 2
    assert result.seconds < 10
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for part in (*data.SOURCES["mnist"].mirrors, "train-images-idx3-ubyte", "--dataset synthetic"):
        assert part in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_name_server_that_never_answers_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **options: object) -> None:
        time.sleep(60)
        raise TimeoutError

    monkeypatch.setattr(data.urllib.request, "urlopen", never)
    monkeypatch.setattr(data, "PROBE_TIMEOUT", 0.5)
    begin = time.monotonic()
    with pytest.raises(data.DataError, match="no answer"):
        data.download("mnist", tmp_path / "raw")
    assert time.monotonic() - begin < 5


def test_download_goes_on_to_the_next_mirror(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mirror answers with an error page, the next with files."""
    pytest.importorskip(
        "torchvision", reason="needs torchvision, which downloads", exc_type=ImportError
    )
    import http.server
    import threading

    import torchvision

    served = tmp_path / "served"
    served.mkdir()
    checksums = []
    for name in data.RAW_FILES:
        packed = gzip.compress((raw / name).read_bytes(), 1)
        (served / f"{name}.gz").write_bytes(packed)
        import hashlib

        checksums.append((f"{name}.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "resources", checksums)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: Quiet(*a, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    source = data.SOURCES["fashion-mnist"]._replace(mirrors=(f"{here}/nothing/", f"{here}/served/"))
    monkeypatch.setitem(data.SOURCES, "fashion-mnist", source)
    try:
        train_set, _ = data.load_dataset("fashion-mnist", str(tmp_path / "fresh"))
        assert int(train_set.images[0, 0, 1]) == 1
        assert sorted(p.name for p in (tmp_path / "fresh/FashionMNIST/raw").iterdir()) == sorted(
            data.RAW_FILES
        )
    finally:
        server.shutdown()


def test_real_mnist_is_recognised(mnist_dir: Path) -> None:
    parts = data.read_raw("mnist", mnist_dir / "MNIST" / "raw")
    assert parts[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    mean = parts[0].double().mean() / 255
    assert abs(mean - data.SOURCES["mnist"].mean) < 1e-4


def test_synthetic_digits_have_the_form_of_mnist(synthetic_dir: Path) -> None:
    train_set, test_set = data.load_dataset("synthetic", str(synthetic_dir))
    for dataset, count in ((train_set, 60_000), (test_set, 10_000)):
        assert dataset.images.shape == (count, 28, 28)
        assert dataset.images.dtype == torch.uint8
        assert dataset.labels.dtype == torch.int64
        assert dataset.labels.bincount().min() > 0.09 * count
    pixels = train_set.images.double() / 255
    source = data.SOURCES["synthetic"]
    assert abs(pixels.mean() - source.mean) < 1e-4
    assert abs(pixels.std() - source.std) < 1e-4


def test_synthetic_digits_are_the_same_everywhere() -> None:
    import hashlib

    from utils.digits import draw_digits

    images, labels = draw_digits(1000, seed=0)
    assert len(labels) == 1000
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
    assert digest == "77546c4c0333d5a5618063d2c0ed223809d0aa1ce60a9057c3aa9d7b68568f81"


class Set(data.ImageSet):
    def __init__(self, count: int) -> None:
        super().__init__(torch.zeros(count, 1, 1, dtype=torch.uint8), torch.arange(count))


def seen(count: int, size: int, world: int, start: int = 0, epoch: int = 0) -> list[list[int]]:
    """Return the global batches of an epoch, put together from all ranks' loaders."""
    dataset, per_rank = Set(count), []
    for rank in range(world):
        sampler = data.EpochSampler(dataset, size * world, world, rank, seed=3)
        sampler.set_epoch(epoch, start)
        loader = DataLoader(dataset, size, sampler=sampler, collate_fn=data.keep_batch)
        batches = [labels.tolist() for _, labels in loader]
        assert len(batches) * size == len(sampler)
        assert all(len(batch) == size for batch in batches)
        per_rank.append(batches)
    assert len({len(batches) for batches in per_rank}) == 1, "unequal numbers of batches"
    return [sorted(itertools.chain(*ranks)) for ranks in zip(*per_rank, strict=True)]


@pytest.mark.parametrize(("count", "size"), [(100, 8), (97, 4), (64, 64), (65, 64), (7, 1)])
def test_global_batches_do_not_depend_on_the_world_size(count: int, size: int) -> None:
    alone = seen(count, size, 1)
    assert len(alone) == count // size
    assert len(set(itertools.chain(*alone))) == count // size * size
    for world in (2, 4):
        if size % world == 0:
            assert seen(count, size // world, world) == alone


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(30, 200),
    worlds=st.tuples(st.sampled_from([1, 2, 3, 6, 7]), st.sampled_from([1, 2, 3, 6, 7])),
    size=st.integers(1, 4),
    steps=st.integers(0, 3),
)
def test_another_world_size_goes_on_without_skip_or_repeat(
    count: int, worlds: tuple[int, int], size: int, steps: int
) -> None:
    before = seen(count, size, worlds[0])[:steps]
    start = len(before) * size * worlds[0]
    after = seen(count, size, worlds[1], start)
    indices = list(itertools.chain(*before, *after))
    whole = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    assert sorted(indices) == sorted(whole[: len(indices)])
    assert count - len(indices) < size * worlds[1], "more dropped than the tail"


def test_epochs_are_shuffled_differently() -> None:
    assert seen(64, 4, 2, epoch=0) != seen(64, 4, 2, epoch=1)
    assert list(itertools.chain(*seen(64, 4, 2, epoch=0))) != list(range(64))


def test_fewer_samples_than_a_global_batch_is_an_error() -> None:
    with pytest.raises(data.DataError, match="larger than the training set"):
        data.EpochSampler(Set(5), 6)


def test_loader_workers_give_the_same_batches() -> None:
    dataset = Set(50)
    options = data.loader_options(dataset, 2, torch.device("cpu"))
    alone = data.loader_options(dataset, 0, torch.device("cpu"))
    with_workers = [labels.tolist() for _, labels in DataLoader(dataset, 7, **options)]
    assert with_workers == [labels.tolist() for _, labels in DataLoader(dataset, 7, **alone)]
    assert len(with_workers[-1]) == 1, "a last batch of one"


def test_an_empty_share_is_no_batch() -> None:
    dataset = Set(2)
    options = data.loader_options(dataset, 0, torch.device("cpu"))
    assert list(DataLoader(dataset, 7, sampler=range(2, 2, 3), **options)) == []


def test_preparation_normalises() -> None:
    prepare = data.Preparation(torch.device("cpu"), "mnist")
    images = torch.tensor([[[0, 255]]], dtype=torch.uint8)
    pixels, labels = prepare(images, torch.tensor([3]), train=True)
    source = data.SOURCES["mnist"]
    expected = [(0 - source.mean) / source.std, (1 - source.mean) / source.std]
    assert pixels.shape == (1, 1, 1, 2)
    assert pixels.flatten().tolist() == pytest.approx(expected, rel=1e-5)
    assert labels.tolist() == [3]


def test_random_shift_moves_whole_images() -> None:
    images = torch.zeros(400, 5, 5, dtype=torch.uint8)
    images[:, 2, 2] = 9
    shifted = data.RandomShift(1)(images)
    assert shifted.shape == images.shape
    assert (shifted.sum((1, 2)) == 9).all()
    places = {tuple(p) for p in shifted.nonzero()[:, 1:].tolist()}
    assert places == set(itertools.product((1, 2, 3), repeat=2))
    edge = torch.full((50, 3, 3), 7, dtype=torch.uint8)
    assert set(data.RandomShift(1)(edge).unique().tolist()) == {0, 7}, "filled with black"


def test_random_shift_is_a_crop_of_the_padded_image() -> None:
    shift = data.RandomShift(2)
    for seed, count in enumerate((20, 20, 7)):  # it keeps memory for the next batch
        images = torch.randint(256, (count, 4, 6), dtype=torch.uint8)
        torch.manual_seed(seed)
        moved = shift(images)
        torch.manual_seed(seed)
        padded, places = F.pad(images, (2,) * 4), torch.randint(5, (2, count)).T.tolist()
        for i, (y, x) in enumerate(places):
            assert torch.equal(moved[i], padded[i, y : y + 4, x : x + 6])


def test_augmentation_is_for_training_only() -> None:
    prepare = data.Preparation(torch.device("cpu"), "mnist", augment=True)
    images = torch.randint(256, (8, 28, 28), dtype=torch.uint8)
    labels = torch.zeros(8, dtype=torch.int64)
    assert torch.equal(prepare(images, labels)[0], prepare(images, labels)[0])
    assert not torch.equal(prepare(images, labels, train=True)[0], prepare(images, labels)[0])


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (torch.zeros(3, 28, 28), torch.zeros(3).long(), "images are torch.float32 [3, 28, 28]"),
        (torch.zeros(3, 1, 28, 28).byte(), torch.zeros(3).long(), "be torch.uint8 [N, H, W]"),
        (torch.zeros(3, 28, 28).byte(), torch.zeros(3).int(), "labels are torch.int32 [3]"),
        (torch.zeros(3, 28, 28).byte(), torch.zeros(2).long(), "labels are torch.int64 [2] for 3"),
        ([[1]], torch.zeros(1).long(), "images are a list: make them a tensor"),
    ],
)
def test_own_data_of_another_kind_is_told(images: Any, labels: Any, words: str) -> None:
    """Floats of 0 to 1 would train, and learn nothing: they are divided by 255 once more."""
    with pytest.raises(data.DataError) as caught:
        data.ImageSet(images, labels)
    assert words in str(caught.value)
