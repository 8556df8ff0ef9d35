"""Run a short script on the first images only, and with what else the environment asks for.

    python tests/shortened.py scripts/minimal/single.py --dataset synthetic

TEST_IMAGES: how many training images. TEST_EXACT: a network without batch normalisation, in
float64, and the images in ``DistributedSampler``'s order; the value is the number of the first
epoch. TEST_FAILS: the rank whose model raises.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler, TensorDataset, dataloader

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import data  # noqa: E402
import models  # noqa: E402

load_tensors = data.load_tensors


class InDistributedOrder(Sampler):
    """Stand in for ``RandomSampler``, with the permutations that ``DistributedSampler`` draws."""

    def __init__(self, dataset: Any, generator: Any = None) -> None:
        self.sampler: DistributedSampler = DistributedSampler(dataset, num_replicas=1, rank=0)
        self.epoch = int(os.environ["TEST_EXACT"])

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.sampler)


def load_first(name: str, data_dir: str) -> tuple[TensorDataset, TensorDataset]:
    train_set, test_set = load_tensors(name, data_dir)
    return TensorDataset(*train_set[: int(os.environ["TEST_IMAGES"])]), test_set


def fail(*images: Any) -> None:
    raise RuntimeError("this rank fails")


def build_failing() -> torch.nn.Module:
    model = models.ConvNet()
    if os.environ["RANK"] == os.environ["TEST_FAILS"]:
        model.register_forward_pre_hook(fail)
    return model


if __name__ == "__main__":
    data.load_tensors = load_first
    if "TEST_EXACT" in os.environ:
        torch.set_default_dtype(torch.float64)
        models.MODELS["convnet"] = models.mlp
        dataloader.RandomSampler = InDistributedOrder  # type: ignore[assignment, misc]
    if "TEST_FAILS" in os.environ:
        models.MODELS["convnet"] = build_failing
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
