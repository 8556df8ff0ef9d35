"""Data: what is damaged is refused, what is missing is said, and every sample counts once."""

import contextlib
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
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import data
import models
from tests.processes import Training, error_line, finish, fork, run, script, start, wait_until
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


def change(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_damaged_raw_file_is_refused(raw):
    """Another shape, another value, truncated, empty; a complete folder is only read."""
    assert load(raw)[1].labels.tolist() == DIGITS
    assert sorted(p.name for p in raw.parent.rglob("*")) == sorted(("raw", *sources.RAW_FILES))
    name = "t10k-labels-idx1-ubyte"  # read last
    for damage in (7, 30, -40, 0):
        change(raw / name, damage) if damage > 0 else os.truncate(raw / name, -damage)
        with pytest.raises(DataError, match=rf"/{name} is damaged \(.+\): delete it to"):
            load(raw)


def test_waiting_for_the_data_is_bounded_names_for_whom_and_hears_a_stop(tmp_path, monkeypatch):
    (tmp_path / "Synthetic").mkdir()
    lock = tmp_path / "Synthetic" / ".lock"
    holder = fork(lambda: [lock_file(lock), time.sleep(600)])
    wait_until(lambda: lock.exists() and lock.read_text())
    monkeypatch.setattr(prepare, "LOCK_TIMEOUT", 0.2)
    with pytest.raises(DataError, match=f"process {holder.pid} on "):
        data.load_dataset("synthetic", str(tmp_path))
    process = start(*script("train_single.py", "--dataset", "synthetic", "--data-dir", tmp_path))
    assert f"waiting for process {holder.pid} on " in process.stderr.readline()
    time.sleep(0.3)  # it looks again every 0.05 s, and says so once
    process.send_signal(signal.SIGTERM)
    ended = finish(process, 90)
    holder.kill()
    assert ended.returncode == 143
    assert ended.stderr == "train_single.py: error: stopped by SIGTERM while waiting\n"


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
    """Serves files, and below /slow/ one byte now and then; notes what was fetched."""

    fetched: list[str]

    def log_message(self, *args): ...

    def do_GET(self):
        self.fetched.append(self.path)
        if not self.path.startswith("/slow/"):
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(gzip.compress(b"")[:10])  # the header of a file that may follow
            while True:
                self.wfile.write(b"x")
                time.sleep(0.1)


@pytest.fixture
def mirror(raw, tmp_path, monkeypatch):
    """Return what chooses among good, bad and slow mirrors; no file is left in ``raw``."""
    for folder in ("good", "bad", "short", "cut", "slow"):
        (tmp_path / folder).mkdir()
        for path in raw.iterdir():
            packed = tmp_path / folder / f"{path.name}.gz"
            content = path.read_bytes()
            # A copy that was cut before it was packed: gzip finds no fault in it.
            packed.write_bytes(gzip.compress(content[:-9] if folder == "short" else content))
            change(packed, 15 if folder == "bad" else 4)  # 4: the time of packing
            if folder == "cut":
                os.truncate(packed, packed.stat().st_size - 20)
    for path in raw.iterdir():
        path.unlink()
    Mirror.fetched = []
    monkeypatch.setattr(fetch, "PROBE_TIMEOUT", 60.0)  # on a busy machine, too
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: Mirror(*a, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def use(*folders):
        mirrors = tuple(f"http://127.0.0.1:{server.server_port}/{folder}/" for folder in folders)
        source = sources.SOURCES["fashion-mnist"]._replace(mirrors=mirrors)
        monkeypatch.setitem(sources.SOURCES, "fashion-mnist", source)

    yield use
    server.shutdown()
    server.server_close()


def test_mirrors_without_good_files_are_named(mirror, raw, monkeypatch):
    """An error page, corrupt files, files that were cut short, and a byte now and then."""
    mirror("nothing", "bad", "short", "cut", "slow")
    found = r"/bad/ \(.+\); .*/short/ \(.+\); .*/cut/ \(.+\); .*/slow/ \(nothing in 1 s\)"
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "DOWNLOAD_TIMEOUT", 1.0)
        with pytest.raises(DataError, match=found):
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
    mirror("nothing", "bad", "good")
    processes = [fork(lambda: load(raw)) for _ in range(4)]
    assert [process.join(60) or process.exitcode for process in processes] == [0] * 4
    assert sum(path.startswith("/good/") for path in Mirror.fetched) == len(sources.RAW_FILES)


def test_a_download_hears_a_stop(mirror, raw):
    mirror("slow")
    process = fork(lambda: load(raw))
    wait_until(lambda: Mirror.fetched)
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
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


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(30, 200),
    worlds=st.tuples(*[st.sampled_from([1, 2, 3, 6, 7])] * 2),
    size=st.integers(1, 4),
    steps=st.integers(0, 3),
    epoch=st.integers(0, 2),
)
def test_any_world_size_goes_through_the_epoch_s_order(count, worlds, size, steps, epoch):
    """And goes on at another one without skip or repeat."""
    before = seen(count, size, worlds[0], epoch=epoch)[:steps]
    after = seen(count, size, worlds[1], sum(map(len, before)), epoch)
    indices = list(itertools.chain(*before, *after))
    whole = torch.randperm(count, generator=torch.Generator().manual_seed(3 + epoch)).tolist()
    assert indices == whole[: len(indices)]
    assert count - len(indices) < size * worlds[1], "more dropped than the tail"


