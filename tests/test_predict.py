"""predict.py predicts what the training's evaluation did, and for image files of any kind, too."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

import data
from tests.processes import ROOT, run, script, summary, torchrun
from utils.device import Precision
from utils.weights import CheckpointError

sys.path.insert(0, str(ROOT / "scripts" / "tools"))

import predict
from photo import MIN_CONTRAST, WORKING_SIZE, InputError, normalise, read_image, resize

CPU = torch.device("cpu")
DIGITS = 100  # drawn in each form


def train(technique: str, data_dir: Path, folder: Path, *flags: Any) -> Path:
    own = ["--dataset", "synthetic", "--data-dir", data_dir, "--run-dir", folder]
    own += ["--no-tensorboard", *flags]
    if technique == "ddp":
        command = torchrun(2, "train_ddp.py", *own)
    else:
        command = script(f"train_{technique}.py", *own)
    result = run(*command)
    assert result.returncode == 0, result.text
    return folder


@pytest.fixture(scope="module")
def trained(synthetic_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    return train("single", synthetic_dir, folder, "--max-steps", 120)


def ask(*args: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Call ``predict.py`` in this process."""
    command = ["predict.py", "--threads", "1", *map(str, args)]
    monkeypatch.setattr(sys, "argv", command)
    return predict.main()


