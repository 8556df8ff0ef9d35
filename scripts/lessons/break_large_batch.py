"""Break it: a large batch with the old learning rate, and with a linearly scaled one.

python scripts/lessons/break_large_batch.py

Goyal et al., https://arxiv.org/abs/1706.02677, scaled linearly up to a batch of 8,192 on ImageNet.
"""

import torch
import torch.nn.functional as F
from _lesson import start
from torch import Tensor, nn

SAMPLES, FEATURES, CLASSES = 16384, 32, 10  # of one epoch
RATE = 0.04  # at the small batch
# The batch, the factor of the rate, and the part of the epoch in which the rate rises.
CASES = {
    "small batch": (32, 1, 0.0),
    "large, rate as it was": (512, 1, 0.0),
    "large, linear": (512, 16, 0.0),
    "large, linear, warm-up": (512, 16, 0.5),
    "huge, linear, warm-up": (2048, 64, 0.5),
    "huge, capped, warm-up": (2048, 4, 0.5),
}


def draw(generator: torch.Generator, centres: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return points [count, FEATURES] around the centres, and labels; a class has four centres."""
    chosen = torch.randint(len(centres), (count,), generator=generator)
    return centres[chosen] + torch.randn(count, FEATURES, generator=generator), chosen % CLASSES


def train(batch_size: int, times: float, warmup: float) -> tuple[float, float]:
    """Train for an epoch; return the highest training loss, and the test accuracy."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    # Their mean is not 0, as with images: in its direction the loss is steep.
    centres = 2 + 1.5 * torch.randn(4 * CLASSES, FEATURES, generator=generator)
    inputs, labels = draw(generator, centres, SAMPLES)
    test_inputs, test_labels = draw(generator, centres, 2048)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    steps, losses = SAMPLES // batch_size, []
    for step in range(steps):
        rise = min(1.0, (step + 1) / (warmup * steps)) if warmup else 1.0
        optimizer.param_groups[0]["lr"] = RATE * times * rise * (1 - step / steps)
        batch = slice(step * batch_size, (step + 1) * batch_size)
        loss = F.cross_entropy(model(inputs[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    correct = model(test_inputs).argmax(1) == test_labels
    return max(losses), correct.float().mean().item()


def main() -> dict[str, bool]:
    print(f"one epoch of {SAMPLES:,} samples; guessing one of {CLASSES} classes has a loss of 2.30")
    print(f"{'':24}batch  steps  rate  highest loss  accuracy")
    highest, accuracy = {}, {}
    for name, (batch_size, times, warmup) in CASES.items():
        highest[name], accuracy[name] = train(batch_size, times, warmup)
        steps, rate = SAMPLES // batch_size, RATE * times
        print(
            f"  {name:22}{batch_size:5}{steps:7}{rate:6.2f}{highest[name]:14.2f}"
            f"{accuracy[name]:10.1%}"
        )
    small, same, linear, warm, huge, capped = CASES
    return {
        "with the same rate a large batch learns less, since it takes fewer steps": accuracy[same]
        < accuracy[small] - 0.05,
        "with a linearly scaled rate the first steps are too long, and the loss rises": highest[
            linear
        ]
        > 2 * highest[same],
        "cure: with a warm-up it does not rise, and the accuracy is nearly the small batch's": (
            highest[warm] < 1.2 * highest[same] and accuracy[warm] > accuracy[small] - 0.05
        ),
        "a still larger batch fails with linear scaling even after a warm-up": accuracy[huge] < 0.5,
        "cure: a capped rate is better there, although few steps remain": accuracy[capped]
        > accuracy[huge] + 0.2,
    }


if __name__ == "__main__":
    start(main)
