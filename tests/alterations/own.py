"""Data and a model of a user's own: ``--dataset mine --model mine``.

regression: another loss, without accuracy. uneven: a layer that only rank 0 uses. overflow: a
gradient that becomes infinite on rank 1. state: more to save than weights.
"""

import os

import torch
from torch import nn
from torch.optim import swa_utils

import data
import models
from tests.alterations import instead
from utils.datasets.sources import SOURCES, Source
from utils.training import run

TASKS = ("regression", "uneven", "overflow", "state")
task = ""


def install(alter):
    global task
    task = alter
    if alter not in TASKS:
        return
    SOURCES["mine"] = Source("Mine")
    instead(data, "load_dataset", lambda *_: load())
    models.MODELS["mine"] = State if alter == "state" else Branched
    if alter == "regression":
        models.loss_and_counts = regression
    if alter == "state":
        instead(torch.optim, "SGD", two_groups)
        instead(run.Run, "__init__", keep_average)
        instead(run.Run, "end_step", update_average)


def load():
    """Make images whose bright row is the label."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(60, (3000, 28, 28), generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (3000,), generator=generator)
    images[torch.arange(3000), 2 * labels] = 255
    train = data.ImageSet(images[:2400], labels[:2400], 0.13, 0.13)
    return train, data.ImageSet(images[2400:], labels[2400:])


class Branched(nn.Module):
    """Leaves out a layer in some training steps."""

    def __init__(self):
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(784, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.steps = 0

    def forward(self, images):
        x, rank = self.stem(images.flatten(1)).relu(), os.environ.get("RANK")
        is_left_out = task == "uneven" and self.steps > 1 and rank != "0"
        if not (self.training and is_left_out):
            x = x + self.branch(x).relu()
        if (task, self.steps, rank) == ("overflow", 2, "1"):
            x.register_hook(lambda grad: grad + float("inf"))
        self.steps += self.training
        return self.head(x)


class State(nn.Linear):
    """Keeps in a buffer what this rank has seen."""

    def __init__(self):
        super().__init__(784, 10)
        self.register_buffer("queue", torch.zeros(10))

    def forward(self, images):
        outputs = super().forward(images.flatten(1))
        if self.training:
            self.queue = outputs.detach().mean(0)
        return outputs


def two_groups(sgd, parameters, lr, weight_decay, **_):
    torch.optim.SGD = sgd  # a class again
    weight, bias = parameters
    decayed = {"params": [weight], "weight_decay": weight_decay}
    return torch.optim.AdamW([{"params": [bias], "lr": lr / 2}, decayed], lr / 10)


def keep_average(before, self, *args, **kwargs):
    before(self, *args, **kwargs)
    average = swa_utils.AveragedModel(self.model, avg_fn=lambda a, b, n: 0.9 * a + b / 10)
    self.extra = {"ema": average}


def update_average(before, self):
    self.extra["ema"].update_parameters(self.model)
    before(self)


def regression(outputs, targets, label_smoothing=0.0):
    error = outputs[:, 0] - targets.to(outputs.device)
    return error.square().mean(), {"count": len(targets), "error": error.detach().abs()}