@pytest.mark.parametrize(
    ("technique", "amp"),
    [
        ("single", "bf16"),
        ("dp", "off"),
        ("ddp", "off"),
        pytest.param("ddp", "bf16", marks=pytest.mark.slow),
    ],
)
def test_the_test_set_gets_the_score_of_the_run(
    technique: str,
    amp: str,
    synthetic_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    extra = ["--model", "mlp", "--max-steps", 30, "--amp", amp]
    folder = train(technique, synthetic_dir, tmp_path / "run", *extra)
    correct = summary(folder)["test_correct"]
    assert ask(folder, "--test", monkeypatch=monkeypatch) == 0
    told = capsys.readouterr()
    assert f"synthetic test set: {correct:,} of 10,000 correct" in told.out
    assert not told.err
    with Image.open(folder / "mistakes.png") as picture:
        assert picture.height > 300


@pytest.mark.slow
def test_as_a_user_calls_it(trained: Path, synthetic_dir: Path, tmp_path: Path) -> None:
    """Test set, export and images at once; the exported file says the same."""
    test_set = data.load_dataset("synthetic", str(synthetic_dir))[1]
    images = []
    for digit in range(10):
        index = int((test_set.labels == digit).nonzero()[0])
        path = tmp_path / f"{digit}.png"
        Image.fromarray(enlarged(test_set.images[index], 5)).save(path)
        images.append(path)
    checkpoint, exported = trained / "checkpoints" / "last.pt", tmp_path / "digits.pt2"
    predict_py = [sys.executable, ROOT / "scripts" / "tools" / "predict.py", "--threads", 1]
    sheet = ["--mistakes", tmp_path / "sheet.png"]
    first = run(*predict_py, checkpoint, *images, "--test", "--export", exported, *sheet)
    assert first.returncode == 0, first.text
    assert f"{summary(trained)['test_correct']:,} of 10,000" in first.stdout
    answers = re.findall(r"(\d)\.png: (\d) \(([\d.]+)%\), then \d \(([\d.]+)%\)", first.stdout)
    assert len(answers) == 10
    assert sum(name == told for name, told, _, _ in answers) >= 9
    assert all(float(sure) > float(other) for _, _, sure, other in answers)
    assert (tmp_path / "sheet.png").exists()

    # torch 2.9 warns of its own reading of the archive.
    quiet = {"PYTHONWARNINGS": "ignore::UserWarning"}
    again = run(*predict_py, exported, *images, "--test", "--data-dir", synthetic_dir, **quiet)
    assert again.returncode == 0, again.text
    assert not again.stderr
    assert again.stdout.splitlines()[:-1] == first.stdout.splitlines()[:11]


def enlarged(image: torch.Tensor, factor: int) -> np.ndarray:
    side = 28 * factor
    return np.asarray(Image.fromarray(image.numpy()).resize((side, side), Image.Resampling.BICUBIC))


def on_paper(image: torch.Tensor) -> Image.Image:
    """Blue ink on yellowish paper."""
    ink = enlarged(image, 10)[..., None] / 255
    colours = np.array([240, 230, 200]) * (1 - ink) + np.array([30, 40, 160]) * ink
    return Image.fromarray(colours.astype(np.uint8))


def in_a_corner(image: torch.Tensor) -> Image.Image:
    canvas = np.full((600, 900), 255, np.uint8)
    canvas[330:554, 20:244] = 255 - enlarged(image, 8)
    return Image.fromarray(canvas)


def transparent(image: torch.Tensor) -> Image.Image:
    """Black ink on nothing, as drawing programs save it."""
    canvas = np.zeros((168, 168, 4), np.uint8)
    canvas[..., 3] = enlarged(image, 6)
    return Image.fromarray(canvas)


def photographed(image: torch.Tensor) -> Image.Image:
    """With grain, and a light that falls off."""
    ink = enlarged(image, 10) / 255
    light = np.linspace(200, 170, 280)[None] * np.ones((280, 1))
    grain = np.random.default_rng(0).normal(0, 6, ink.shape)
    return Image.fromarray((light * (1 - ink) + 40 * ink + grain).clip(0, 255).astype(np.uint8))


FORMS: dict[str, tuple[str, Callable[[torch.Tensor], Image.Image]]] = {
    "as it is": ("png", lambda image: Image.fromarray(image.numpy())),
    "inverted": ("png", lambda image: Image.fromarray(255 - image.numpy())),
    "enlarged": ("png", lambda image: Image.fromarray(enlarged(image, 7))),
    "palette": ("gif", lambda image: Image.fromarray(255 - enlarged(image, 4)).convert("P")),
    "16 bit": ("png", lambda image: Image.fromarray(enlarged(image, 4).astype(np.uint16) * 257)),
    "paper": ("jpg", on_paper),
    "corner": ("png", in_a_corner),
    "transparent": ("png", transparent),
    "photo": ("jpg", photographed),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_digit_is_known_in_any_form(
    form: str, trained: Path, synthetic_dir: Path, tmp_path: Path
) -> None:
    test_set = data.load_dataset("synthetic", str(synthetic_dir))[1]
    ending, draw = FORMS[form]
    seen = []
    for image in test_set.images[:DIGITS]:
        path = tmp_path / f"digit.{ending}"
        draw(image).save(path)
        seen.append(normalise(read_image(path), 20))
    if form in ("as it is", "inverted"):
        assert torch.equal(torch.stack(seen), test_set.images[:DIGITS])
    classifier = predict.load(trained, CPU).classifier
    precision = Precision(CPU, "off")
    given = predict.probabilities_of(classifier, torch.stack(seen), precision).argmax(1)
    assert int((given == test_set.labels[:DIGITS]).sum()) >= 0.94 * DIGITS


def test_where_and_how_large_a_digit_is_drawn_does_not_matter() -> None:
    stroke = torch.zeros(200, 200)
    stroke[60:160, 90:100] = 255
    stroke[60:70, 90:140] = 255
    seen = normalise(stroke, 20)
    assert torch.equal(normalise(stroke.roll((30, -50), (0, 1)), 20), seen)
    assert torch.equal(normalise(255 - stroke, 20), seen)
    assert torch.equal(normalise(stroke / 4 + 90, 20), seen)
    rows, columns = (seen.amax(1) > 0).nonzero(), (seen.amax(0) > 0).nonzero()
    assert (int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1) == (20, 10)
    weights = seen.double() / seen.sum()
    assert float((weights.sum(1) * torch.arange(28)).sum()) == pytest.approx(13.5, abs=0.51)
    assert float((weights.sum(0) * torch.arange(28)).sum()) == pytest.approx(13.5, abs=0.51)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 400), st.integers(0, 99), st.sampled_from([20, 28]))
