"""The rank ALTER_RANK, or 0, has something else than the others.

frozen: a parameter that is not trained. answers: other labels for the test. empty: no other rank
than rank 0 finds a checkpoint.
"""

import os

import data
import models
from tests.alterations import instead, is_chosen
from utils.training import checkpoint


def install(alter):
    def build(before, *args):
        model = before(*args)
        if is_chosen() and alter == "frozen":
            next(model.parameters()).requires_grad = False
        return model

    def load(before, *args):
        train, test = before(*args)
        if is_chosen() and alter == "answers":
            test = data.ImageSet(test.images, test.labels.flip(0))
        return train, test

    def read(before, self):
        return before(self) if os.environ["RANK"] == "0" else None

    instead(models, "build_model", build)
    instead(data, "load_dataset", load)
    if alter == "empty":
        instead(checkpoint.Checkpointer, "_read_newest", read)
