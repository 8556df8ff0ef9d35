"""Run a minimal script in another way.

    TEST_EXACT=0 python tests/altered.py scripts/minimal/single.py --dataset synthetic

TEST_EXACT: a network without batch normalisation, in float64, and the images in
``DistributedSampler``'s order; the value is the number of the first epoch. TEST_FAILS: the rank
whose model raises.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch.utils.data import DistributedSampler, dataloader

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import models  # noqa: E402


class InDistributedOrder(DistributedSampler):
    """Stand in for ``RandomSampler``, with the permutations that ``DistributedSampler`` draws."""

    def __init__(self, dataset, generator=None):
        super().__init__(dataset, num_replicas=1, rank=0)
        self.epoch = int(os.environ["TEST_EXACT"])

    def __iter__(self):
        order = super().__iter__()
        self.epoch += 1
        return order


class Failing(models.ConvNet):
    def forward(self, images):
        if os.environ["RANK"] == os.environ["TEST_FAILS"]:
            raise RuntimeError("this rank fails")
        return super().forward(images)


if __name__ == "__main__":
    if "TEST_EXACT" in os.environ:
        torch.set_default_dtype(torch.float64)
        models.MODELS["convnet"] = models.mlp
        dataloader.RandomSampler = InDistributedOrder
    if "TEST_FAILS" in os.environ:
        models.MODELS["convnet"] = Failing
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
