"""Ask a trained network about the test set that it never saw, or about image files.

    python scripts/tools/predict.py runs/single-20260101-120000 --test
    python scripts/tools/predict.py runs/single-20260101-120000 digit.png

The tool takes the run directory or a checkpoint of any of the three scripts. --test also draws the
confusion matrix and the mistakes, into PNG files in the run's folder. A picture is resized to the
images of the data set, and has to look like them: MNIST's digits are light on dark.
"""

import argparse
import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import trial
from torch import Tensor, nn
from torch.utils.data import DataLoader

import data
import models
from utils.datasets import loader
from utils.device import Precision, select_devices, setup_device
from utils.errors import UsageError, UserError, printable
from utils.metrics import Metrics
from utils.training.checkpoint import read_checkpoint
from utils.training.config import THREADS
from utils.weights import load_state

COLUMNS, MAX_MISTAKES = 8, 48
MAX_NAMED = 20  # classes. With more of them, the cells of the matrix have no numbers


class Trained(NamedTuple):
    """A network to ask, its test set, and the folder of its run."""

    model: nn.Module
    transform: data.Transform
    precision: Precision
    dataset: str
    test_set: Any
    folder: Path

    def ask(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs [B, ...] for a batch, and its labels where the outputs are."""
        images, labels = self.transform(images, labels)
        with self.precision.autocast():
            return self.model(images), labels


def load(path: Path, device: torch.device, data_dir: str | None) -> Trained:
    """Load a run directory or a checkpoint."""
    if path.is_dir():
        path = path / "checkpoints" / "last.pt"
        if not path.exists():
            raise UsageError(f"{path.parent.parent} is no run directory: it has no {path.name}")
    state = read_checkpoint(path)
    name, dataset = (str(state["identity"].get(key)) for key in ("model", "dataset"))
    if name not in models.MODELS:
        raise UsageError(f"{path} holds a model {name}: add it to MODELS in models.py")
    if dataset not in data.SOURCES:
        raise UsageError(f"{path} was trained on {dataset}: add it to SOURCES, for the images")
    model = models.build_model(name)
    load_state(model, state["model"], f"{path} holds other layers than --model {name} has now")
    folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    flags = {}
    with suppress(OSError, ValueError):  # a lone checkpoint has none
        flags = json.loads((folder / "args.json").read_text())
    sets = data.load_dataset(dataset, data_dir or flags.get("data_dir", "data"))
    _, test_set = data.place(sets, device, False, 0, 0)
    transform = data.Transform(device, dataset)
    # In another precision a few predictions differ.
    precision = Precision(device, flags.get("amp", "off"))
    return Trained(model.to(device).eval(), transform, precision, dataset, test_set, folder)


def read_picture(path: Path, test_set: Any) -> Tensor:
    """Return a PNG or JPEG as a batch of one image of a data set."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("a picture needs Pillow: pip install pillow") from error
    try:
        # No other formats: for EPS Pillow would start Ghostscript.
        with Image.open(path, formats=("PNG", "JPEG")) as file:
            picture = file.convert("RGB")
    except Exception as error:  # a damaged image fails in many ways
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UsageError(f"{path} cannot be read as a PNG or JPEG ({reason})") from error
    if isinstance(test_set, data.SampleSet):
        transform = getattr(test_set.dataset, "transform", None)
        if transform is None:
            raise UsageError(
                "a picture has no way into a data set without a transform: pass --test"
            )
        return transform(picture)[None]
    *channels, height, width = test_set.images.shape[1:]
    picture = picture.convert("RGB" if channels == [3] else "L").resize((width, height))
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    image = pixels.view(height, width, -1).permute(2, 0, 1).reshape(1, *channels, height, width)
    return image if test_set.images.dtype == torch.uint8 else image / 255


def describe(outputs: Tensor, names: list[str] | None) -> str:
    """Name the two likeliest of classes by their logits [C], or print the numbers [...]."""
    if names is None:
        return ", ".join(f"{value:.6g}" for value in outputs.flatten().tolist())
    best = outputs.double().softmax(0).topk(min(2, len(outputs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return ", then ".join(f"{names[index]} ({share:.1%})" for index, share in pairs)


def class_names(trained: Trained, outputs: Any, labels: Tensor) -> list[str] | None:
    """Return the names of the classes, or None if the outputs are not the logits of classes."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or labels.is_floating_point():
        return None
    numbers = list(map(str, range(outputs.shape[1])))
    classes = getattr(getattr(trained.test_set, "dataset", None), "classes", [])
    return [*classes, *numbers[len(classes) :]]  # a model may have more outputs


def confusion_matrix(labels: Tensor, predictions: Tensor) -> Tensor:
    """Count [C, C] how often each label (row) got each prediction (column)."""
    classes = int(torch.cat([labels, predictions]).max()) + 1
    cells = labels * classes + predictions
    return cells.bincount(minlength=classes**2).view(classes, classes)


def new_figures() -> dict[str, Any]:
    """Return two empty figures of matplotlib. Raise if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("no pictures: pip install matplotlib") from None
    sizes = {"confusion_matrix": (6, 6), "mistakes": (9, 8)}
    return {name: Figure(figsize=size, layout="constrained") for name, size in sizes.items()}


def draw_confusion(figure: Any, matrix: Tensor) -> None:
    """Draw a confusion matrix into a figure of matplotlib.

    The blue grows with the logarithm of the count. Otherwise a few mistakes would be invisible.
    """
    axis = figure.subplots()
    axis.imshow(matrix.double().log1p().numpy(), cmap="Blues")
    correct, total = int(matrix.trace()), int(matrix.sum())
    axis.set_title(f"{correct:,} of {total:,} correct", fontsize=10)
    axis.set(xlabel="prediction", ylabel="label")
    if len(matrix) > MAX_NAMED:
        return
    axis.set(xticks=range(len(matrix)), yticks=range(len(matrix)))
    for row, column in matrix.nonzero().tolist():
        colour = "white" if row == column else "black"
        number = str(int(matrix[row, column]))
        axis.text(column, row, number, ha="center", va="center", fontsize=7, color=colour)


def draw_mistakes(figure: Any, test_set: Any, labels: Tensor, outputs: Tensor) -> None:
    """Draw the images with a wrong prediction, the most confident first, into a figure."""
    predictions, confidences = outputs.argmax(1), outputs.double().softmax(1).amax(1)
    wrong = (predictions != labels).nonzero().flatten()
    shown = wrong[confidences[wrong].argsort(descending=True, stable=True)][:MAX_MISTAKES].tolist()
    title = f"{len(wrong):,} of {len(labels):,} wrong: label > prediction, its probability"
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(max(1, math.ceil(len(shown) / COLUMNS)), COLUMNS, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    images = loader.read_batch(test_set, shown or [0])[0].cpu().float()
    for axis, index, image in zip(axes.flat, shown, images, strict=False):
        if image.ndim == 3:  # colour, or the first channel alone
            image = image.permute(1, 2, 0) if len(image) == 3 else image[0]
        low, high = image.min(), image.max()
        axis.imshow(((image - low) / (high - low).clamp(min=1e-6)).numpy(), cmap="gray")
        told = f"{labels[index]} > {predictions[index]} {confidences[index]:.0%}"
        axis.set_title(told, fontsize=8, color="#b2182b")


@torch.inference_mode()
def run_test(trained: Trained) -> None:
    """Print what the evaluation counts on the test set. Draw confusion matrix and mistakes."""
    metrics, found, device = Metrics(trained.transform.device), [], trained.transform.device
    options = data.loader_options(trained.test_set, 0, device)
    for batch in loader.batches(DataLoader(trained.test_set, data.EVAL_BATCH_SIZE, **options)):
        outputs, labels = trained.ask(*batch)
        metrics.update(*models.loss_and_counts(outputs, labels))
        names = class_names(trained, outputs, labels)
        found += [(outputs.cpu(), labels.cpu())] if names else []
    told = ", ".join(f"{name} {value:.6g}" for name, value in metrics.averages.items())
    print(f"{trained.dataset} test set, {metrics.count:,} samples: {told}")
    if not found:
        return
    outputs, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    try:
        figures = new_figures()
    except UserError as error:  # the score is useful without them
        print(error, file=sys.stderr)
        return
    draw_confusion(figures["confusion_matrix"], confusion_matrix(labels, outputs.argmax(1)))
    if loader.read_batch(trained.test_set, [0])[0].ndim > 2:  # not rows of numbers
        draw_mistakes(figures["mistakes"], trained.test_set, labels, outputs)
    for name, figure in figures.items():
        figure.savefig(trained.folder / f"{name}.png", dpi=120)
    print(f"pictures in {trained.folder}/confusion_matrix.png and mistakes.png")


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    if not (args.images or args.test):
        raise UsageError("nothing to do: name an image, or pass --test")
    device = select_devices(args.device)[0]
    setup_device(device, args.threads)
    trained = load(args.model, device, args.data_dir)
    for path in args.images:
        image = read_picture(path, trained.test_set)
        outputs, label = trained.ask(image, loader.read_batch(trained.test_set, [0])[1])
        names = class_names(trained, outputs, label)
        print(f"{printable(str(path))}: {describe(outputs[0].cpu(), names)}")
    if args.test:
        run_test(trained)
    return 0


def main() -> int:
    parser = trial.build_parser("predict.py", __doc__)
    parser.add_argument("model", type=Path, help="run directory or checkpoint")
    parser.add_argument("images", type=Path, nargs="*", help="PNG or JPEG")
    parser.add_argument("--test", action="store_true", help="score the test set, draw pictures")
    parser.add_argument("--data-dir", help="of the test set (default: the run's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps", "xpu"])
    parser.add_argument("--threads", type=THREADS, help="CPU threads")
    return trial.start(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
