"""Checkpoints: nothing saved is lost, nothing damaged or foreign is loaded."""

import errno
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import models
from utils import checkpoint
from utils.checkpoint import Checkpointer, CheckpointError, Progress, init_weights, weights_sha256

IDENTITY = {"model": "linear", "dataset": "mnist", "seed": 0}


def build(folder: Path, model: nn.Module | None = None, **options: Any) -> Checkpointer:
    model = model or models.build_model("linear")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=options.pop("fp16", False))
    identity = options.pop("identity", IDENTITY)
    return Checkpointer(folder, model, optimizer, scaler, identity, **options)


def step(checkpointer: Checkpointer, progress: Progress) -> None:
    """Take an optimizer step, so that weights and momentum change."""
    checkpointer.model(torch.randn(3, 1, 28, 28)).sum().backward()
    checkpointer.optimizer.step()
    checkpointer.optimizer.zero_grad()
    progress.step()


def start() -> Progress:
    return Progress(epoch_size=1000, global_batch_size=10)


def test_a_round_trip_restores_everything(tmp_path: Path) -> None:
    saver, progress = build(tmp_path, fp16=True), start()
    step(saver, progress)
    progress.train_sums, progress.test_sums = [1.5, 2, 10], [0.5, 9, 10]
    saver.scaler._scale = torch.tensor(1024.0)
    saver.save(progress)

    loader = build(tmp_path, fp16=True)
    loader.scaler.scale(torch.ones(()))  # a scaler makes its scale when it is first used
    loaded = loader.resume(start())
    assert loaded == progress
    assert weights_sha256(loader.model) == weights_sha256(saver.model)
    ours, theirs = loader.optimizer.state_dict(), saver.optimizer.state_dict()
    assert torch.equal(ours["state"][0]["momentum_buffer"], theirs["state"][0]["momentum_buffer"])
    assert loader.scaler.get_scale() == 1024.0


def test_the_learning_rate_is_that_of_the_new_world(tmp_path: Path) -> None:
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)
    loader = build(tmp_path)
    loader.optimizer.param_groups[0]["lr"] = 0.7
    loaded = loader.resume(Progress(epoch_size=1000, global_batch_size=40))
    assert loader.optimizer.param_groups[0]["lr"] == 0.7
    assert (loaded.samples, loaded.global_batch_size) == (10, 40)


def test_no_checkpoint_is_the_start(tmp_path: Path) -> None:
    assert build(tmp_path).resume(start()) == start()


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_as_many_as_asked_for_are_kept(tmp_path: Path, keep: int) -> None:
    saver, progress = build(tmp_path, keep=keep), start()
    for _ in range(6):
        step(saver, progress)
        saver.save(progress)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["last.pt", *(f"step-{6 - i:08d}.pt" for i in range(keep - 1, 0, -1))]


def flip_bit(path: Path) -> None:
    """Flip a bit of the largest tensor (between two members of the archive it does no harm)."""
    with zipfile.ZipFile(path) as archive:
        offset = max(archive.infolist(), key=lambda member: member.file_size).header_offset
    content = bytearray(path.read_bytes())
    name, extra = (int.from_bytes(content[offset + i : offset + i + 2], "little") for i in (26, 28))
    content[offset + 30 + name + extra + 100] ^= 4
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-500]),
    "empty": lambda p: p.write_bytes(b""),
    "bit flipped": flip_bit,
    "foreign": lambda p: torch.save({"something": torch.zeros(3)}, p),
    "text": lambda p: p.write_text("not a checkpoint"),
    "folder": lambda p: (p.unlink(), p.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_whole_checkpoint_is_taken(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver, progress = build(tmp_path), start()
    for _ in range(2):
        step(saver, progress)
        saver.save(progress)
    path = tmp_path / "last.pt"
    path.write_bytes(path.read_bytes())  # its other name must not be damaged with it
    DAMAGE[damage](path)
    assert build(tmp_path).resume(start()).global_step == 1
    warning = capsys.readouterr().err
    assert "last.pt" in warning
    assert "step-00000001.pt" in warning
    assert len(warning.splitlines()) == 1


def test_torch_itself_would_take_a_flipped_bit(tmp_path: Path) -> None:
    """Why the archive's checksums are read first."""
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(5000)}, path)
    flip_bit(path)
    assert torch.load(path, weights_only=True)["a"].count_nonzero() == 1
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read_checkpoint(path)


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        build(tmp_path).resume(start())