def test_weights_are_drawn_with_replacement_and_shared_out():
    """All ranks together draw what one does, from any position on, and as often as it weighs."""
    orders = []
    for world in (1, 2):
        arguments = Set(90), 6 * world, world
        ranks = [data.EpochSampler(*arguments, rank, 3, [0, 1, 9] * 30) for rank in range(world)]
        for sampler in ranks:
            sampler.start = 18
        orders.append([*itertools.chain(*zip(*ranks, strict=True))])
    assert orders[0] == orders[1]
    never, seldom, often = torch.tensor(orders[0]).remainder(3).bincount(minlength=3)
    assert (int(never), int(seldom + often)) == (0, 72)
    assert 3 * seldom < often
    assert len({*orders[0]}) < 60, "each at most once"


@pytest.fixture
def python_3_14():
    """Starts processes through a server, unless a start method is named."""
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(None, force=True)


def test_loader_workers_and_a_resident_set_give_the_same_batches(python_3_14):
    dataset = Set(50)
    plain = [labels.tolist() for labels in dataset.labels.split(7)]
    for each, workers in ((dataset, 2), (dataset, 0), (dataset.to(CPU), 0)):
        batches = loader.batches(DataLoader(each, 7, **data.loader_options(each, workers, CPU)))
        assert [labels.tolist() for _, labels in batches] == plain


@pytest.mark.slow
def test_a_small_dev_shm_ends_in_one_line(synthetic_dir, tmp_path):
    """A container's: the worker's own error."""
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    small = ["unshare", "-m", "sh", "-c", mount, "-"]
    if run(*small, "true").returncode:
        pytest.skip("needs the right to mount")
    extra = ["--num-workers", 2, "--max-steps", 5, "--model", "linear"]
    line = error_line(run(*small, *Training(synthetic_dir, tmp_path).command("single", *extra)))
    for word in ("/dev/shm", "--shm-size", "--num-workers 0"):
        assert word in line


def same(first, second):
    """Return whether two sets pass for the same, as the ranks compare them."""
    texts = [loader.fingerprint(each) for each in loader.place([first, second], CPU, None)]
    return texts[0] == texts[1]


def test_a_fingerprint_covers_what_ranks_may_differ_in():
    images = torch.arange(2000).remainder(256).byte().view(-1, 1, 1).expand(-1, 4, 4)
    labels = torch.arange(2000) % 10
    others = [(images, labels.roll(1)), (images.flip(0), labels), (images, labels.float())]
    others += [(images[:-1], labels[:-1]), (images.reshape(-1, 2, 8), labels)]
    for kind in (data.ImageSet, TensorDataset):
        assert same(kind(images, labels), kind(images, labels))
        assert not any(same(kind(images, labels), kind(*other)) for other in others)


