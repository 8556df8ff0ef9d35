"""A training script on data, a network and a task of one's own, as the README has a user edit it.

OWN=colour100 python tests/own.py train_single.py --max-steps 40 ...

grey20: 20 classes of grey images; colour100: 100 classes of colour images of 32 x 32; regression:
two numbers from an image; depth: each training step uses other layers of the network; uneven: so
does each rank; overflow: in one step the gradient of rank 1 is infinite.
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import data  # noqa: E402
import models  # noqa: E402
from utils import evaluation  # noqa: E402
from utils.datasets.sources import SOURCES, Source  # noqa: E402

WHICH = os.environ["OWN"]
CLASSES = {
    "grey20": 20,
    "colour100": 100,
    "regression": 0,
    "depth": 10,
    "uneven": 10,
    "overflow": 10,
}[WHICH]


def load(name, data_dir):
    """Make images with a bright spot, whose place is the label."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 32, 32) if WHICH == "colour100" else (28, 28)
    images = torch.randint(60, (3000, *shape), generator=generator, dtype=torch.uint8)
    columns, rows = torch.randint(10, (2, 3000), generator=generator)
    if CLASSES:
        labels = torch.randint(CLASSES, (3000,), generator=generator)
        columns, rows = labels % 10, labels // 10
    for image, column, row in zip(images, columns.tolist(), rows.tolist(), strict=True):
        image[..., 2 * row + 3 : 2 * row + 6, 2 * column + 3 : 2 * column + 6] = 255
    if not CLASSES:
        labels = torch.stack([columns, rows], 1) / 10
    return data.ImageSet(images[:2400], labels[:2400]), data.ImageSet(images[2400:], labels[2400:])


class Depth(nn.Module):
    """Leaves out one of its two layers in each training step."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(784, 32), nn.Linear(32, 10)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.steps = 0

    def forward(self, images):
        x = self.stem(images.flatten(1)).relu()
        for number, layer in enumerate(self.layers):
            # The same on every rank: who draws here would have ranks with different graphs.
            is_on = self.steps % 2 == number
            if WHICH == "uneven":
                is_on = number == 0 or self.steps < 2 or os.environ["RANK"] == "0"
            if not self.training or is_on or WHICH == "overflow":
                x = x + layer(x).relu()
        if (WHICH, self.steps, os.environ["RANK"]) == ("overflow", 2, "1"):
            x.register_hook(lambda grad: grad + float("inf"))
        self.steps += self.training
        return self.head(x)


def build():
    if WHICH in ("depth", "uneven", "overflow"):
        return Depth()
    if WHICH == "colour100":
        first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        return nn.Sequential(
            first, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 100)
        )
    return nn.Sequential(nn.Flatten(), nn.Linear(784, CLASSES or 2))


def regression(outputs, targets, label_smoothing=0.0):
    loss = nn.functional.mse_loss(outputs, targets)
    return loss, (outputs.detach() - targets).abs().amax(1) < 0.2


if __name__ == "__main__":
    colour = WHICH == "colour100"
    mean, std = ((0.13,) * 3, (0.11,) * 3) if colour else (0.13, 0.13)
    SOURCES["mine"] = Source("Mine", mean, std)
    data.load_dataset = load
    models.MODELS["mine"] = build
    if WHICH == "regression":
        models.loss_and_correct = evaluation.loss_and_correct = regression
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
