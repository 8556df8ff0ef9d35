"""Pictures of what a network predicts: the confusion matrix, and the samples it gets wrong."""

import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from utils.errors import UserError, describe

if TYPE_CHECKING:  # Pillow comes with torchvision and TensorBoard; training does without
    from PIL import Image

# In pixels. About as wide as a card in TensorBoard, which magnifies and shrinks by whole pixels.
LEAST, MOST = 56, 128  # of an image's longer side: smaller ones are enlarged, larger ones shrunk
COLUMNS, TILE = 8, 72  # mistakes side by side; the least width of one with its text
GAP, LINE = 12, 18  # between mistakes; height of a line of text
CELL, MATRIX = 40, 480  # of the confusion matrix; with more classes its cells get smaller
FONT_SIZE = 13
INK, PAPER, WRONG = (30, 30, 30), (255, 255, 255), (178, 24, 43)
GRID = (225, 225, 225)
BLUE = (8, 48, 107)  # the darkest of ColorBrewer's blues


class NoPillow(UserError):
    """Pillow is not installed, or too old; only reading and drawing pictures needs it."""

    exit_status = 2

    def __init__(self, purpose: str) -> None:
        super().__init__(f"{purpose} needs Pillow, 10.1 or later: pip install --upgrade pillow")


def draw(
    images: Tensor, labels: Tensor, predictions: Tensor, confidences: Tensor
) -> dict[str, "Image.Image"]:
    """Draw the confusion matrix and the mistakes of a test set.

    A picture is no reason for a run to fail: where one cannot be drawn, a line on stderr says so.

    Args:
        images: uint8 [N, H, W] or [N, C, H, W].
        labels: int64 [N]; of targets that are no classes nothing is drawn.
        predictions: class of each image, int64 [N].
        confidences: probability that was given to it, [N].

    Returns:
        Name to picture; empty where there is none.
    """
    if labels.is_floating_point():
        return {}
    try:
        labels, predictions, confidences = labels.cpu(), predictions.cpu(), confidences.cpu()
        return {
            "confusion_matrix": draw_confusion(confusion_matrix(labels, predictions)),
            "mistakes": draw_mistakes(images, labels, predictions, confidences),
        }
    except Exception as error:
        print(f"warning: no pictures of the test set: {describe(error)}", file=sys.stderr)
        return {}


def confusion_matrix(labels: Tensor, predictions: Tensor) -> Tensor:
    """Count [C, C] how often each label (row) got each prediction (column)."""
    classes = int(torch.cat([labels, predictions]).max()) + 1
    cells = labels * classes + predictions
    return cells.bincount(minlength=classes**2).view(classes, classes)


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

    Each row ends with the share of its label that was predicted correctly. Of many classes every
    tenth is named, and there are no numbers.

    Raises:
        NoPillow: it cannot be imported.
    """
    size = len(matrix)
    cell = max(1, min(CELL, MATRIX // size))
    every = 1 if cell >= LINE else 10
    left, top, side = CELL, CELL + LINE, size * cell
    canvas, draw, font = _new_canvas(left + max(side + 2 * CELL, MATRIX), top + side + GAP)
    from PIL import Image

    paper, blue = torch.tensor(PAPER), torch.tensor(BLUE)
    depth = matrix.double().log1p() / math.log1p(max(1, int(matrix.max())))
    colours = (paper + (blue - paper) * depth[..., None]).round().to(torch.uint8)
    cells = Image.fromarray(colours.numpy()).resize((side, side), Image.Resampling.NEAREST)
    canvas.paste(cells, (left, top))
    for place in range(0, side + 1, every * cell):
        draw.line((left, top + place, left + side, top + place), GRID)
        draw.line((left + place, top, left + place, top + side), GRID)

    def write(x: float, y: float, text: str, fill: tuple[int, ...] = INK) -> None:
        draw.text((x, y), text, fill, font, anchor="mm")

    correct, total = int(matrix.trace()), int(matrix.sum())
    title = f"{correct:,} of {total:,} correct; a row for each label, a column for each prediction"
    draw.text((GAP, GAP), title, INK, font)
    middles = [(number + 0.5) * cell for number in range(size)]
    for number in range(0, size, every):
        write(left + middles[number], top - GAP, str(number))
        write(left - GAP, top + middles[number], str(number))
    if every == 1:
        write(left + side + CELL, top - GAP, "correct")
        for number, of_label in enumerate(matrix.sum(1).tolist()):
            if of_label:
                share = f"{int(matrix[number, number]) / of_label:.1%}"
                write(left + side + CELL, top + middles[number], share)
    if cell == CELL:
        for row, column in matrix.nonzero().tolist():
            fill = PAPER if depth[row, column] > 0.5 else INK
            write(left + middles[column], top + middles[row], str(int(matrix[row, column])), fill)
    return canvas


def draw_mistakes(
    images: Tensor, labels: Tensor, predictions: Tensor, confidences: Tensor, limit: int = 48
) -> "Image.Image":
    """Draw the images with a wrong prediction, the most confident first, over what was said.

    Args:
        images, labels, predictions, confidences: as for ``draw``, all but the images on the CPU.
        limit: how many to draw at most.

    Raises:
        NoPillow: it cannot be imported.
    """
    wrong = (predictions != labels).nonzero().flatten()
    shown = wrong[confidences[wrong].argsort(descending=True, stable=True)][:limit]
    height, width = images.shape[-2:]
    enlarge, shrink = math.ceil(LEAST / max(height, width)), math.ceil(max(height, width) / MOST)
    height, width = height * enlarge // shrink, width * enlarge // shrink
    tile, rows = max(width, TILE), math.ceil(len(shown) / COLUMNS)
    top, pitch = GAP + LINE + GAP, height + LINE + GAP
    canvas, draw, font = _new_canvas(COLUMNS * (tile + GAP) + GAP, top + rows * pitch)
    from PIL import Image

    title = f"{len(wrong):,} of {len(labels):,} wrong"
    if len(shown) < len(wrong):
        title += f"; the {len(shown)} most confident"
    draw.text((GAP, GAP), f"{title}: label > prediction, its probability", INK, font)
    for place, index in enumerate(shown.tolist()):
        x, y = GAP + place % COLUMNS * (tile + GAP), top + place // COLUMNS * pitch
        image = images[index].cpu()
        if image.ndim == 3:  # in colour, or the first channel alone
            image = image.permute(1, 2, 0) if len(image) == 3 else image[0]
        picture = Image.fromarray(image.contiguous().numpy()).reduce(shrink)
        picture = picture.resize((width, height), Image.Resampling.NEAREST)
        canvas.paste(picture, (x + (tile - width) // 2, y))
        text = f"{labels[index]} > {predictions[index]} {confidences[index]:.0%}"
        draw.text((x + tile / 2, y + height + LINE / 2), text, WRONG, font, anchor="mm")
    return canvas
