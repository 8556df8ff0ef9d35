"""What a trained network answers to images: probabilities, counts, and pictures of the mistakes."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from data import EVAL_BATCH_SIZE, NUM_CLASSES, Preparation
from utils.runtime import Precision

if TYPE_CHECKING:  # Pillow comes with torchvision and TensorBoard; training does without
    from PIL import Image

# In pixels. About as wide as a card in TensorBoard, which magnifies and shrinks by whole pixels.
SCALE, COLUMNS = 2, 8  # of a digit in the sheet of mistakes; digits side by side
GAP, LINE = 12, 18  # between digits; height of a line of text
CELL = 40  # of the confusion matrix
FONT_SIZE = 13
INK, PAPER, WRONG = (30, 30, 30), (255, 255, 255), (178, 24, 43)
BLUE = (8, 48, 107)  # the darkest of ColorBrewer's blues


class NoPillow(Exception):
    """Pillow is not installed, or too old; only reading and drawing pictures needs it."""

    exit_status = 2

    def __init__(self, purpose: str) -> None:
        super().__init__(f"{purpose} needs Pillow, 10.1 or later: pip install --upgrade pillow")


class Classifier(nn.Module):
    """A network with the preparation of its images: bytes in, logits out.

    What leaves the training goes by this form, so that nobody has to know mean and standard
    deviation of the data set.

    Args:
        model: takes images [B, 1, 28, 28], normalised, and returns logits [B, 10].
        dataset: a key of ``data.SOURCES``, for the normalisation.
        device: where the model is.
    """

    def __init__(self, model: nn.Module, dataset: str, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.prepare = Preparation(device, dataset)

    def forward(self, images: Tensor) -> Tensor:
        """Take images uint8 [B, 28, 28], light on dark, and return logits [B, 10]."""
        pixels, _ = self.prepare(images, images)  # there are no labels
        return self.model(pixels)


@torch.inference_mode()
def answer(classifier: nn.Module, images: Tensor, precision: Precision) -> Tensor:
    """Return the probabilities [N, 10], on the CPU, of images uint8 [N, 28, 28].

    In the batches of the evaluation, and in float64, in which no two logits round to one
    probability: so the answers are those that the evaluation counts.
    """
    logits = []
    for batch in images.split(EVAL_BATCH_SIZE):
        with precision.autocast():
            logits.append(classifier(batch).cpu().double())
    return torch.cat(logits).softmax(1)


def confusion_matrix(labels: Tensor, answers: Tensor) -> Tensor:
    """Count [10, 10] how often each label (row) got each answer (column)."""
    cells = labels * NUM_CLASSES + answers
    return cells.bincount(minlength=NUM_CLASSES**2).view(NUM_CLASSES, NUM_CLASSES)


def _new_canvas(width: int, height: int) -> tuple["Image.Image", Any, Any]:
    """Return an empty picture, what draws on it, and a font."""
    try:
        from PIL import Image, ImageDraw, ImageFont

        font = ImageFont.load_default(FONT_SIZE)  # before 10.1 it takes no size
    except (ImportError, TypeError) as error:
        raise NoPillow("drawing the mistakes") from error
    canvas = Image.new("RGB", (width, height), PAPER)
    return canvas, ImageDraw.Draw(canvas), font


def draw_confusion(matrix: Tensor) -> "Image.Image":
    """Draw a confusion matrix: counts on a logarithmic blue, or a few mistakes would not show.

    Each row ends with the share of its label that was answered correctly.

    Raises:
        NoPillow: it cannot be imported.
    """
    counts = matrix.tolist()
    size, left, top = len(counts), CELL, CELL + LINE
    canvas, draw, font = _new_canvas(left + (size + 2) * CELL, top + size * CELL + GAP)

    def write(column: float, row: float, text: str, fill: tuple[int, ...] = INK) -> None:
        """Write in the middle of a cell; the margins are cells before the first and after."""
        place = (left + (column + 0.5) * CELL, top + (row + 0.5) * CELL)
        draw.text(place, text, fill, font, anchor="mm")

    total = sum(map(sum, counts))
    correct = sum(counts[i][i] for i in range(size))
    draw.text((GAP, GAP), f"{correct:,} of {total:,} correct", INK, font)
    write(size / 2 - 0.5, -1.4, "answer")
    write(-1, -0.8, "label")
    write(size + 0.3, -0.8, "correct")
    most = math.log1p(max(1, *map(max, counts)))
    for row in range(size):
        write(row, -0.8, str(row))
        write(-0.8, row, str(row))
        for column, count in enumerate(counts[row]):
            depth = math.log1p(count) / most
            colour = tuple(round(p + (b - p) * depth) for p, b in zip(PAPER, BLUE, strict=True))
            x, y = left + column * CELL, top + row * CELL
            draw.rectangle((x, y, x + CELL, y + CELL), colour, (225, 225, 225))
            if count:
                write(column, row, str(count), PAPER if depth > 0.5 else INK)
        if of_label := sum(counts[row]):
            write(size + 0.3, row, f"{counts[row][row] / of_label:.1%}")
    return canvas


def draw_mistakes(
    images: Tensor, labels: Tensor, probabilities: Tensor, limit: int
) -> "Image.Image":
    """Draw the digits with a wrong answer, the surest first, each over ``label > answer``.

    Args:
        images: uint8 [N, 28, 28].
        labels: int64 [N], on the CPU like all here.
        probabilities: [N, 10].
        limit: how many to draw at most.

    Raises:
        NoPillow: it cannot be imported.
    """
    sureness, answers = probabilities.max(1)
    wrong = (answers != labels).nonzero().flatten()
    shown = wrong[sureness[wrong].argsort(descending=True, stable=True)][:limit]
    height, width = (SCALE * side for side in images.shape[1:])
    rows = math.ceil(len(shown) / COLUMNS)
    top, tile = GAP + LINE + GAP, height + LINE + GAP
    canvas, draw, font = _new_canvas(COLUMNS * (width + GAP) + GAP, top + rows * tile)
    from PIL import Image

    title = f"{len(wrong):,} of {len(labels):,} wrong"
    if len(shown) < len(wrong):
        title += f"; the {len(shown)} surest"
    draw.text((GAP, GAP), f"{title}: label > answer, its probability", INK, font)
    for place, index in enumerate(shown.tolist()):
        x, y = GAP + place % COLUMNS * (width + GAP), top + place // COLUMNS * tile
        digit = images[index].repeat_interleave(SCALE, 0).repeat_interleave(SCALE, 1)
        canvas.paste(Image.fromarray(digit.numpy()), (x, y))
        text = f"{labels[index]} > {answers[index]} {sureness[index]:.0%}"
        draw.text((x + width / 2, y + height + LINE / 2), text, WRONG, font, anchor="mm")
    return canvas
