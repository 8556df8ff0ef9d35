"""Data: what is damaged is refused, what is missing is said, and every sample counts once."""

import errno
import gzip
import hashlib
import http.server
import itertools
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import data
import models
from tests.processes import error_line, fork, run, script, start, wait_until
from utils import files, signals
from utils.datasets import fetch, idx, loader, prepare, sources
from utils.datasets.digits import draw_digits
from utils.datasets.sources import DataError
from utils.errors import UserError, end_workers, explain
from utils.files import lock_file
from utils.training.first_pass import first_pass

CPU = torch.device("cpu")
FOLDER = "FashionMNIST/raw"  # small files stand in for these
DIGITS = [*range(10)] * 10
LEVELS = torch.arange(256) / 255


@pytest.fixture
def raw(tmp_path, monkeypatch):
    """Raw files in the place of Fashion-MNIST's, with their checksums and no mirror."""
    (tmp_path / FOLDER).mkdir(parents=True)
    for name in sources.RAW_FILES:
        shape = (100, 4, 4) if "images" in name else (100,)
        values = torch.arange(1600 if "images" in name else 100) % 10
        content = idx.to_bytes(values.byte().view(shape))
        (tmp_path / FOLDER / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        monkeypatch.setitem(sources.CHECKSUMS, f"{FOLDER}/{name}", digest)
    source = sources.SOURCES["fashion-mnist"]._replace(mirrors=())
    monkeypatch.setitem(sources.SOURCES, "fashion-mnist", source)
    return tmp_path / FOLDER


def load(raw):
    return data.load_dataset("fashion-mnist", str(raw.parent.parent))


def test_a_damaged_raw_file_is_refused(raw):
    """Another value, and truncated; a complete folder is only read."""
    assert load(raw)[1].labels.tolist() == DIGITS
    assert sorted(p.name for p in raw.parent.rglob("*")) == sorted(("raw", *sources.RAW_FILES))
    path = raw / "t10k-labels-idx1-ubyte"  # read last
    whole = path.read_bytes()
    for content in (whole[:30] + b"x" + whole[31:], whole[:40]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"/{path.name} is damaged \(.+\): delete it to"):
            load(raw)


def test_waiting_for_the_data_is_bounded_and_names_for_whom(tmp_path, monkeypatch, capfd):
    (tmp_path / "Synthetic").mkdir()
    lock = tmp_path / "Synthetic" / ".lock"
    holder = fork(lambda: [lock_file(lock), time.sleep(600)])
    wait_until(lambda: lock.exists() and lock.read_text())
    monkeypatch.setattr(prepare, "LOCK_TIMEOUT", 0.2)
    monkeypatch.setattr(files, "QUIET_SECONDS", 0.1)
    try:
        with pytest.raises(DataError, match=f"process {holder.pid} on "):
            data.load_dataset("synthetic", str(tmp_path))
    finally:
        holder.kill()
        holder.join()
    [line] = capfd.readouterr().err.splitlines()  # it looks again every 0.05 s, and says so once
    assert f"waiting for process {holder.pid} on " in line


def test_offline_the_start_ends_soon_with_one_line(tmp_path):
    """A proxy on a closed port stands in for a machine without a network."""
    dead = "http://127.0.0.1:9"
    flags = ["--data-dir", tmp_path / "data", "--run-dir", tmp_path / "run"]
    command = script("train_single.py", *flags)
    line = error_line(run(*command, http_proxy=dead, https_proxy=dead))
    for part in (*data.SOURCES["mnist"].mirrors, "train-images-idx3-ubyte", "--dataset synthetic"):
        assert part in line
    assert not (tmp_path / "run").exists()


class Mirror(http.server.SimpleHTTPRequestHandler):
    """Serves files, and notes what was fetched."""

    fetched: list[str]

    def log_message(self, *args):
        self.fetched.append(self.path)


@pytest.fixture
def mirror(raw, tmp_path, monkeypatch):
    """Return what chooses among mirrors, two of them bad; no file is left in ``raw``."""
    for path in raw.iterdir():
        content = path.read_bytes()
        packed = gzip.compress(content)
        # gzip finds no fault in a copy that was cut before it was packed.
        for folder, sent in {
            "good": packed,
            "cut": packed[:-20],
            "short": gzip.compress(content[:-9]),
        }.items():
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / f"{path.name}.gz").write_bytes(sent)
        path.unlink()
    Mirror.fetched = []
    monkeypatch.setattr(fetch, "PROBE_TIMEOUT", 60.0)  # on a busy machine, too
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: Mirror(*a, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def use(*folders, port=server.server_port):
        mirrors = tuple(f"http://127.0.0.1:{port}/{folder}/" for folder in folders)
        source = sources.SOURCES["fashion-mnist"]._replace(mirrors=mirrors)
        monkeypatch.setitem(sources.SOURCES, "fashion-mnist", source)

    yield use
    server.shutdown()
    server.server_close()


def test_mirrors_without_good_files_are_named(mirror, raw):
    """An error page, and files that were cut short."""
    mirror("nothing", "short", "cut")
    with pytest.raises(DataError, match=r"/nothing/ \(.*/short/ \(.+\); .*/cut/ \(.+\)"):
        load(raw)
    assert list(raw.iterdir()) == []
    for path in (raw.parent.parent / "good").iterdir():
        path.rename(raw / path.name)  # packed files in the folder come before all mirrors
    assert load(raw)[1].labels.tolist() == DIGITS


def test_a_disk_that_is_full_is_one_line_and_leaves_no_half_file(mirror, raw, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    mirror("good")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"write .* \(No space left on device\): pass another"):
        load(raw)
    assert list(raw.iterdir()) == []


def test_of_processes_that_race_one_downloads(mirror, raw):
    mirror("nothing", "good")
    processes = [fork(lambda: load(raw)) for _ in range(4)]
    assert [process.join(60) or process.exitcode for process in processes] == [0] * 4
    whole = [path for path in Mirror.fetched if path.startswith("/good/")]
    assert len(whole) == 1 + len(sources.RAW_FILES), "beside a look whether the mirror is there"


def test_a_download_hears_a_stop(mirror, raw):
    """From a mirror that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mirror("silent", port=silent.getsockname()[1])
        process = fork(lambda: load(raw))
        connection, _ = silent.accept()
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
        connection.close()
    assert process.exitcode == 143


@pytest.mark.parametrize("name", ["mnist", "synthetic"])
def test_the_whole_sets(name, request):
    """The real one where there is one."""
    sets = data.load_dataset(name, str(request.getfixturevalue(f"{name}_dir")))
    for dataset, count in zip(sets, (60_000, 10_000), strict=True):
        assert dataset.images.shape == (count, 28, 28)
        assert dataset.labels.bincount(minlength=10).min() > 0.08 * count
    counts = sum(part.flatten().bincount(minlength=256) for part in sets[0].images.split(999))
    share, source = counts / 47_040_000, sources.SOURCES[name]
    assert (mean := float(share @ LEVELS)) == pytest.approx(source.mean, abs=1e-4)
    assert float(share @ (LEVELS - mean) ** 2) ** 0.5 == pytest.approx(source.std, abs=1e-4)


def test_synthetic_digits_are_the_same_everywhere():
    digest = hashlib.sha256(draw_digits(1000, seed=0)[0].numpy().tobytes()).hexdigest()
    assert digest == "77546c4c0333d5a5618063d2c0ed223809d0aa1ce60a9057c3aa9d7b68568f81"


class Set(data.ImageSet):
    def __init__(self, count):
        super().__init__(torch.zeros(count, 1, 1, dtype=torch.uint8), torch.arange(count))


def seen(count, size, world, start=0, epoch=0):
    """Return the global batches of an epoch, put together from all ranks' samplers."""
    per_rank = []
    for rank in range(world):
        sampler = data.EpochSampler(Set(count), size * world, world, rank, seed=3)
        sampler.set_epoch(epoch)
        sampler.start = start
        indices = [*sampler]
        assert len(indices) == len(sampler)
        per_rank.append([indices[i : i + size] for i in range(0, len(indices), size)])
    # The ranks take turns.
    return [[*itertools.chain(*zip(*ranks, strict=True))] for ranks in zip(*per_rank, strict=True)]


@pytest.mark.parametrize("worlds", [(1, 2), (2, 3), (3, 1), (7, 2)])
def test_any_world_size_goes_through_the_epoch_s_order(worlds):
    """And goes on at another one without skip or repeat."""
    before = seen(101, 3, worlds[0], epoch=1)[:3]
    after = seen(101, 3, worlds[1], sum(map(len, before)), epoch=1)
    indices = list(itertools.chain(*before, *after))
    whole = torch.randperm(101, generator=torch.Generator().manual_seed(3 + 1)).tolist()
    assert indices == whole[: len(indices)]
    assert 101 - len(indices) < 3 * worlds[1], "more dropped than the tail"


def test_samples_are_drawn_as_often_as_they_weigh():
    sampler = data.EpochSampler(Set(90), 6, weights=[0, 1, 9] * 30)
    never, seldom, often = torch.tensor([*sampler]).remainder(3).bincount(minlength=3)
    assert never == 0
    assert 3 * seldom < often


def same(first, second):
    """Return whether two sets pass for the same, as the ranks compare them."""
    texts = [loader.fingerprint(each) for each in loader.place([first, second], CPU, None)]
    return texts[0] == texts[1]


def test_a_fingerprint_covers_what_ranks_may_differ_in():
    images = torch.arange(2000).remainder(256).byte().view(-1, 1, 1).expand(-1, 4, 4)
    labels = torch.arange(2000) % 10
    others = [(images, labels.roll(1)), (images.flip(0), labels), (images[:-1], labels[:-1])]
    for kind in (data.ImageSet, TensorDataset):
        assert same(kind(images, labels), kind(images, labels))
        assert not any(same(kind(images, labels), kind(*other)) for other in others)


class Noisy(Dataset):
    """Floats with noise from four generators, one of them its own, with labels."""

    def __init__(self, own=0.0, classes=4):
        self.own, self.classes = own, classes
        self.generator = torch.Generator()
        self.generator.seed()

    def __len__(self):
        return 40

    def __getitem__(self, index):
        noise = [random.random(), np.random.rand(), float(torch.rand(()))]
        noise += [self.own * float(torch.rand((), generator=self.generator))]
        return index + torch.tensor(noise), index % self.classes


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_random_transforms_are_no_difference_between_ranks():
    """Nor do they disturb the generators of the process."""
    before = states()
    assert same(Noisy(), Noisy())
    assert same(Noisy(own=1.0), Noisy(own=1.0)), "drawn from a generator of its own"
    assert not same(Noisy(own=1.0), Noisy(own=1.0, classes=5))
    assert states() == before


def test_random_transforms_are_the_same_with_any_ranks_and_workers():
    """And from any position of the epoch on; another epoch draws others."""

    def drawn(world, workers, epoch=0, start=0, seed=7):
        torch.manual_seed(seed)
        found, dataset = {}, loader.place([Noisy()] * 2, CPU, None)[0]
        for rank in range(world):
            sampler = data.EpochSampler(dataset, 4 * world, world, rank, seed=3)
            sampler.set_epoch(epoch)
            sampler.start = start
            options = data.loader_options(dataset, workers, CPU)
            for images, labels in DataLoader(dataset, 4, sampler=sampler, **options):
                assert torch.equal(images[:, 0].long() % 4, labels)
                found |= {int(image[0]): image.tolist() for image in images}
        return found

    whole = drawn(1, 0)
    assert len(whole) == 40
    assert drawn(2, 2) == drawn(1, 2) == whole
    assert drawn(1, 0, start=20).items() < whole.items()
    for other in ({"epoch": 1}, {"seed": 8}):
        assert not drawn(1, 0, **other).items() & whole.items()


def test_transform_normalises_each_channel():
    mean, std = (0.5, 0.25, 0.1), (0.2, 0.3, 0.4)
    images, labels = torch.randint(256, (8, 3, 32, 40), dtype=torch.uint8), torch.rand(8)
    own = data.ImageSet(images, labels)
    own.mean, own.std = mean, std
    for dataset in loader.place([Subset(own, range(4)), own], CPU, None):
        transform = data.Transform(CPU, dataset, augment=True)
        pixels, targets = transform((images, labels))
        for channel in range(3):
            expected = (images[:, channel] / 255 - mean[channel]) / std[channel]
            torch.testing.assert_close(pixels[:, channel], expected)
    plain, _ = data.Transform(CPU, TensorDataset(images, labels))((images, labels))
    torch.testing.assert_close(plain, images / 255, msg="a set without mean and std")
    assert torch.equal(targets, labels), "the numbers of a regression"
    assert not torch.equal(transform((images, labels), train=True)[0], pixels), "no shift"
    already, numbers = transform((pixels, labels.double()), train=True)
    assert already is pixels, "floats have been transformed"
    assert numbers.dtype == torch.float32, "Python's numbers become float64"


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6)])
def test_random_shift_is_a_crop_of_the_padded_image(shape):
    images = torch.randint(256, (9, *shape), dtype=torch.uint8)
    torch.manual_seed(0)
    padded, places = F.pad(images, (2,) * 4), torch.randint(5, (2, 9)).T.tolist()
    crops = [
        image[..., down : down + 4, right : right + 6]
        for image, (down, right) in zip(padded, places, strict=True)
    ]
    torch.manual_seed(0)
    assert torch.equal(data.random_shift(images, 2), torch.stack(crops))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Pictures(Noisy):
    def __getitem__(self, index):
        return Image.new("L", (4, 4)), 0