def test_any_picture_becomes_28_by_28_or_is_refused(
    height: int, width: int, seed: int, box: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.rand(height, width, generator=generator).mul(255 * seed / 99)
    try:
        seen = normalise(pixels, box)
    except InputError:
        if max(height, width) > WORKING_SIZE:  # noise that shrinks averages out to one grey
            pixels = resize(pixels, WORKING_SIZE)
        assert pixels.max() - pixels.min() < 2 * MIN_CONTRAST
    else:
        assert (seen.shape, seen.dtype) == ((28, 28), torch.uint8)
        assert (height, width) == (28, 28) or seen.max() == 255


def test_what_cannot_be_used_is_said_in_one_line(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    state = torch.load(trained / "checkpoints" / "last.pt", weights_only=True)
    for name in ("mine", "mlp"):
        state["identity"]["model"] = name
        torch.save(state, tmp_path / f"{name}.pt")
    state["identity"] = {"model": "mlp", "dataset": "elsewhere"}
    torch.save(state, tmp_path / "elsewhere.pt")
    torch.save({"format": 1}, tmp_path / "empty.pt")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "foreign.pt")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "foreign.pt2")
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "text.pt2").write_text("no archive")
    Image.new("L", (50, 50), 200).save(tmp_path / "blank.png")
    Image.new("1", (10_000, 10_000)).save(tmp_path / "vast.png")
    Image.new("RGB", (50, 50)).save(tmp_path / "program.eps")
    (tmp_path / "program.eps").rename(tmp_path / "program.png")
    for name, number in (("nan", np.nan), ("inf", np.inf)):
        pixels = np.zeros((40, 40), np.float32)
        pixels[20:, 20:], pixels[3, 3] = 200, number
        Image.fromarray(pixels).save(tmp_path / f"{name}.tiff")
    for name in ("pipe.png", "pipe.pt", "pipe.pt2"):
        os.mkfifo(tmp_path / name)
    cases: list[tuple[list[Any], str]] = [
        (["nowhere.pt", "--test"], "nowhere.pt does not exist"),
        (["nowhere.pt2", "--test"], "nowhere.pt2 does not exist"),
        ([tmp_path, "--test"], "is no run directory"),
        ([tmp_path / "text.png", "--test"], "text.png is refused"),
        ([tmp_path / "foreign.pt", "--test"], "foreign.pt is not a checkpoint of this project"),
        ([tmp_path / "foreign.pt2", "--test"], "not a file that --export wrote"),
        ([tmp_path / "text.pt2", "--test"], "not a file that --export wrote"),
        ([tmp_path / "empty.pt", "--test"], "empty.pt is damaged: its part 'identity' is missing"),
        ([tmp_path / "elsewhere.pt", "--test"], "was trained on elsewhere: add it to SOURCES"),
        ([tmp_path / "pipe.pt", "--test"], "pipe.pt is not a file"),
        ([tmp_path / "pipe.pt2", "--test"], "pipe.pt2 is not a file"),
        ([tmp_path / "mine.pt", "--test"], "add it to MODELS in models.py"),
        ([tmp_path / "mlp.pt", "--test"], "does not fit mlp in models.py: 1.weight is missing"),
        ([trained], "nothing to do"),
        ([trained, tmp_path / "none.png"], "none.png does not exist"),
        ([trained, tmp_path / "\x1b[31m\n.png"], r"\x1b[31m\n.png does not exist"),
        ([tmp_path / "\x1b[31m\n.pt", "--test"], r"\x1b[31m\n.pt does not exist"),
        ([trained, tmp_path / "text.png"], "text.png cannot be read as an image"),
        ([trained, tmp_path / "blank.png"], "blank.png shows nothing"),
        ([trained, tmp_path / "pipe.png"], "pipe.png is not a file"),
        ([trained, tmp_path / "vast.png"], "vast.png has more than 89,478,485 pixels: shrink it"),
        ([trained, tmp_path / "program.png"], "program.png is EPS: convert it to PNG"),
        ([trained, tmp_path / "nan.tiff"], "nan.tiff has pixels that are not finite numbers"),
        ([trained, tmp_path / "inf.tiff"], "inf.tiff has pixels that are not finite numbers"),
        ([trained, "--export", tmp_path / "x.pt"], "--export writes a FILE.pt2"),
        ([trained, "--export", tmp_path / "none" / "x.pt2"], "cannot write"),
        ([trained, "--test", "--mistakes", tmp_path / "x.doc"], "cannot write"),
    ]
    for arguments, message in cases:
        status = ask(*arguments, monkeypatch=monkeypatch)
        told = capsys.readouterr().err
        assert status in (1, 2), arguments
        assert message in told
        assert len(told.splitlines()) == 1, told
        assert told.startswith("predict.py: error: ")


