"""Ask a trained network about image files, or about the test set that it never saw.

    python scripts/tools/predict.py runs/single-20260101-120000 digit.png
    python scripts/tools/predict.py runs/single-20260101-120000 --test

The tool takes the run directory or a checkpoint of any of the three scripts. A picture is a PNG or
JPEG of one digit, on a background that its border shows. --test also draws the confusion matrix and
the mistakes, into the run's TensorBoard and into PNG files in its folder.
"""

import argparse
import json
import math
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
import trial
from torch import Tensor, nn

import data
import models
from utils.checkpoint import read_checkpoint
from utils.config import MAX_THREADS, number
from utils.device import Precision, select_devices, setup_device
from utils.errors import UsageError, UserError, printable
from utils.weights import load_state

# The data sets whose images have MNIST's form, with the longer side of what is shown, in pixels.
BOXES = {"mnist": 20, "synthetic": 20, "fashion-mnist": 28}
CLASSES = {
    "fashion-mnist": (
        *("T-shirt", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    )
}
SIDE = 28  # pixels of an image of MNIST, and of those that have its form
WORKING_SIZE = 280  # pixels. Larger images are shrunk first, which also smooths a photo's grain
MIN_CONTRAST = 25  # of 255
PAPER = 0.2  # share of the darkest ink, up to which a pixel is paper, grain or shadow
COLUMNS, MAX_MISTAKES = 8, 48
MAX_NAMED = 20  # classes. With more of them, the cells of the matrix have no numbers


def read_image(path: Path, mode: str = "L") -> Tensor:
    """Return the pixels of a PNG or JPEG, uint8 [H, W], or [3, H, W] with the mode ``RGB``."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UsageError("needs Pillow: pip install pillow") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            # No other formats: for EPS Pillow would start Ghostscript.
            with Image.open(path, formats=("PNG", "JPEG")) as file:
                image = ImageOps.exif_transpose(file)  # upright, as the camera was held
    except Exception as error:  # a damaged image fails in many ways
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UsageError(f"cannot be read as a PNG or JPEG ({reason})") from error
    if image.mode not in ("1", "L", "P", "RGB") or "transparency" in image.info:
        raise UsageError(f"is transparent, or of 16 bits ({image.mode}): save it as a JPEG")
    levels = torch.frombuffer(bytearray(image.convert(mode).tobytes()), dtype=torch.uint8)
    levels = levels.view(image.height, image.width, -1).permute(2, 0, 1)
    return levels if mode == "RGB" else levels[0]


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Scale [..., H, W], and smooth if it shrinks. The result is float."""
    images = pixels.float().reshape(1, -1, *pixels.shape[-2:])
    scaled = F.interpolate(images, (height, width), mode="bilinear", antialias=True)
    return scaled.view(*pixels.shape[:-2], height, width)


def normalise(levels: Tensor, box: int) -> Tensor:
    """Turn grey levels [H, W] into an image of MNIST's form, uint8 [28, 28], light on dark.

    This follows the making of MNIST (http://yann.lecun.com/exdb/mnist). The drawing is fitted into
    ``box`` x ``box`` pixels, and its centre of mass goes to the middle. The border shows the
    background. An image of 28 x 28 already has this form, and is at most inverted.
    """
    pixels = levels.float()
    if (longer := max(pixels.shape)) > WORKING_SIZE:
        height, width = (max(1, side * WORKING_SIZE // longer) for side in pixels.shape)
        pixels = resize(pixels, height, width)
    border = torch.cat([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).median()
    darker, lighter = border - pixels.min(), pixels.max() - border
    if max(darker, lighter) < MIN_CONTRAST:
        raise UsageError("shows nothing: all pixels have about the same grey")
    if pixels.shape == (SIDE, SIDE):
        return (255 - pixels if darker > lighter else pixels).to(torch.uint8)
    ink = (border - pixels if darker > lighter else pixels - border).clamp(min=0)
    ink[ink < PAPER * ink.max()] = 0
    rows, columns = ink.amax(1).nonzero(), ink.amax(0).nonzero()
    ink = ink[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    height, width = (max(1, round(side * box / max(ink.shape))) for side in ink.shape)
    ink = resize(ink, height, width)
    ink *= 255 / ink.max()  # a thin line fades when it shrinks
    canvas = torch.zeros(SIDE, SIDE)
    weights = ink.sum(1), ink.sum(0)
    centres = [float((w * torch.arange(len(w))).sum() / w.sum()) for w in weights]
    # Move by whole pixels, and never over the edge.
    top, left = (
        min(max(0, round((SIDE - 1) / 2 - centre)), SIDE - side)
        for centre, side in zip(centres, ink.shape, strict=True)
    )
    canvas[top : top + height, left : left + width] = ink
    return canvas.round().to(torch.uint8)


def confusion_matrix(labels: Tensor, predictions: Tensor) -> Tensor:
    """Count [C, C] how often each label (row) got each prediction (column)."""
    classes = int(torch.cat([labels, predictions]).max()) + 1
    cells = labels * classes + predictions
    return cells.bincount(minlength=classes**2).view(classes, classes)


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
    axis.set_xticks(range(len(matrix)))
    axis.set_yticks(range(len(matrix)))
    for row, column in matrix.nonzero().tolist():
        colour = "white" if row == column else "black"
        number = str(int(matrix[row, column]))
        axis.text(column, row, number, ha="center", va="center", fontsize=7, color=colour)


def draw_mistakes(
    figure: Any, images: Tensor, labels: Tensor, predictions: Tensor, confidences: Tensor
) -> None:
    """Draw the images with a wrong prediction, the most confident first, into a figure."""
    wrong = (predictions != labels).nonzero().flatten()
    shown = wrong[confidences[wrong].argsort(descending=True, stable=True)][:MAX_MISTAKES]
    title = f"{len(wrong):,} of {len(labels):,} wrong: label > prediction, its probability"
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(max(1, math.ceil(len(shown) / COLUMNS)), COLUMNS, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, index in zip(axes.flat, shown.tolist(), strict=False):
        image = images[index].cpu()
        if image.ndim == 3:  # colour, or the first channel alone
            image = image.permute(1, 2, 0) if len(image) == 3 else image[0]
        axis.imshow(image.numpy(), cmap="gray", vmin=0, vmax=255)
        told = f"{labels[index]} > {predictions[index]} {confidences[index]:.0%}"
        axis.set_title(told, fontsize=8, color="#b2182b")


class Trained(NamedTuple):
    """A network to ask, the position of its checkpoint, and the flags of its run."""

    model: nn.Module
    dataset: str
    device: torch.device
    folder: Path
    progress: dict[str, Any]
    flags: dict[str, Any]


@torch.inference_mode()
def probabilities_of(trained: Trained, images: Tensor, precision: Precision) -> Tensor:
    """Return the probabilities [N, C], on the CPU, of images uint8 [N, ...].

    The batches are those of the evaluation. In float64 no two logits round to one probability. So
    the predictions are those that the evaluation counts.
    """
    logits, transform = [], data.Transform(trained.device, trained.dataset)
    for batch in images.split(data.EVAL_BATCH_SIZE):
        pixels, _ = transform(batch, batch)  # there are no labels
        with precision.autocast():
            logits.append(trained.model(pixels).cpu().double())
    outputs = torch.cat(logits)
    if outputs.ndim != 2:
        raise UsageError(f"the model returns {list(outputs.shape)}, no logits of classes [B, C]")
    return outputs.softmax(1)


def load(path: Path, device: torch.device) -> Trained:
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
    load_state(model, state["model"], path)
    folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    flags = {}
    with suppress(OSError, ValueError):  # a lone checkpoint has none
        flags = json.loads((folder / "args.json").read_text())
    return Trained(model.to(device).eval(), dataset, device, folder, state["progress"], flags)


def describe(probabilities: Tensor, dataset: str) -> str:
    """Name the two likeliest classes of ``probabilities`` [C]."""
    names = CLASSES.get(dataset, tuple(map(str, range(len(probabilities)))))
    (first, second), (best, runner_up) = (part.tolist() for part in probabilities.topk(2))
    return f"{names[best]} ({first:.1%}), then {names[runner_up]} ({second:.1%})"


def prepare_image(path: Path, dataset: str, examples: Tensor | None) -> Tensor:
    """Return an image file as an image of the data set, uint8.

    ``examples`` are images of a data set that does not have MNIST's form, or None.
    """
    if examples is None:
        return normalise(read_image(path), BOXES[dataset])
    is_colour = examples.ndim == 4 and examples.shape[1] == 3
    image = read_image(path, "RGB" if is_colour else "L")
    image = resize(image, *examples.shape[-2:]).round().to(torch.uint8)
    return image.view(examples.shape[1:])


def run_test(
    trained: Trained, sets: tuple[data.ImageSet, data.ImageSet], precision: Precision
) -> None:
    """Print the accuracy on the test set, and draw the confusion matrix and the mistakes."""
    train_set, test_set = sets
    labels = test_set.labels
    if labels.is_floating_point():
        raise UsageError(f"the labels of {trained.dataset} are not classes: nothing to count")
    probabilities = probabilities_of(trained, test_set.images, precision)
    confidences, predictions = probabilities.max(1)
    correct, count = int((predictions == labels).sum()), len(test_set)
    print(f"{trained.dataset} test set: {correct:,} of {count:,} correct, {correct / count:.2%}")
    try:
        figures = {"confusion_matrix": trial.new_figure(6, 6), "mistakes": trial.new_figure(9, 8)}
    except UserError as error:  # the score is useful without them
        print(error, file=sys.stderr)
        return
    draw_confusion(figures["confusion_matrix"], confusion_matrix(labels, predictions))
    mistakes = figures["mistakes"]
    draw_mistakes(mistakes, test_set.images, labels, predictions, confidences)
    for name, figure in figures.items():
        trial.save_figure(figure, trained.folder / f"{name}.png")
    print(f"pictures in {trained.folder}/confusion_matrix.png and mistakes.png")
    if trained.flags:  # a run directory, not a lone checkpoint
        from torch.utils.tensorboard import SummaryWriter  # a second to import

        position = trained.progress
        seen = position["epoch"] * len(train_set) + position["epoch_samples"]
        with SummaryWriter(trained.folder, filename_suffix=".predict") as writer:
            for name, figure in figures.items():
                writer.add_figure(f"test_images/{name}", figure, seen)
        print(f"and in TensorBoard: tensorboard --logdir {trained.folder.parent}")


def run(args: argparse.Namespace) -> int:
    if not (args.images or args.test):
        raise UsageError("nothing to do: name an image, or pass --test")
    device = select_devices(args.device)[0]
    setup_device(device, args.threads)
    trained = load(args.model, device)
    # In another precision a few predictions differ.
    precision = Precision(device, trained.flags.get("amp", "off"))
    is_own = trained.dataset not in BOXES
    if args.test or is_own:
        data_dir = args.data_dir or trained.flags.get("data_dir", "data")
        sets = data.load_dataset(trained.dataset, data_dir)
    status = 0
    for path in args.images:
        try:
            image = prepare_image(path, trained.dataset, sets[1].images if is_own else None)
        except UsageError as error:  # the other images can still be read
            print(f"predict.py: error: {printable(str(path))} {error}", file=sys.stderr)
            status = error.exit_status
            continue
        probabilities = probabilities_of(trained, image[None], precision)[0]
        print(f"{printable(str(path))}: {describe(probabilities, trained.dataset)}")
    if args.test:
        run_test(trained, sets, precision)
    return status


def main() -> int:
    parser = trial.build_parser("predict.py", __doc__)
    parser.add_argument("model", type=Path, help="run directory or checkpoint")
    parser.add_argument("images", type=Path, nargs="*", help="PNG or JPEG")
    parser.add_argument("--test", action="store_true", help="score the test set, draw pictures")
    parser.add_argument("--data-dir", help="of the test set (default: the run's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps", "xpu"])
    threads = number(int, low=1, high=MAX_THREADS)
    parser.add_argument("--threads", type=threads, help="CPU threads")
    return trial.start(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
