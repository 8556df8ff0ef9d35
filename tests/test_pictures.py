"""The pictures of a test set: for any number of classes and any images, and never a failed run."""

import sys

import pytest
import torch
from PIL import Image
from torch import Tensor

from utils import pictures
from utils.pictures import confusion_matrix, draw_confusion, draw_mistakes


def predicted(classes: int, shape: tuple[int, ...], count: int = 400) -> tuple[Tensor, ...]:
    """Return images, labels, predictions of which some are wrong, and confidences."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % classes
    predictions = labels.where(torch.arange(count) % 3 > 0, (labels + 1) % classes)
    return images, labels, predictions, torch.rand(count, generator=generator)


@pytest.mark.parametrize("classes", [2, 10, 12, 13, 20, 27, 100, 500])
@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28), (3, 32, 32), (2, 7, 90), (3, 300, 200)])
def test_any_classes_and_any_images_are_drawn(
    classes: int, shape: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = pictures.draw(*predicted(classes, shape))
    assert capsys.readouterr().err == ""
    assert set(drawn) == {"confusion_matrix", "mistakes"}
    assert all(100 < side < 1300 for picture in drawn.values() for side in picture.size)
    assert all(picture.mode == "RGB" for picture in drawn.values())


def test_the_cells_of_a_hundred_classes_show_what_was_counted() -> None:
    matrix = torch.eye(100, dtype=torch.int64) * 1000
    matrix[3, 95] = 2
    picture = draw_confusion(matrix)
    cell = pictures.MATRIX // 100

    def colour(row: int, column: int) -> tuple[int, ...]:
        left, top = pictures.CELL, pictures.CELL + pictures.LINE
        return picture.getpixel((left + column * cell + 2, top + row * cell + 2))  # type: ignore

    assert colour(55, 55) == pictures.BLUE
    assert colour(5, 95) == pictures.PAPER
    assert sum(pictures.BLUE) < sum(colour(3, 95)) < sum(pictures.PAPER)


@pytest.mark.parametrize(
    "change",
    [
        {"images": torch.zeros(400)},
        {"predictions": torch.zeros(3, dtype=torch.int64)},
        {"labels": torch.full((400,), -1)},
        {"confidences": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_be_drawn_is_one_line(
    change: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("images", "labels", "predictions", "confidences")
    given = dict(zip(names, predicted(10, (28, 28)), strict=True)) | change
    assert pictures.draw(**given) == {}
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: no pictures of the test set: ")


def test_targets_that_are_no_classes_have_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    images, labels, predictions, confidences = predicted(10, (28, 28))
    assert pictures.draw(images, labels.float(), predictions, confidences) == {}
    assert capsys.readouterr().err == ""


def test_without_pillow_the_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert pictures.draw(*predicted(10, (28, 28))) == {}
    [line] = capsys.readouterr().err.splitlines()
    assert "pip install --upgrade pillow" in line


def test_rows_are_labels_and_columns_predictions() -> None:
    matrix = confusion_matrix(torch.tensor([3, 3, 3, 9]), torch.tensor([3, 5, 5, 9]))
    assert matrix.shape == (10, 10)
    counted = {(row, column): int(matrix[row, column]) for row, column in matrix.nonzero().tolist()}
    assert counted == {(3, 3): 1, (3, 5): 2, (9, 9): 1}


def test_a_class_that_is_only_predicted_has_a_column() -> None:
    matrix = confusion_matrix(torch.tensor([0, 1]), torch.tensor([0, 4]))
    assert matrix.shape == (5, 5)
    assert int(matrix[1, 4]) == 1


def test_a_darker_cell_has_more_predictions() -> None:
    matrix = torch.eye(10, dtype=torch.int64) * 1000
    matrix[3, 5] = 2
    picture = draw_confusion(matrix)

    def brightness(row: int, column: int) -> int:
        cell, corner = pictures.CELL, 4  # beside the number, which stands in the middle
        x, y = cell + column * cell + corner, cell + pictures.LINE + row * cell + corner
        return sum(picture.getpixel((x, y)))  # type: ignore[arg-type]

    assert brightness(3, 3) < brightness(3, 5) < brightness(5, 3)


def middle_of(picture: Image.Image, place: int, side: int) -> tuple[int, ...]:
    """Return the colour in the middle of a mistake of the first row."""
    x = pictures.GAP + place * (pictures.TILE + pictures.GAP) + pictures.TILE // 2
    return picture.getpixel((x, 2 * pictures.GAP + pictures.LINE + side // 2))  # type: ignore


def test_the_most_confident_mistake_comes_first() -> None:
    images = torch.arange(4, dtype=torch.uint8).mul(60)[:, None, None].expand(4, 28, 28)
    labels, predictions = torch.tensor([0, 0, 3, 0]), torch.tensor([1, 2, 3, 4])
    confidences = torch.tensor([0.6, 0.9, 0.8, 0.7])  # the third is right
    picture = draw_mistakes(images, labels, predictions, confidences, limit=2)
    shown = [middle_of(picture, place, 56) for place in range(3)]
    assert shown == [(60, 60, 60), (180, 180, 180), pictures.PAPER]


def test_a_mistake_has_its_colours() -> None:
    images = torch.tensor([200, 100, 50], dtype=torch.uint8)[None, :, None, None].expand(
        1, 3, 32, 32
    )
    picture = draw_mistakes(images, torch.tensor([0]), torch.tensor([1]), torch.ones(1))
    assert middle_of(picture, 0, 64) == (200, 100, 50)


def test_no_mistake_can_be_drawn_too() -> None:
    labels = torch.arange(3)
    images = torch.zeros(3, 28, 28, dtype=torch.uint8)
    picture = draw_mistakes(images, labels, labels, torch.ones(3), 5)
    assert picture.height < 60