OWN = [
    (None, [data.ImageSet(torch.zeros(3), torch.zeros(3))], "returned ImageSet: return two map"),
    (None, (Stream(), Noisy()), "returned Stream, Noisy: .*docs/recipes.md"),
    (None, (Noisy(), Subset(Noisy(), [])), "or the test set is empty"),
    (None, (Pictures(), Noisy()), "make no batch .*PIL.* give the data set a collate_fn"),
    (nn.Linear(3, 4), (Noisy(), Noisy()), r"cannot take the images of --dataset, \[4\]"),
    (nn.Linear(4, 3), (Noisy(), Noisy()), "has the class 3, and --model 3 logits"),
    (nn.Linear(4, 1), [TensorDataset(torch.rand(9, 4), torch.rand(9))] * 2, r"returns \[2, 1\]"),
]


def try_first(model, train_set, test_set):
    """Call ``first_pass`` as the scripts do, with batches of 2."""
    sampler = data.EpochSampler(train_set, 2)
    loaders = [
        DataLoader(train_set, 2, sampler=sampler, collate_fn=loader.collate),
        DataLoader(test_set, 2, collate_fn=loader.collate),
    ]
    autocast = torch.autocast("cpu", enabled=False)
    first_pass(model, *loaders, data.Transform(CPU, data.SOURCES["mnist"]), autocast)


