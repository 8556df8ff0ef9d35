"""What TensorBoard is given: comparable runs, the flags, and pictures that cover every image."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch.utils.data import DataLoader

import data
import models
from tests.processes import ROOT, run, summary
from utils import config, logger
from utils.errors import UserError
from utils.logger import Logger
from utils.metrics import Metrics
from utils.progress import Progress
from utils.run_dir import RunDir
from utils.status import Status

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
    start = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    chosen = HParamsPluginData.FromString(start).session_start_info.hparams
    assert set(chosen) == set(logger.HPARAMS.split())
    assert chosen["technique"].string_value == technique
    # TensorBoard's own list of columns, see the page: made of all runs.
    assert "_hparams_/experiment" not in board.summary_metadata


def build(folder: Path, **options: Any) -> Logger:
    words = ["--dataset", "synthetic", "--model", "linear", "--batch-size", "10"]
    args = config.parse_args("single", None, words)
    progress = Progress(epoch_size=100, global_batch_size=10, epochs=1)
    model, flags = models.build_model("linear"), config.flags(args)
    folder.mkdir(exist_ok=True)
    run_dir = RunDir(folder, False)
    return Logger(run_dir, model, CPU, progress, config.facts(args), flags, lr=0.1, **options)


def some_images(count: int) -> data.ImageSet:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 28, 28), dtype=torch.uint8, generator=generator)
    return data.ImageSet(images, torch.randint(10, (count,), generator=generator))


def end(subject: Logger, loss: float = 1.0) -> None:
    """Go through the end of a run in which every image was taken for a 3."""
    predictions = torch.tensor([[3.0, 0.9]] * 30, dtype=torch.float64)
    sums = [30 * loss, 3.0, 30.0]
    with subject:
        subject.log_epoch(Metrics(CPU, sums), Metrics(CPU, sums), predictions, 0.1)
        subject.progress.end_epoch(sums, sums)
        subject.complete(some_images(30))


def begin(subject: Logger, rates: list[float], loss: float) -> None:
    """Take steps of a training in which each sample had this loss."""
    loader: Any = DataLoader(some_images(100), 10, collate_fn=data.keep_batch)
    with subject:
        for rate, _ in zip(rates, subject.track(loader), strict=False):
            subject.progress.step()
            steps = subject.progress.global_step
            subject.log_step(Metrics(CPU, [10 * steps * loss, 1.0, 10.0 * steps]), rate)


def test_few_steps_are_told_before_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with build(tmp_path):
        told = capsys.readouterr().out.splitlines()
    [line] = [line for line in told if line.startswith("steps ")]
    assert line == "steps   10 in all, which is few: raise --epochs or lower --batch-size"
    many = build(tmp_path)
    many.progress.epochs = 10
    with many:
        assert "\nsteps " not in capsys.readouterr().out


def test_the_steps_of_a_training() -> None:
    for epochs, steps in ((1, 9), (5, 45), (0.5, 4), (1.5, 13), (2.99, 27)):
        assert Progress(60_000, 6144, epochs).total_steps == steps, epochs


RISING, FALLING = [0.1, 0.2, 0.3, 0.4], [0.1, 0.4, 0.3, 0.2, 0.1]


@pytest.mark.parametrize(
    ("rates", "loss", "lines"),
    [
        (RISING, 2.3, 0),  # still warming up
        (FALLING, 2.3, 1),
        (FALLING, 70.0, 1),
        (FALLING, 1.5, 0),
    ],
)
def test_a_loss_like_that_of_guessing_names_the_learning_rate_once(
    rates: list[float],
    loss: float,
    lines: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    begin(build(tmp_path, log_every=1, tensorboard=False, show_bar=False), rates, loss)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines
    for line in told:
        assert line.startswith(f"warning: the loss is {loss:.2f}, and that of guessing 2.30: ")
        assert "learning rate, 0.1 at its peak" in line


def test_one_rank_reports(tmp_path: Path) -> None:
    end(build(tmp_path / "0"))
    assert set(events(tmp_path / "0").Tags()["images"]) == TAGS
    assert summary(tmp_path / "0")["peak_memory_bytes"][0] > 0
    end(build(tmp_path / "1", rank=1))
    assert list((tmp_path / "1").iterdir()) == []


def test_without_pillow_a_run_ends_as_it_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    end(build(tmp_path))
    told = capsys.readouterr().err
    assert "pip install --upgrade pillow" in told
    assert len(told.splitlines()) == 1
    assert summary(tmp_path)["test_count"] == 30


def test_a_json_file_never_holds_what_is_not_json(tmp_path: Path) -> None:
    end(build(tmp_path), loss=float("nan"))
    assert summary(tmp_path)["test_loss"] is None
    text = (tmp_path / "metrics.jsonl").read_text() + (tmp_path / "summary.json").read_text()
    assert "NaN" not in text


DAMAGED_LINES = [b"", b"{", b"\xff\xfe garbage", b"[1]", b'{"epoch": "x"}', b"[" * 100_000, b"7"]


@pytest.mark.parametrize("damage", DAMAGED_LINES, ids=lambda line: repr(line[:10]))
def test_a_damaged_line_of_the_metrics_is_dropped(
    damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [json.dumps({"epoch": epoch}).encode() for epoch in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([good[0], damage, good[1], good[2]]))
    subject = build(tmp_path)
    subject.progress.epoch = 2
    with subject:
        pass
    assert (tmp_path / "metrics.jsonl").read_bytes() == good[0] + b"\n" + good[1] + b"\n"
    told = capsys.readouterr().err.splitlines()
    assert len(told) == (1 if damage else 0), told


@pytest.mark.parametrize("what", ["pipe", "link", "dangling link", "folder"])
def test_metrics_that_are_no_file_of_their_own_are_refused(what: str, tmp_path: Path) -> None:
    path, other = tmp_path / "run" / "metrics.jsonl", tmp_path / "other"
    path.parent.mkdir()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to(other)
    if what == "link":
        other.write_text("mine")
    with pytest.raises(UserError, match="move it away"):
        end(build(tmp_path / "run"))
    assert not other.exists() or other.read_text() == "mine"


def test_an_error_is_explained_once_and_said_in_the_status(tmp_path: Path) -> None:
    explained: list[tuple[str, int]] = []

    def explain(error: Exception, step: int) -> Exception:
        explained.append((str(error), step))
        return UserError("rank 1 is lost")

    subject = build(tmp_path, explain=explain)
    subject.progress.global_step = 7
    with pytest.raises(UserError, match="rank 1 is lost"), subject:
        raise RuntimeError("connection closed")
    assert explained == [("connection closed", 7)]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", "UserError: rank 1 is lost")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("--epochs 3 --init-weights a.pt --seed 1", "--epochs 3 --seed 1"),
        ("--init-weights=a.pt --resume --run-dir x", ""),
        ("--run-dir=x --lr 0.1", "--lr 0.1"),
        ("--init-weights= --lr 0.05", "--lr 0.05"),
    ],
)
def test_the_command_that_continues_runs_as_printed(
    words: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(sys, "argv", ["train_single.py", *words.split()])
    command = Status(tmp_path, "single", None).continue_command()
    start = f"python train_single.py {left}".strip()
    assert command == f"{start} --run-dir {tmp_path} --resume"
    config.parse_args("single", None, command.split()[2:])
