"""What comes after DDP: a model in parts on each rank (FSDP), and halves on two devices."""

import re
import shutil

import pytest
import torch

import data
import models
from tests import minimal
from tests.processes import PRETENDED
from utils.datasets import idx

HOLDS = re.compile(r"rank (\d) holds ([\d,]+) of ([\d,]+) parameters")


def held(ended):
    """Return how many parameters each rank holds, in their order, and how many the model has."""
    told = sorted(HOLDS.findall(ended.stdout))
    assert len({total for *_, total in told}) == 1
    numbers = [int(number.replace(",", "")) for _, number, _ in told]
    return numbers, int(told[0][2].replace(",", ""))


def test_fsdp_ends_in_the_weights_of_ddp(short_dir, tmp_path):
    """In float64, with a part of the model on each rank; an mlp takes their weights as they are."""
    saved = {}
    for script in ("ddp", "fsdp"):
        flags = ["--data-dir", short_dir, "--batch-size", 48]
        ended = minimal.train(script, 2, tmp_path / script, *flags, ALTER="exact")
        minimal.result(ended)
        saved[script] = torch.load(tmp_path / script / "model.pt", weights_only=True)
    numbers, total = held(ended)
    assert sum(numbers) == total == sum(p.numel() for p in models.mlp().parameters())
    assert max(numbers) < 1.1 * total / 2
    models.mlp().double().load_state_dict(saved["fsdp"])
    torch.testing.assert_close(saved["fsdp"], saved["ddp"], rtol=0, atol=1e-12)


def test_fsdp_evaluates_equally_many_batches_on_all_ranks(short_dir, tmp_path):
    """Rank 0 has 501 of 1,001 images, more than a batch, and rank 1 has 500: one batch."""
    folder = shutil.copytree(short_dir, tmp_path / "data")
    for path in folder.rglob("t10k*"):
        images = idx.read(path)
        path.write_bytes(idx.to_bytes(torch.cat([images, images, images[:1]])))
    flags = ["--data-dir", folder, "--batch-size", 48]
    ended = minimal.train("fsdp", 2, tmp_path / "run", *flags)
    loss, _ = minimal.result(ended, count=1001)
    # With batch normalisation, whose statistics the file has: rank 0's.
    model = models.build_model("convnet").eval()
    model.load_state_dict(torch.load(tmp_path / "run" / "model.pt", weights_only=True))
    images, labels = data.load_tensors("synthetic", str(folder))[1].tensors
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(images), labels)
    assert loss == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.gpu(2)
def test_fsdp_takes_the_gpus_and_its_file_loads_without_one(short_dir, tmp_path):
    if PRETENDED:
        pytest.skip(
            "needs real GPUs: pretended ones do not follow streams that wait for each other"
        )
    flags = ["--data-dir", short_dir, "--epochs", 2]
    ended = minimal.train("fsdp", 2, tmp_path, *flags)
    assert minimal.result(ended)[1] > 50
    numbers, total = held(ended)
    assert numbers == [total // 2] * 2
    assert b"cuda" not in (tmp_path / "model.pt").read_bytes()