def test_another_model_data_set_or_seed_is_refused(tmp_path: Path) -> None:
    build(tmp_path).save(start())
    for key, other in (("model", "mlp"), ("dataset", "synthetic"), ("seed", 7)):
        before = build(tmp_path, identity={**IDENTITY, key: other})
        weights = weights_sha256(before.model)
        with pytest.raises(CheckpointError, match=f"{key} {IDENTITY[key]}.*{other}"):
            before.resume(start())
        assert weights_sha256(before.model) == weights
    with pytest.raises(CheckpointError, match="does not fit --model"):
        build(tmp_path, models.build_model("mlp")).resume(start())


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch exploded",)


def test_a_malicious_pickle_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Bomb()}, tmp_path / "zip.pt")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Bomb()))
    for name in ("zip.pt", "bare.pt"):
        with pytest.raises(CheckpointError) as caught:
            init_weights(models.build_model("linear"), str(tmp_path / name))
        assert "can run code" in str(caught.value)
        assert "weights_only=False" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_no_more_leaves_the_checkpoint_before(
    reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full, beyond the quota, read-only since an error, or broken."""
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)

    def full(descriptor: int) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "fsync", full)
    step(saver, progress)
    with pytest.raises(CheckpointError, match=os.strerror(reason)) as caught:
        saver.save(progress)
    assert "\n" not in str(caught.value)
    assert build(tmp_path).resume(start()).global_step == 1


def test_only_the_writer_writes(tmp_path: Path) -> None:
    build(tmp_path / "none", write=False).save(start())
    assert not (tmp_path / "none").exists()


def test_partial_weights_go_by_name_and_shape(tmp_path: Path) -> None:
    """A transposed matrix has as many numbers, and is not the same."""
    source, target = nn.Linear(3, 4), nn.Linear(4, 3)
    state = {
        "module.weight": source.weight.detach(),
        "module.bias": torch.arange(3.0),
        "x": torch.ones(1),
    }
    torch.save({"model_state_dict": state}, tmp_path / "weights.pt")
    before = target.weight.detach().clone()
    report = init_weights(target, str(tmp_path / "weights.pt"))
    assert report.loaded == ["bias"]
    assert target.bias.tolist() == [0, 1, 2]
    assert torch.equal(target.weight, before)
    assert "weight has the shape (4, 3), not (3, 4)" in str(report)
    assert "x is not in the model" in str(report)


@pytest.mark.parametrize("wrap", ["bare", "model", "model_state_dict"])
def test_weights_are_found_where_people_keep_them(wrap: str, tmp_path: Path) -> None:
    source, target = models.build_model("mlp"), models.build_model("mlp")
    state = nn.DataParallel(source).state_dict()
    assert all(name.startswith("module.") for name in state)
    torch.save(state if wrap == "bare" else {wrap: state, "epoch": 3}, tmp_path / "weights.pt")
    report = init_weights(target, str(tmp_path / "weights.pt"))
    assert weights_sha256(target) == weights_sha256(source)
    assert not report.problems


@pytest.mark.parametrize("content", [[1, 2], {"model": 3}, {"a": "text"}, {}])
def test_what_holds_no_fitting_weights_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError):
        init_weights(models.build_model("linear"), str(tmp_path / "weights.pt"))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_is_an_error_of_one_line(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever happened to a file, reading it ends in the weights or in one line."""
    path = tmp_path / "weights.pt"
    torch.save(models.build_model("linear").state_dict(), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    message = ""
    try:
        checkpoint.read_checkpoint(path)
    except CheckpointError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1


def test_a_checkpoint_is_an_archive_of_plain_values(tmp_path: Path) -> None:
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)
    assert zipfile.is_zipfile(tmp_path / "last.pt")
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    assert state["format"] == checkpoint.FORMAT
    assert list(state["model"]) == ["1.weight", "1.bias"]


def test_an_epoch_ends_when_no_whole_batch_is_left() -> None:
    progress = Progress(epoch_size=25, global_batch_size=10)
    progress.step()
    progress.end_epoch([1.0, 2.0, 10.0], [])
    assert (progress.epoch, progress.samples, progress.train_sums) == (0, 10, [1.0, 2.0, 10.0])
    progress.step()
    progress.end_epoch([1.0, 2.0, 20.0], [])
    assert (progress.epoch, progress.samples, progress.train_sums) == (1, 0, [])
    assert progress.images == 25


def test_what_diverged_is_not_saved(tmp_path: Path) -> None:
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)
    step(saver, progress)
    progress.train_sums = [float("nan"), 3.0, 20.0]
    with pytest.raises(CheckpointError, match="not finite at step 2"):
        saver.save(progress)
    assert build(tmp_path).resume(start()).global_step == 1