class Noisy(Dataset):
    """Floats with noise from four generators, one of them its own, with labels."""

    def __init__(self, own=0.0, count=40, classes=4):
        self.own, self.count, self.classes = own, count, classes
        self.generator = torch.Generator()
        self.generator.seed()

    def __len__(self):
        return self.count

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
    assert not same(Noisy(own=1.0), Noisy(own=1.0, count=39))
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


@pytest.mark.parametrize("shape", [(4, 6), (1, 4, 6), (3, 4, 6)])
def test_random_shift_is_a_crop_of_the_padded_image(shape):
    images = torch.randint(256, (9, *shape), dtype=torch.uint8)
    torch.manual_seed(0)
    padded, places = F.pad(images, (2,) * 4), torch.randint(5, (2, 9)).T.tolist()
    crops = [
        image[..., down : down + 4, right : right + 6]
        for image, (down, right) in zip(padded, places, strict=True)
    ]
    for order in (torch.contiguous_format, *[torch.channels_last] * (images.ndim == 4)):
        torch.manual_seed(0)
        moved = data.random_shift(images.to(memory_format=order), 2)
        assert torch.equal(moved, torch.stack(crops))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Pictures(Noisy):
    def __getitem__(self, index):
        return Image.new("L", (4, 4)), 0


OWN = [
    (None, [data.ImageSet(torch.zeros(3), torch.zeros(3))], "returned ImageSet: return two map"),
    (None, (Noisy(), (1, 2)), "returned Noisy, tuple: return two"),
    (None, (Stream(), Noisy()), "returned Stream, Noisy: .*docs/recipes.md"),
    (None, (Noisy(), Noisy(count=0)), "or the test set is empty"),
    (None, (Pictures(), Noisy()), "make no batch .*PIL.* give the data set a collate_fn"),
    (nn.Linear(3, 4), (Noisy(), Noisy()), r"cannot take the images of --dataset, \[4\]"),
    (nn.Linear(4, 4).requires_grad_(False), (Noisy(), Noisy()), "no parameter to train"),
    (nn.Linear(4, 3), (Noisy(), Noisy()), "has the class 3, and --model 3 logits"),
    (nn.Linear(4, 1), [TensorDataset(torch.rand(9, 4), torch.rand(9))] * 2, r"returns \[2, 1\]"),
]


def try_first(model, train_set, test_set, transform=None):
    """Call ``first_pass`` as the scripts do, with batches of 2."""
    sampler = data.EpochSampler(train_set, 2)
    loaders = [
        DataLoader(train_set, 2, sampler=sampler, collate_fn=loader.collate),
        DataLoader(test_set, 2, collate_fn=loader.collate),
    ]
    autocast = torch.autocast("cpu", enabled=False)
    first_pass(model, *loaders, transform or data.Transform(CPU, data.SOURCES["mnist"]), autocast)


@pytest.mark.parametrize(("model", "sets", "words"), OWN)
def test_what_does_not_fit_is_one_line_before_the_first_step(model, sets, words):
    transform = data.Transform(CPU, data.SOURCES["mnist"])
    with pytest.raises(UserError, match=words):
        try_first(model or nn.Linear(4, 4), *loader.place(sets, CPU, None), transform)


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
    noise = []
    for is_tried in (False, True):
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        if is_tried:
            try_first(model, *sets)
        noise.append(states())
    assert noise[0] == noise[1]
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

    def __init__(self, offset=0):
        self.offset = offset

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"ids": torch.full((index % 3 + 1,), index + self.offset), "text": str(index)}

    def collate_fn(self, samples):
        ids = nn.utils.rnn.pad_sequence([sample["ids"] for sample in samples], batch_first=True)
        noise = torch.rand(len(samples)) + np.random.rand()
        return {"ids": ids, "more": [noise, *(sample["text"] for sample in samples)]}