@pytest.mark.parametrize(("model", "sets", "words"), OWN)
def test_what_does_not_fit_is_one_line_before_the_first_step(model, sets, words):
    with pytest.raises(UserError, match=words):
        try_first(model or nn.Linear(4, 4), *loader.place(sets, CPU, None))


def test_other_mistakes_are_one_line(monkeypatch):
    monkeypatch.setitem(models.MODELS, "lazy", lambda: nn.LazyLinear(10))
    for words, call in {
        "3 weights for 90 samples": lambda: data.EpochSampler(Set(90), 6, weights=[1, 2, 3]),
        "--data-on-device needs the tensors": lambda: loader.place([Noisy()] * 2, CPU, True),
        "--model has a lazy layer": lambda: models.build_model("lazy"),
        "--batch-size is too small": lambda: nn.BatchNorm1d(3)(torch.zeros(1, 3)),
    }.items():
        with pytest.raises((UserError, ValueError, RuntimeError)) as caught:
            call()
        assert re.search(words, str(explain(caught.value)))


def test_the_first_pass_changes_nothing_and_notes_statistics_that_move(capsys):
    """Nor does it move what the generators draw."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    sets = loader.place([Noisy()] * 2, CPU, None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    noise = states()
    try_first(model, *sets)
    assert states() == noise
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert "still move" not in capsys.readouterr().out
    model[0].requires_grad_(False)
    try_first(model, *sets)
    assert "of the frozen 0 still move" in capsys.readouterr().out


class Sentences:
    """Dicts of sequences of different lengths, of a class that is no Dataset, as Hugging Face's."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"ids": torch.full((index % 3 + 1,), index), "text": str(index)}

    def collate_fn(self, samples):
        ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
        return {"ids": ids, "more": [[sample["text"] for sample in samples], ids]}


