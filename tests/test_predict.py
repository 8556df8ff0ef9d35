"""predict.py predicts what the training's evaluation did, and for pictures of a digit, too."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import data
from tests.processes import ROOT, run, script, summary
from utils.device import Precision

sys.path.insert(0, str(ROOT / "scripts" / "tools"))

import predict
import trial
from predict import normalise, read_image

PREDICT = [sys.executable, ROOT / "scripts" / "tools" / "predict.py", "--threads", 1]
CPU = torch.device("cpu")
DIGITS = 100  # drawn in each form


@pytest.fixture(scope="module")
def trained(synthetic_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    flags = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--run-dir", folder]
    result = run(*script("train_single.py", *flags, "--max-steps", 120, "--amp", "bf16"))
    assert result.returncode == 0, result.text
    return folder


def test_a_run_is_scored_and_drawn(trained):
    """The score is that of summary.json; the pictures are in the run and in its TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = run(*PREDICT, trained, "--test", timeout=120)
    assert ended.returncode == 0, ended.text
    facts = summary(trained)
    assert f"synthetic test set: {facts['test_correct']:,} of 10,000 correct" in ended.stdout
    assert not ended.stderr
    for name in ("confusion_matrix", "mistakes"):
        with Image.open(trained / f"{name}.png") as picture:
            assert min(picture.size) > 300
    board = EventAccumulator(str(trained))
    board.Reload()
    tags = ["test_images/confusion_matrix", "test_images/mistakes"]
    assert sorted(board.Tags()["images"]) == tags
    assert board.Images(tags[0])[0].step == 120 * facts["global_batch_size"]


def enlarged(image, factor):
    side = 28 * factor
    return np.asarray(Image.fromarray(image.numpy()).resize((side, side), Image.Resampling.BICUBIC))


def on_paper(image):
    """Blue ink on yellowish paper, in a corner, under a light that falls off."""
    ink = np.zeros((400, 600, 1))
    ink[100:380, 20:300, 0] = enlarged(image, 10) / 255
    light = np.linspace(1, 0.85, 600)[None, :, None]
    colours = light * np.array([240, 230, 200]) * (1 - ink) + np.array([30, 40, 160]) * ink
    return Image.fromarray(colours.astype(np.uint8))


FORMS = {
    "as it is": ("png", lambda image: Image.fromarray(image.numpy())),
    "inverted": ("png", lambda image: Image.fromarray(255 - image.numpy())),
    "enlarged": ("png", lambda image: Image.fromarray(enlarged(image, 7))),
    "paper": ("jpg", on_paper),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_digit_is_known_in_any_form(form, trained, synthetic_dir, tmp_path):
    test_set = data.load_dataset("synthetic", str(synthetic_dir))[1]
    ending, draw = FORMS[form]
    seen = []
    for image in test_set.images[:DIGITS]:
        path = tmp_path / f"digit.{ending}"
        draw(image).save(path)
        seen.append(normalise(read_image(path), 20))
    if form in ("as it is", "inverted"):
        assert torch.equal(torch.stack(seen), test_set.images[:DIGITS])
    loaded = predict.load(trained, CPU)
    given = predict.probabilities_of(loaded, torch.stack(seen), Precision(CPU, "off")).argmax(1)
    assert int((given == test_set.labels[:DIGITS]).sum()) >= 0.94 * DIGITS


def test_what_cannot_be_used_is_one_line(trained, tmp_path):
    state = torch.load(trained / "checkpoints" / "last.pt", weights_only=True)
    state["identity"]["model"] = "mine"
    torch.save(state, tmp_path / "mine.pt")
    (tmp_path / "text.png").write_text("no image")
    Image.new("L", (50, 50), 200).save(tmp_path / "blank.png")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "vast.png")
    Image.new("RGBA", (50, 50)).save(tmp_path / "clear.png")
    names = ["none.png", "text.png", "blank.png", "vast.png", "clear.png"]
    cases = [
        (["nowhere.pt", "--test"], ["nowhere.pt: No such file"]),
        ([tmp_path, "--test"], ["is no run directory"]),
        ([tmp_path / "mine.pt", "--test"], ["add it to MODELS in models.py"]),
        ([trained], ["nothing to do"]),
        (
            [trained, *(tmp_path / name for name in names)],
            [
                "none.png cannot be read as a PNG or JPEG (No such file",
                "text.png cannot be read as a PNG or JPEG",
                "blank.png shows nothing",
                "vast.png has more than 89,478,485 pixels: shrink it",
                "clear.png is transparent",
            ],
        ),
    ]
    for arguments, messages in cases:
        ended = run(*PREDICT, *arguments)
        assert ended.returncode in (1, 2), arguments
        for line, message in zip(ended.stderr.splitlines(), messages, strict=True):
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


def test_without_matplotlib_the_score_stands(trained, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    ended = run(*PREDICT, trained, "--test", PYTHONPATH=str(tmp_path), timeout=60)
    assert ended.returncode == 0, ended.text
    assert "correct" in ended.stdout
    [line] = ended.stderr.splitlines()
    assert "pip install matplotlib" in line