def test_samples_may_have_any_form():
    """With any workers; ranks with other samples are found; a batch goes to a device."""
    torch.manual_seed(0)
    whole, other, part = Sentences(), Sentences(offset=1), Subset(Sentences(), range(12))
    [first, second] = loader.place([whole, part], CPU, None)
    found = []
    for each, workers in ((first, 0), (second, 0), (first, 2)):
        options = data.loader_options(each, workers, CPU)
        sampler = data.EpochSampler(each, 4)
        found.append([*DataLoader(each, 4, sampler=sampler, **options)])
    assert repr(found[0]) == repr(found[1]) == repr(found[2])
    assert len(found[0]) == 3
    moved = loader.to_device(found[0][0], torch.device("meta"))
    tensors = [x for x in tree_flatten(moved)[0] if isinstance(x, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert len(tensors) == 2
    assert tree_flatten(moved)[1] == tree_flatten(found[0][0])[1], "of another form"
    assert same(whole, Sentences())
    assert not same(whole, other)


class Stuck(Noisy):
    """Waits in a sample that stands in ``at``, or ends the epoch there."""

    at = -1

    def __getitem__(self, index):
        if index == self.at:
            time.sleep(600)
        if index == -self.at:
            return next(iter(()))
        return super().__getitem__(index)


def loaded(at, workers):
    dataset = Stuck()
    dataset.at = at
    [dataset, _] = loader.place([dataset] * 2, CPU, None)
    return DataLoader(dataset, 4, **data.loader_options(dataset, workers, CPU))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_ends_early_is_an_error(workers):
    assert len([*loader.batches(loaded(-99, workers))]) == 10
    with pytest.raises(DataError, match="the data set Stuck ended after 2 of 10 batches: a StopI"):
        list(loader.batches(loaded(-9, workers)))
    end_workers()


def test_a_batch_that_does_not_come_is_told_and_then_an_error(monkeypatch, capfd):
    """By PyTorch's own words, since its error has no type: they may change."""
    monkeypatch.setattr(loader, "BATCH_TIMEOUT", 0.1)
    stuck = loader.batches(loaded(9, 1), timeout=3.0)
    assert len([next(stuck), next(stuck)]) == 2
    monkeypatch.setattr(loader, "FIRST_LINE", 0.3)  # a busy machine starts a worker in more
    with pytest.raises(DataError, match=r"waited \d s .*py-spy dump --pid \d+; it wa") as caught:
        next(stuck)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("rank 0 has waited 0 s for a batch of the data set Stuck: usually")
    end_workers()  # before the loader in this traceback goes, which would wait for the stuck one
    del caught


def test_a_set_that_cannot_be_sent_to_a_worker_is_one_line(python_3_14):
    class Local(Noisy):
        pass

    [dataset, _] = loader.place([Local()] * 2, CPU, None)
    options = data.loader_options(dataset, 1, CPU)
    with pytest.raises(DataError, match=r"cannot be sent to a loader worker .*by forkserver"):
        next(loader.batches(DataLoader(dataset, 4, **options)))


# Reads by two workers, until it is killed.
READS = """
import multiprocessing, pathlib, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
sys.path.append(".")
from utils.datasets import loader

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1], force=True)
    samples = loader.SampleSet(TensorDataset(torch.arange(9), torch.arange(9)))
    options = loader.loader_options(samples, 2, torch.device("cpu"))
    batches = loader.batches(DataLoader(samples, 3, **options))
    next(batches)
    pathlib.Path(sys.argv[2]).touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_training_that_is_killed_leaves_no_worker(method, tmp_path):
    """However Python starts them."""
    (tmp_path / "reads.py").write_text(READS)
    words = [sys.executable, tmp_path / "reads.py", method, tmp_path / "started"]
    process = start(*words, real=method == "forkserver")
    wait_until((tmp_path / "started").exists)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert len(workers) >= 2
    assert psutil.wait_procs(workers, 60)[1] == []