def test_samples_may_have_any_form():
    """Its own collate_fn makes a batch, which goes to a device."""
    for each in loader.place([Sentences(), Subset(Sentences(), range(12))], CPU, None):
        [_, batch, _] = DataLoader(each, 4, **data.loader_options(each, 0, CPU))
        moved = loader.to_device(batch, torch.device("meta"))
        assert moved["ids"].shape == (4, 3)
        assert [moved["ids"].device.type, moved["more"][1].device.type] == ["meta"] * 2
        assert moved["more"][0] == ["4", "5", "6", "7"]


class Stuck(Noisy):
    def __getitem__(self, index):
        if index == 9:
            time.sleep(600)
        return super().__getitem__(index)


class Ending(Noisy):
    def __getitem__(self, index):
        return super().__getitem__(index) if index < 9 else next(iter(()))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_ends_early_is_an_error(workers):
    [dataset, _] = loader.place([Ending()] * 2, CPU, None)
    options = data.loader_options(dataset, workers, CPU)
    words = "the data set Ending ended after 2 of 10 batches: a StopI"
    with pytest.raises(DataError, match=words):
        list(loader.batches(DataLoader(dataset, 4, **options)))
    end_workers()


def test_a_batch_that_does_not_come_is_told_and_then_an_error(monkeypatch, capfd):
    """By PyTorch's own words, since its error has no type: they may change."""
    monkeypatch.setattr(loader, "BATCH_TIMEOUT", 0.1)
    [dataset, _] = loader.place([Stuck()] * 2, CPU, None)
    options = data.loader_options(dataset, 1, CPU)
    stuck = loader.batches(DataLoader(dataset, 4, **options), timeout=3.0)
    assert len([next(stuck), next(stuck)]) == 2
    monkeypatch.setattr(loader, "FIRST_LINE", 0.3)  # a busy machine starts a worker in more
    with pytest.raises(DataError, match=r"waited \d s .*py-spy dump --pid \d+; it wa") as caught:
        next(stuck)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("rank 0 has waited 0 s for a batch of the data set Stuck: usually")
    monkeypatch.setattr(signals, "_received", signal.SIGTERM)
    with pytest.raises(signals.Stopped) as stopped:
        [*loader.batches(DataLoader(dataset, 4, **options))]
    end_workers()  # before the loader in this traceback goes, which would wait for the stuck one
    del caught, stopped


