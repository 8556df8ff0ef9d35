"""predict.py predicts what the training's evaluation did, and for pictures, too."""

import re
import sys
from types import SimpleNamespace

import predict
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import data
import models
from tests.processes import Training, succeed, summary
from utils.datasets.sources import Source


@pytest.fixture(scope="module")
def trained(synthetic_dir, tmp_path_factory):
    training = Training(synthetic_dir, tmp_path_factory.mktemp("trained") / "run")
    succeed(training.run("single", "--max-steps", 120, "--amp", "bf16"))
    return training.folder


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
    """The score is that of summary.json, and the pictures are in the run's folder."""
    status, printed, errors = ask(trained, "--test")
    facts = summary(trained)
    assert (status, errors) == (0, [])
    score = re.match("synthetic test set, 10,000 samples: loss (.+), accuracy (.+)", printed)
    assert float(score[1]) == pytest.approx(facts["test_loss"], rel=1e-2)  # in bf16
    assert score[2] == f"{facts['test_accuracy']:.6g}"
    for name in ("confusion_matrix", "mistakes"):
        with Image.open(trained / f"{name}.png") as picture:
            assert min(picture.size) > 300


def test_a_picture_is_resized_to_an_image_of_the_set(trained, synthetic_dir, tmp_path, ask):
    images, labels = data.load_dataset("synthetic", str(synthetic_dir))[1][:20]
    for number, image in enumerate(images):
        large = Image.fromarray(image.numpy()).resize((280, 280)).convert("RGB")
        large.save(tmp_path / f"{number}.png")
    status, printed, errors = ask(trained, *(tmp_path / f"{n}.png" for n in range(20)))
    assert (status, errors) == (0, [])
    found = [int(line.partition(": ")[2][0]) for line in printed.splitlines()]
    assert sum(a == b for a, b in zip(found, labels.tolist(), strict=True)) >= 17


def test_what_cannot_be_used_is_one_line(trained, tmp_path, ask):
    state = torch.load(trained / "checkpoints" / "last.pt", weights_only=True)
    state["identity"]["model"] = "mine"
    torch.save(state, tmp_path / "mine.pt")
    (tmp_path / "text.png").write_text("no image")
    Image.new("1", (20_000, 10_000)).save(tmp_path / "vast.png")
    no_picture = "cannot be read as a PNG or JPEG"
    for words, message in (
        (["nowhere.pt", "--test"], "nowhere.pt: No such file"),
        ([tmp_path, "--test"], "is no run directory"),
        ([tmp_path / "mine.pt", "--test"], "add it to MODELS in models.py"),
        ([trained], "nothing to do"),
        ([trained, tmp_path / "none.png"], f"none.png {no_picture} (No such file"),
        ([trained, tmp_path / "text.png"], f"text.png {no_picture}"),
        ([trained, tmp_path / "vast.png"], f"{no_picture} (Image size (200000000 pixels)"),
    ):
        status, _, [line] = ask(*words)
        assert status in (1, 2), words
        assert line.startswith("predict.py: error: ")
        assert message in line


def test_own_images_keep_their_shape(tmp_path):
    path = tmp_path / "own.png"
    Image.new("RGB", (90, 60), (200, 100, 50)).save(path)
    for shape in ((3, 32, 24), (1, 20, 20), (20, 30)):
        own = data.ImageSet(torch.zeros(5, *shape, dtype=torch.uint8), torch.zeros(5))
        image = predict.read_picture(path, own)
        assert (image.shape, image.dtype) == ((1, *shape), torch.uint8)
    assert int(image[0, 0, 0]) == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)
    folder = SimpleNamespace(transform=lambda picture: torch.tensor(picture.size))
    assert predict.read_picture(path, data.SampleSet(folder, 0)).tolist() == [[90, 60]]


def test_the_numbers_of_a_regression_are_printed(tmp_path, ask, monkeypatch):
    own = data.ImageSet(torch.rand(40, 4, 4), torch.rand(40, 2))
    monkeypatch.setitem(data.SOURCES, "mine", Source("Mine"))
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 2))  # noqa: E731
    monkeypatch.setitem(models.MODELS, "mine", build)
    monkeypatch.setattr(data, "load_dataset", lambda *_: (own, own))
    loss = lambda outputs, targets: (F.mse_loss(outputs, targets), {"count": len(targets)})  # noqa: E731
    monkeypatch.setattr(models, "loss_and_counts", loss)
    model = models.build_model("mine")
    state = {"identity": {"model": "mine", "dataset": "mine"}, "model": model.state_dict()}
    monkeypatch.setattr(predict, "read_checkpoint", lambda _: state)
    Image.new("L", (8, 8), 255).save(tmp_path / "white.png")
    status, printed, errors = ask(tmp_path / "last.pt", tmp_path / "white.png", "--test")
    assert (status, errors) == (0, [])
    with torch.no_grad():
        white, expected = model(torch.ones(1, 4, 4)), F.mse_loss(model(own.images), own.labels)
    first, second = printed.splitlines()
    assert first.endswith("white.png: " + ", ".join(f"{x:.6g}" for x in white[0].tolist()))
    assert second == f"mine test set, 40 samples: loss {float(expected):.6g}"


@pytest.mark.parametrize(("classes", "shape"), [(2, (28, 28)), (100, (3, 32, 32)), (12, (1, 7, 9))])
def test_any_classes_and_any_images_are_drawn(classes, shape, tmp_path):
    labels = torch.arange(60) % classes
    predictions = labels.where(torch.arange(60) % 3 > 0, (labels + 1) % classes)
    matrix = predict.confusion_matrix(labels, predictions)
    assert int(matrix.sum()) == 60
    assert int(matrix.trace()) == 40
    assert int(matrix[labels[0], predictions[0]]) > 0
    figures, own = predict.new_figures(), data.ImageSet(torch.zeros(60, *shape), labels)
    predict.draw_confusion(figures["confusion_matrix"], matrix)
    logits = F.one_hot(predictions, classes) * torch.linspace(0, 9, 60)[:, None]
    predict.draw_mistakes(figures["mistakes"], own, labels, logits)
    for name, figure in figures.items():
        figure.savefig(tmp_path / f"{name}.png")
    first = figures["mistakes"].axes[0].get_title()
    assert first.startswith(f"{labels[57]} > {predictions[57]} "), "the most confident"


def test_without_matplotlib_the_score_stands(trained, ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # what is not installed
    status, printed, [line] = ask(trained, "--test")
    assert (status, "accuracy" in printed) == (0, True)
    assert "pip install matplotlib" in line
