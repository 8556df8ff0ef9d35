"""What TensorBoard is given: comparable runs, the flags, and pictures that cover every image."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

import data
import models
from tests.processes import ROOT, run, summary
from utils import answers, config, logger
from utils.answers import Classifier, answer, confusion_matrix, draw_confusion, draw_mistakes
from utils.checkpoint import Progress
from utils.logger import Logger
from utils.run_dir import RunDir
from utils.runtime import Precision

CPU = torch.device("cpu")
TAGS = {"test_images/confusion_matrix", "test_images/mistakes"}


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


@pytest.mark.parametrize(
    ("technique", "devices"),
    [
        ("single", 1),
        pytest.param("dp", 2, marks=pytest.mark.slow),
        ("ddp", 2),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_shows_in_tensorboard(
    technique: str, devices: int, synthetic_dir: Path, tmp_path: Path
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", devices]
    result = run(
        sys.executable,
        *(launcher if technique == "ddp" else []),
        *[ROOT / "tests" / "instrumented.py", f"train_{technique}.py", "--threads", 1],
        *(["--replicas", devices] if technique == "dp" else []),
        *["--dataset", "synthetic", "--data-dir", synthetic_dir, "--run-dir", tmp_path / "run"],
        *["--model", "mlp", "--max-steps", 20, "--log-every", 10, "--no-progress"],
    )
    assert result.returncode == 0, result.text
    facts = summary(tmp_path / "run")

    lines = [line for line in result.stdout.splitlines() if line.startswith("confusion matrix ")]
    assert len(lines) == 1, "one rank draws"
    matrix = torch.tensor(json.loads(lines[0].removeprefix("confusion matrix ")))
    labels = data.load_dataset("synthetic", str(synthetic_dir))[1].labels
    assert matrix.sum(1).tolist() == labels.bincount().tolist(), "every image, once"
    assert (matrix.sum(), matrix.trace()) == (facts["test_count"], facts["test_correct"])

    board = events(tmp_path / "run")
    assert set(board.Tags()["images"]) == TAGS
    for tag in TAGS:
        [picture] = board.Images(tag)
        assert picture.step == 20 * facts["global_batch_size"]
        assert min(picture.width, picture.height) > 400
    [text] = board.Tensors("run/text_summary")
    told = text.tensor_proto.string_val[0].decode()
    assert f"train_{technique}.py --threads 1" in told
    for name in ("technique", "world_size", "global_batch_size", "seed"):
        assert f"| {name} | {facts[name]} |" in told
    # The same tags in all three, or they would not lie over each other.
    assert set(board.Tags()["scalars"]) == {
        *("step/loss", "step/accuracy", "step/learning_rate"),
        *("test/loss", "test/accuracy"),
        *("train/loss", "train/accuracy", "train/images_per_second"),
    }
    part = board.SummaryMetadata("_hparams_/experiment").plugin_data.content
    columns = HParamsPluginData.FromString(part).experiment
    first = {column.name for column in columns.hparam_infos if column.differs}
    assert first == set(logger.COMPARED)
    assert {metric.name.tag for metric in columns.metric_infos} <= set(board.Tags()["scalars"])


def build(folder: Path, **options: Any) -> Logger:
    flags = ["--dataset", "synthetic", "--model", "linear", "--batch-size", "10"]
    parsed = vars(config.build_parser("single", None).parse_args(flags)) | {"argv": flags}
    progress = Progress(epoch_size=100, global_batch_size=10)
    model = models.build_model("linear")
    return Logger(RunDir(folder, False), "single", parsed, model, CPU, progress, 0.1, **options)


def some_images(count: int) -> data.ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 28, 28), dtype=torch.uint8, generator=generator)
    return data.ImageSet(images, torch.randint(10, (count,), generator=generator))


def show(subject: Logger, test_set: data.ImageSet) -> None:
    subject.show_answers(test_set)
    subject.__exit__(None, None, None)


def test_one_rank_shows_a_test_set_of_bearable_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(build(tmp_path / "0"), some_images(30))
    assert set(events(tmp_path / "0").Tags()["images"]) == TAGS
    show(build(tmp_path / "1", rank=1), some_images(30))
    monkeypatch.setattr(logger, "MAX_SHOWN", 29)
    show(build(tmp_path / "2"), some_images(30))
    assert not (tmp_path / "1").exists()
    assert not (tmp_path / "2").exists()


def test_without_pillow_a_run_ends_as_it_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    show(build(tmp_path), some_images(30))
    told = capsys.readouterr().err
    assert "pip install --upgrade pillow" in told
    assert len(told.splitlines()) == 1


def test_answers_are_those_of_the_evaluation() -> None:
    """In batches of the same size, and where two logits differ in their last bit."""

    class Close(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            sizes.append(len(pixels))
            logits = torch.zeros(len(pixels), 10)
            logits[:, 3], logits[:, 7] = 9.0, torch.tensor(9.0).nextafter(torch.tensor(10.0))
            return logits

    sizes: list[int] = []
    probabilities = answer(
        Classifier(Close(), "mnist", CPU), some_images(1100).images, Precision(CPU, "off")
    )
    assert sizes == [500, 500, 100]
    assert probabilities.shape == (1100, 10)
    assert probabilities.argmax(1).unique().tolist() == [7]


def test_rows_are_labels_and_columns_answers() -> None:
    matrix = confusion_matrix(torch.tensor([3, 3, 3, 9]), torch.tensor([3, 5, 5, 9]))
    assert matrix.shape == (10, 10)
    counted = {(row, column): int(matrix[row, column]) for row, column in matrix.nonzero().tolist()}
    assert counted == {(3, 3): 1, (3, 5): 2, (9, 9): 1}


def test_a_darker_cell_has_more_answers() -> None:
    matrix = torch.eye(10, dtype=torch.int64) * 1000
    matrix[3, 5] = 2
    picture = draw_confusion(matrix)

    def brightness(row: int, column: int) -> int:
        cell, corner = answers.CELL, 4  # beside the number, which stands in the middle
        x, y = cell + column * cell + corner, cell + answers.LINE + row * cell + corner
        return sum(picture.getpixel((x, y)))  # type: ignore[arg-type]

    assert brightness(3, 3) < brightness(3, 5) < brightness(5, 3)


def test_the_surest_mistake_comes_first() -> None:
    images = torch.arange(4, dtype=torch.uint8).mul(60)[:, None, None].expand(4, 28, 28)
    probabilities = torch.eye(10)[[1, 2, 3, 4]] * torch.tensor([[0.6], [0.9], [0.8], [0.7]])
    labels = torch.tensor([0, 0, 3, 0])  # the third is right
    picture = draw_mistakes(images, labels, probabilities, limit=2)
    tile, y = 28 * answers.SCALE + answers.GAP, 2 * answers.GAP + answers.LINE + 1
    shown = [picture.getpixel((answers.GAP + i * tile + 1, y)) for i in range(3)]
    assert shown == [(60, 60, 60), (180, 180, 180), answers.PAPER]


def test_no_mistake_can_be_drawn_too() -> None:
    picture = draw_mistakes(some_images(3).images, torch.arange(3), torch.eye(10)[:3], 5)
    assert picture.height < 60
