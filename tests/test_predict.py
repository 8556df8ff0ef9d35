"""predict.py predicts what the training's evaluation did, and for pictures of a digit, too."""

import sys

import numpy as np
import predict
import pytest
import torch
import trial
from PIL import Image
from predict import normalise, read_image
from torch import nn

import data
from tests.processes import run, script, succeed, summary
from utils.device import Precision

CPU = torch.device("cpu")
DIGITS = 100  # drawn in each form


@pytest.fixture(scope="module")
def trained(synthetic_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    flags = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--run-dir", folder]
    succeed(run(*script("train_single.py", *flags, "--max-steps", 120, "--amp", "bf16")))
    return folder


@pytest.fixture
def ask(monkeypatch, capsys):
    def call(*words):
        """Run the tool in this process; return its exit status, stdout, and lines of stderr."""
        monkeypatch.setattr(sys, "argv", ["predict.py", "--threads", "1", *map(str, words)])
        status = predict.main()
        told = capsys.readouterr()
        return status, told.out, told.err.splitlines()

    return call


def test_a_run_is_scored_and_drawn(trained, ask):
    """The score is that of summary.json; the pictures are in the run and in its TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    status, printed, errors = ask(trained, "--test")
    assert (status, errors) == (0, [])
    facts = summary(trained)
    assert f"synthetic test set: {facts['test_correct']:,} of 10,000 correct" in printed
    for name in ("confusion_matrix", "mistakes"):
        with Image.open(trained / f"{name}.png") as picture:
            assert min(picture.size) > 300
    board = EventAccumulator(str(trained))
    board.Reload()
    tags = ["test_images/confusion_matrix", "test_images/mistakes"]
    assert sorted(board.Tags()["images"]) == tags
    assert board.Images(tags[0])[0].step == 120 * facts["global_batch_size"]


def on_paper(image):
    """Blue ink on yellowish paper, in a corner, under a light that falls off."""
    ink = np.zeros((400, 600, 1))
    ink[100:380, 20:300, 0] = np.asarray(Image.fromarray(image).resize((280, 280))) / 255
    light = np.linspace(1, 0.85, 600)[None, :, None]
    colours = light * np.array([240, 230, 200]) * (1 - ink) + np.array([30, 40, 160]) * ink
    return Image.fromarray(colours.astype(np.uint8))


def test_a_digit_is_known_as_it_is_and_inverted_and_on_paper(trained, synthetic_dir, tmp_path):
    images, labels = data.load_dataset("synthetic", str(synthetic_dir))[1][:DIGITS]
    loaded = predict.load(trained, CPU)
    inverted = lambda image: Image.fromarray(255 - image)  # noqa: E731
    for ending, draw in (("png", Image.fromarray), ("png", inverted), ("jpg", on_paper)):
        path, seen = tmp_path / f"digit.{ending}", []
        for image in images:
            draw(image.numpy()).save(path)
            seen.append(normalise(read_image(path), 20))
        assert draw is on_paper or torch.equal(torch.stack(seen), images)
        found = predict.probabilities_of(loaded, torch.stack(seen), Precision(CPU, "off")).argmax(1)
        assert int((found == labels).sum()) >= 0.94 * DIGITS, draw


def test_what_cannot_be_used_is_one_line(trained, tmp_path, ask):
    state = torch.load(trained / "checkpoints" / "last.pt", weights_only=True)
    state["identity"]["model"] = "mine"
    torch.save(state, tmp_path / "mine.pt")
    (tmp_path / "text.png").write_text("no image")
    Image.new("L", (50, 50), 200).save(tmp_path / "blank.png")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "vast.png")
    Image.new("RGBA", (50, 50)).save(tmp_path / "clear.png")
    pictures = {
        "none.png": "cannot be read as a PNG or JPEG (No such file",
        "text.png": "cannot be read as a PNG or JPEG",
        "blank.png": "shows nothing",
        "vast.png": "cannot be read as a PNG or JPEG (Image size (100000000 pixels)",
        "clear.png": "is transparent",
    }
    for words, messages in (
        (["nowhere.pt", "--test"], ["nowhere.pt: No such file"]),
        ([tmp_path, "--test"], ["is no run directory"]),
        ([tmp_path / "mine.pt", "--test"], ["add it to MODELS in models.py"]),
        ([trained], ["nothing to do"]),
        ([trained, *(tmp_path / n for n in pictures)], [f"{n} {t}" for n, t in pictures.items()]),
    ):
        status, _, errors = ask(*words)
        assert status in (1, 2), words
        for line, message in zip(errors, messages, strict=True):
            assert line.startswith("predict.py: error: ")
            assert message in line


def test_own_images_keep_their_shape(tmp_path):
    Image.new("RGB", (90, 60), (200, 100, 50)).save(tmp_path / "own.png")
    for shape in ((3, 32, 24), (1, 20, 20), (20, 30)):
        examples = torch.zeros(5, *shape, dtype=torch.uint8)
        image = predict.prepare_image(tmp_path / "own.png", "mine", examples)
        assert (image.shape, image.dtype) == (shape, torch.uint8)
    assert int(image[0, 0]) == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)


def test_predictions_are_those_of_the_evaluation():
    """In batches of the same size, and if two logits differ in their last bit."""

    class Close(nn.Module):
        def forward(self, pixels):
            sizes.append(len(pixels))
            logits = torch.zeros(len(pixels), 10)
            logits[:, 3], logits[:, 7] = 9.0, torch.tensor(9.0).nextafter(torch.tensor(10.0))
            return logits

    sizes = []
    images = torch.randint(256, (1100, 28, 28), dtype=torch.uint8)
    loaded = predict.Trained(Close(), "mnist", CPU, None, {}, {})
    probabilities = predict.probabilities_of(loaded, images, Precision(CPU, "off"))
    assert sizes == [500, 500, 100]
    assert probabilities.argmax(1).unique().tolist() == [7]


@pytest.mark.parametrize(("classes", "shape"), [(2, (28, 28)), (100, (3, 32, 32)), (12, (1, 7, 9))])
def test_any_classes_and_any_images_are_drawn(classes, shape, tmp_path):
    labels = torch.arange(60) % classes
    predictions = labels.where(torch.arange(60) % 3 > 0, (labels + 1) % classes)
    matrix = predict.confusion_matrix(labels, predictions)
    assert int(matrix.sum()) == 60
    assert int(matrix.trace()) == 40
    assert int(matrix[labels[0], predictions[0]]) > 0
    figure = trial.new_figure(4, 4)
    predict.draw_confusion(figure, matrix)
    trial.save_figure(figure, tmp_path / "matrix.png")
    images, figure = torch.zeros(60, *shape, dtype=torch.uint8), trial.new_figure(4, 4)
    predict.draw_mistakes(figure, images, labels, predictions, torch.linspace(0, 1, 60))
    trial.save_figure(figure, tmp_path / "mistakes.png")
    first = figure.axes[0].get_title()
    assert first == f"{labels[57]} > {predictions[57]} 97%", "the most confident"


def test_without_matplotlib_the_score_stands(trained, ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # what is not installed
    status, printed, [line] = ask(trained, "--test")
    assert (status, "correct" in printed) == (0, True)
    assert "pip install matplotlib" in line
