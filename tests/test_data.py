"""Data sets, the sampler and the transform."""

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset, default_collate, random_split
from torchvision.datasets import MNIST

import data
from data import ResumableDistributedSampler
from tests.helpers import ended, fork
from utils import digits
from utils.errors import UsageError

CPU = torch.device("cpu")
N = 1000  # samples
G = 126  # a global batch that 1, 2, 3, 6 and 7 ranks can share


def epoch_of(world_size, start=0, epoch=0, seed=0, size=G):
    """Return the samples of each rank, in their order."""
    shares = []
    for rank in range(world_size):
        sampler = ResumableDistributedSampler(range(N), size, world_size, rank, seed)
        sampler.set_epoch(epoch, start)
        assert len(sampler) == len([*sampler])
        shares.append([*sampler])
    return shares


@pytest.mark.parametrize("start", [0, 3 * G, 500, 999])
@pytest.mark.parametrize("world_size", [1, 2, 3, 6, 7])
def test_the_ranks_share_each_global_batch_from_any_position(world_size, start):
    [order] = epoch_of(1, size=1)
    assert sorted(order) == [*range(N)]
    shares = epoch_of(world_size, start)
    size = G // world_size
    steps = (N - start) // G
    assert [len(share) for share in shares] == [steps * size] * world_size
    for k in range(steps):
        together = {x for share in shares for x in share[k * size : (k + 1) * size]}
        assert together == {*order[start + k * G : start + (k + 1) * G]}


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    first = epoch_of(1)
    assert epoch_of(1) == first
    assert epoch_of(1, epoch=1) != first
    assert epoch_of(1, seed=5) != first


def test_a_set_smaller_than_a_global_batch_is_refused():
    assert len(ResumableDistributedSampler(range(N), N)) == N
    with pytest.raises(UsageError, match=r"of 1001 is larger than the training set \(1000 samples"):
        ResumableDistributedSampler(range(N), N + 1)


class Backwards(TensorDataset):
    """A data set with a collate_fn of its own."""

    @staticmethod
    def collate_fn(samples):
        return default_collate(samples[::-1])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_has_the_samples_that_the_sampler_asks_for(workers, digits_dir):
    """Of a data set in memory, of a split of it, and of one with a collate_fn of its own."""
    train_set, test_set = data.load("mnist", str(digits_dir))
    images, labels = train_set.tensors
    wanted = [3, 1, 4, 1, 5]
    part = random_split(train_set, [20, 1900])[0]
    for dataset, places in ((train_set, wanted), (part, [part.indices[i] for i in wanted])):
        batches = list(data.make_loader(dataset, 3, wanted, num_workers=workers))
        assert [len(batch[0]) for batch in batches] == [3, 2]
        assert torch.equal(torch.cat([batch[0] for batch in batches]), images[places])
        assert torch.equal(torch.cat([batch[1] for batch in batches]), labels[places])
    [batch] = data.make_loader(test_set, 500, num_workers=workers)
    assert torch.equal(batch[0], test_set.tensors[0]), "the order is that of the set"
    [(numbers,)] = data.make_loader(Backwards(torch.arange(10)), 10, num_workers=workers)
    assert numbers.tolist() == [*range(9, -1, -1)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_without_a_test_image_evaluates_none(workers):
    """With fewer test images than ranks, and every image is counted once."""
    one = TensorDataset(torch.zeros(1, 28, 28), torch.zeros(1))
    assert list(data.make_loader(one, 4, range(1, 1, 2), num_workers=workers)) == []


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_file_that_is_missing_or_truncated_is_one_line(damage, digits_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/"])  # as without a network
    shutil.copytree(digits_dir / "MNIST", tmp_path / "MNIST")
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UsageError, match=r"^MNIST cannot be read .*/MNIST/raw .*synthetic$"):
        data.load("mnist", str(tmp_path))


def test_a_folder_that_can_only_be_read_is_enough(digits_dir):
    def load():
        if os.geteuid() == 0:
            os.setuid(65534)  # root may write everywhere
        data.load("mnist", folder)

    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        shutil.copytree(digits_dir / "MNIST", Path(folder, "MNIST"))
        os.chmod(folder, 0o555)
        assert ended(fork(load)) == [0]


def test_of_processes_that_start_at_once_one_draws(tmp_path, monkeypatch):
    drawn = tmp_path / "drawn"

    def draw(count, seed):
        with drawn.open("a") as file:
            file.write(f"{count}\n")
        time.sleep(0.2)
        return torch.zeros(600, 28, 28).byte(), torch.zeros(600).byte()

    monkeypatch.setattr(digits, "draw_digits", draw)
    processes = [fork(lambda: data.load("synthetic", str(tmp_path / "data"))) for _ in range(4)]
    assert ended(*processes) == [0] * 4
    assert drawn.read_text().split() == ["60000", "10000"]


def test_digits_are_drawn_the_same_each_time():
    """Or runs of --dataset synthetic on two machines could not be compared."""
    images, _ = digits.draw_digits(1000, seed=0)
    assert torch.equal(images, digits.draw_digits(1000, seed=0)[0])
    assert not torch.equal(images, digits.draw_digits(1000, seed=1)[0]), "or it would be the test"


def test_bytes_become_normalised_floats_and_floats_are_left_as_they_are():
    images = torch.arange(2 * 28 * 28).remainder(256).byte().view(2, 28, 28)
    labels = torch.tensor([3, 4])
    transform = data.Transform("mnist", CPU)
    floats, given = transform([images, labels])
    assert torch.allclose(floats[:, 0], (images / 255 - 0.1307) / 0.3081)
    assert torch.equal(given, labels)
    assert torch.allclose(data.Transform("my:load", CPU)([images, labels])[0][:, 0], images / 255)
    colours = transform([images.view(2, 7, 4, 28), labels])[0]
    assert torch.equal(colours, floats.view(2, 7, 4, 28)), "seven channels"
    assert transform([floats, labels], augment=True)[0] is floats


def test_a_batch_that_is_no_pair_names_the_places_to_change():
    message = r"collate_fn.* Transform in data.py .*model\(images\)"
    with pytest.raises(UsageError, match=message):
        data.Transform("my:load", CPU)({"image": torch.zeros(2)})


def test_a_shift_moves_each_image_by_up_to_a_pixel():
    images = torch.randint(1, 256, (300, 3, 4, 6), dtype=torch.uint8)
    padded = F.pad(images, (1, 1, 1, 1))
    windows = [padded[..., y : y + 4, x : x + 6] for y in range(3) for x in range(3)]
    is_here = (torch.stack(windows) == data.random_shift(images)).flatten(2).all(2)
    assert is_here.any(0).all(), "each image is one of its windows"
    assert is_here.any(1).all(), "all nine shifts are drawn"
    black = torch.zeros(64, 28, 28, dtype=torch.uint8)
    floats, _ = data.Transform("mnist", CPU)([black, torch.zeros(64)], augment=True)
    assert floats.unique().numel() == 1, "the border has the colour of the background"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnits", "--dataset mnits is none of mnist, fashion-mnist, synthetic, nor a module:call"),
        ("json:lod", r"--dataset json:lod: AttributeError: .* no attribute 'lod'"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_one_line(name, message):
    with pytest.raises(UsageError, match=message):
        data.load(name, "split into this and an empty text/")
