"""The networks, which take images [B, 1, 28, 28] and return logits [B, 10], and the loss.

To train your own, write it into another file, and name it: ``--model my_network:MyNetwork``. For
another task than classification, change ``loss_and_counts``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from utils import callables
from utils.errors import UsageError, describe
from utils.weights import load_weights


class ConvNet(nn.Module):
    """Three convolutions with batch normalisation, 65,000 parameters: small and quick on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            # Folding 2 x 2 pixels into channels loses none and quarters the work that follows.
            nn.PixelUnshuffle(2),  # [B, 4, 14, 14]
            *_convolution(4, 32),  # [B, 32, 12, 12]
            *_convolution(32, 48),  # [B, 48, 10, 10]
            nn.MaxPool2d(2),  # [B, 48, 5, 5]
            *_convolution(48, 96),  # [B, 96, 3, 3]
        )
        self.classifier = nn.Linear(96 * 3 * 3, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images).flatten(1))


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    # The normalisation that follows would subtract a bias again.
    convolution = nn.Conv2d(channels_in, channels_out, 3, bias=False)
    # The evaluation uses the running statistics. With PyTorch's momentum of 0.1 they lag behind the
    # weights by some twenty steps. An epoch of large batches has fewer.
    return convolution, nn.BatchNorm2d(channels_out, momentum=0.4), nn.ReLU()


class Basic(nn.Module):
    """The network of PyTorch's MNIST example: 1.2 million parameters, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(images))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


def linear() -> nn.Module:
    """Build a linear classifier, the smallest model that learns: 7,850 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))


def mlp() -> nn.Module:
    """Build two hidden layers without normalisation or dropout: 236,000 parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(28 * 28, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def resnet18() -> nn.Module:
    """Build torchvision's ResNet-18 for one input channel: 11 million parameters."""
    try:
        from torchvision.models import resnet18 as build
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        raise UsageError(f"--model resnet18 needs torchvision ({describe(error)})") from error
    model = build(num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convnet": ConvNet,
    "basic": Basic,
    "linear": linear,
    "mlp": mlp,
    "resnet18": resnet18,
}


def build_model(name: str, init_weights: str | None = None) -> nn.Module:
    """Build the model that ``MODELS`` has under ``name``, or one of your own.

    Args:
        name: a key of ``MODELS``, or ``module:callable``, such as ``my_network:MyNetwork``. The
            callable takes no arguments, and its module is looked for in the current folder, too.
        init_weights: a file of weights to begin with. Without one they come from the seed.

    Raises:
        UsageError: a package that the model needs cannot be imported, or there is no such callable.
        CheckpointError: the file cannot be read, or nothing in it fits.
    """
    if callables.is_own(name):
        model = callables.call("--model", name)
        if not isinstance(model, nn.Module):
            raise UsageError(f"--model {name} gave {type(model).__name__}, not an nn.Module")
    else:
        model = MODELS[name]()
    if init_weights:
        load_weights(model, init_weights)
    # The order below does not exist for a convolution in three dimensions: PyTorch would fail.
    if any(tensor.ndim == 5 for tensor in (*model.parameters(), *model.buffers())):
        return model
    # In this order of memory convolutions are a fifth faster on a CPU, and more with tensor cores.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


IGNORED = -100  # the label of a sample that counts nowhere, as PyTorch's losses have it


def loss_and_counts(
    outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, dict[str, Any]]:
    """Return the mean loss of a batch, and what is counted of it.

    A line here adds a metric to all three scripts: its sum over all samples and ranks, divided by
    their number, stands in the console, metrics.jsonl, TensorBoard and summary.json.

    Samples with the label ``IGNORED`` count nowhere. The loss is the mean over those that count, or
    0 if there are none. DDP averages the gradients of these means over the ranks, also where one
    rank counted fewer samples than another.

    Args:
        outputs: of the model, logits [B, C].
        targets: of the data set, class numbers int64 [B], on any device.
        label_smoothing: of training. An evaluation has none.

    Returns:
        The loss, float [], and the counts by name: ``count``, over how many samples the loss is a
        mean (a number, or a tensor [], for which nobody waits), and any number of tensors, [B] or
        their sum []. ``correct`` is reported as accuracy.

    Raises:
        UsageError: targets of another kind. The loss would not fail, but mean nothing.
    """
    if targets.dtype != torch.int64 or targets.ndim != 1:
        raise UsageError(
            f"the targets are {targets.dtype} {list(targets.shape)}, and cross-entropy takes class"
            " numbers, torch.int64 [B]: convert them, or change loss_and_counts in models.py"
        )
    targets = targets.to(outputs.device)  # on which DataParallel gathers its outputs
    count = (targets != IGNORED).sum()
    # PyTorch's own mean of a batch without any sample that counts is 0 / 0.
    total = F.cross_entropy(
        outputs, targets, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum"
    )
    loss = total / count.clamp(min=1)
    # No class has the number IGNORED, so such a sample is never correct.
    correct = outputs.detach().argmax(1) == targets
    return loss, {"count": count, "correct": correct}