@pytest.mark.parametrize("threads", ["-5", "0", "99999999999"])
def test_a_number_of_threads_that_cannot_be_is_one_line(
    threads: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ask("nowhere.pt", "--test", "--threads", threads, monkeypatch=monkeypatch)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("predict.py: error: argument --threads: ")


@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        "[" * 100_000,
        "no JSON",
        "a pipe",
        '{"amp": "none", "data_dir": 5, "test_correct": []}',
    ],
)
def test_a_damaged_args_json_does_not_matter(
    content: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "last.pt").symlink_to(trained / "checkpoints" / "last.pt")
    for name in ("args.json", "summary.json"):
        if content == "a pipe":
            os.mkfifo(tmp_path / "run" / name)
        else:
            (tmp_path / "run" / name).write_text(content)
    Image.fromarray(np.eye(28, dtype=np.uint8) * 255).save(tmp_path / "line.png")
    status = ask(tmp_path / "run", tmp_path / "line.png", monkeypatch=monkeypatch)
    told = capsys.readouterr()
    assert (status, told.err) == (0, "")


def test_predictions_are_those_of_the_evaluation() -> None:
    """In batches of the same size, and where two logits differ in their last bit."""

    class Close(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            sizes.append(len(pixels))
            logits = torch.zeros(len(pixels), 10)
            logits[:, 3], logits[:, 7] = 9.0, torch.tensor(9.0).nextafter(torch.tensor(10.0))
            return logits

    sizes: list[int] = []
    images = torch.randint(256, (1100, 28, 28), dtype=torch.uint8)
    classifier = predict.Classifier(Close(), "mnist", CPU)
    probabilities = predict.probabilities_of(classifier, images, Precision(CPU, "off"))
    assert sizes == [500, 500, 100]
    assert probabilities.shape == (1100, 10)
    assert probabilities.argmax(1).unique().tolist() == [7]


def test_an_exported_file_that_differs_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = predict.load(trained, CPU)
    images = torch.randint(256, (9, 28, 28), dtype=torch.uint8)
    path = tmp_path / "digits.pt2"
    assert predict.export(subject, path, images) <= predict.TOLERANCE
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "damaged.pt2").write_bytes(content)
    with pytest.raises(InputError, match="damaged"):
        predict.load_exported(tmp_path / "damaged.pt2")

    other = predict.load(trained, CPU)
    with torch.no_grad():
        next(other.classifier.parameters()).mul_(1.5)
    monkeypatch.setattr(predict, "load_exported", lambda path: other)
    with pytest.raises(InputError, match="differs from the original"):
        predict.export(subject, path, images)


def test_without_pillow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Exception, match="pip install --upgrade pillow") as error:
        read_image(tmp_path / "digit.png")
    assert error.value.exit_status == 2  # type: ignore[attr-defined]


def test_a_damaged_checkpoint_is_refused(trained: Path, tmp_path: Path) -> None:
    content = bytearray((trained / "checkpoints" / "last.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "last.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        predict.load(tmp_path / "last.pt", CPU)


def test_fashion_has_names() -> None:
    probabilities = torch.tensor([0.0] * 7 + [0.9, 0.0, 0.1])
    told = predict.describe(probabilities, "fashion-mnist")
    assert told == "sneaker (90.0%), then ankle boot (10.0%)"
    assert predict.describe(probabilities, "mnist") == "7 (90.0%), then 9 (10.0%)"
