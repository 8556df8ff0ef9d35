"""The rank ALTER_RANK, or 0, has something else than the others.

frozen, buffer, code: another model. batches, answers: fewer training data, or other labels for the
test. empty: no other rank than rank 0 finds a checkpoint.
"""

import os

import torch

import data
import models
from tests.alterations import instead, is_chosen
from utils.training import checkpoint


class OtherConvNet(models.ConvNet):
    """One line of its source differs."""


def install(alter):
    def build(before, *args):
        model = before(*args)
        if is_chosen() and alter == "frozen":
            next(model.parameters()).requires_grad = False
        if is_chosen() and alter == "buffer":
            model.register_buffer("queue", torch.zeros(3))
        if is_chosen() and alter == "code":
            OtherConvNet.__name__ = "ConvNet"  # as where two hosts have two versions of a file
            model.__class__ = OtherConvNet
        return model

    def load(before, *args):
        train, test = before(*args)
        if is_chosen() and alter == "batches":
            train = data.ImageSet(train.images[:-500], train.labels[:-500])
        if is_chosen() and alter == "answers":
            test = data.ImageSet(test.images, test.labels.flip(0))
        return train, test

    def read(before, self):
        return before(self) if os.environ["RANK"] == "0" else None

    instead(models, "build_model", build)
    instead(data, "load_dataset", load)
    if alter == "empty":
        instead(checkpoint.Checkpointer, "_read_newest", read)