@pytest.fixture
def python_3_14():
    """Starts processes through a server, unless a start method is named."""
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(None, force=True)


def test_a_set_is_sent_to_a_worker_or_the_reason_is_told(python_3_14):
    class Local(Noisy):
        pass

    def read(dataset):
        [dataset, _] = loader.place([dataset] * 2, CPU, None)
        options = data.loader_options(dataset, 1, CPU)
        return [labels.tolist() for _, labels in loader.batches(DataLoader(dataset, 7, **options))]

    assert read(Set(9)) == [[0, 1, 2, 3, 4, 5, 6], [7, 8]]
    with pytest.raises(DataError, match=r"cannot be sent to a loader worker .*by forkserver"):
        read(Local())


# Reads by workers that a server has started, as in Python 3.14, until it is killed.
READS = """
import multiprocessing, pathlib, sys, time
sys.path.append(".")
import data
from torch.utils.data import DataLoader
from utils.datasets import loader

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver", force=True)
    samples = data.ImageSet([*range(9)], [*range(9)])
    options = data.loader_options(samples, 2, samples.images.device)
    batches = loader.batches(DataLoader(samples, 3, **options))
    next(batches)
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_training_that_is_killed_leaves_no_worker(tmp_path):
    """PyTorch sees to it where workers are forks."""
    (tmp_path / "reads.py").write_text(READS)
    process = start(sys.executable, tmp_path / "reads.py", tmp_path / "started", real=True)
    wait_until((tmp_path / "started").exists)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert len(workers) >= 2
    assert psutil.wait_procs(workers, 60)[1] == []
