"""Checkpoints: nothing saved is lost, nothing damaged or foreign is loaded."""

import copy
import errno
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import models
from utils.errors import Diverged, UsageError, explain
from utils.training import checkpoint
from utils.training.checkpoint import Checkpointer
from utils.training.progress import Progress
from utils.weights import CheckpointError, load_weights, weights_sha256

IDENTITY = {"model": "linear", "dataset": "mnist", "seed": 0}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def build(folder, module=None, fp16=False, optimizer=None, extra=None, **identity):
    model = module or models.build_model("linear")
    optimizer = optimizer or sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=fp16)
    return Checkpointer(folder, model, optimizer, scaler, IDENTITY | identity, extra or {})


def step(checkpointer, progress):
    """Take an optimizer step, so that weights and momentum change."""
    checkpointer.model(torch.randn(3, 1, 28, 28)).sum().backward()
    checkpointer.optimizer.step()
    checkpointer.optimizer.zero_grad()
    progress.step()


def begin(global_batch_size=10):
    return Progress(1000, global_batch_size, 1)


def saved(folder, steps=1, **options):
    """Return a checkpointer that has saved after each of some steps, and where it stands."""
    saver, progress = build(folder, **options), begin()
    for _ in range(steps):
        step(saver, progress)
        saver.save(progress)
    return saver, progress


def restored(checkpointer, progress=None):
    """Return where the run continues."""
    progress = progress or begin()
    checkpointer.restore(progress)
    return progress


def test_a_round_trip_restores_everything_but_the_learning_rate(tmp_path):
    saver, progress = saved(tmp_path, fp16=True)
    progress.train_sums = {"count": 10, "loss": 1.5, "correct": 2}
    progress.evaluated = {"test": {"count": 10, "loss": 0.5, "correct": 9}}
    saver.scaler._scale = torch.tensor(1024.0)
    saver.save(progress)

    loader = build(tmp_path, fp16=True)
    loader.scaler.scale(torch.ones(()))  # a scaler makes its scale when it is first used
    loader.optimizer.param_groups[0]["lr"] = 0.7
    assert restored(loader).position == progress.position
    assert weights_sha256(loader.model) == weights_sha256(saver.model)
    ours, theirs = loader.optimizer.state_dict(), saver.optimizer.state_dict()
    assert torch.equal(ours["state"][0]["momentum_buffer"], theirs["state"][0]["momentum_buffer"])
    assert loader.scaler.get_scale() == 1024.0
    assert loader.optimizer.param_groups[0]["lr"] == 0.7, "that of the new world size"
    assert restored(build(tmp_path), begin(40)).epoch_samples == 10, "without fp16, too"


def flip_bit(path):
    """Flip a bit of the weights (between two members of the archive it does no harm)."""
    weights = torch.load(path, weights_only=True)["model"]["1.weight"].numpy().tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(weights[:64]) + 100] ^= 4
    path.write_bytes(content)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_newest_whole_checkpoint_is_taken(tmp_path, capsys):
    saved(tmp_path, steps=3)
    path = tmp_path / "last.pt"
    flip_bit(path)
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match="trained with seed 0"):
        restored(build(tmp_path, seed=1))
    loader = build(tmp_path)
    progress = restored(loader)
    assert progress.global_step == 2
    [warning] = capsys.readouterr().err.splitlines()
    assert str(path) in warning
    assert f"continuing from {tmp_path / 'previous.pt'}" in warning
    assert content(tmp_path) == before, "only a save changes the disk"
    # Otherwise the next save would keep the damaged one in the place of the good one.
    loader.save(progress)
    assert content(tmp_path) == {
        "last.pt": path.read_bytes(),
        "previous.pt": before["previous.pt"],
        "damaged.pt": before["last.pt"],
    }
    for name in ("last.pt", "previous.pt"):
        os.truncate(tmp_path / name, 500)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        restored(build(tmp_path))
    shutil.rmtree(tmp_path)
    assert restored(build(tmp_path)).global_step == 0
    assert capsys.readouterr().err.endswith(f"no checkpoint in {tmp_path}: starting at step 0\n")


def fail(number):
    def function(*arguments):
        raise OSError(number, os.strerror(number), *map(str, arguments[:1]))

    return function


def test_what_cannot_be_read_is_not_damaged(tmp_path, monkeypatch):
    """The command is refused, and nothing is removed or renamed."""
    saved(tmp_path, steps=2)
    path = tmp_path / "last.pt"
    before = content(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail(errno.EIO))
        with pytest.raises(OSError, match=r"Input/output error: .*last\.pt"):
            restored(build(tmp_path))
    assert content(tmp_path) == before
    torch.save(torch.load(path, weights_only=True) | {"format": 3}, path)
    with pytest.raises(CheckpointError, match=r"its format is 3, not \d"):
        restored(build(tmp_path))


def test_a_file_system_that_can_do_less(tmp_path, monkeypatch):
    """On exFAT, FUSE and others a file has one name."""
    monkeypatch.setattr(os, "link", fail(errno.EPERM))
    saved(tmp_path, steps=3)
    assert sorted(content(tmp_path)) == ["last.pt", "previous.pt"]
    (tmp_path / "last.pt").unlink()
    assert restored(build(tmp_path)).global_step == 2, "the one before is kept there, too"


def test_another_model_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="trained with model linear, this command says mlp"):
        restored(build(tmp_path, model="mlp"))
    with pytest.raises(CheckpointError, match="does not fit --model: size mismatch for"):
        restored(build(tmp_path, models.build_model("mlp")))


def test_a_disk_that_takes_no_more_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    saver, progress = saved(tmp_path)
    monkeypatch.setattr(os, "fsync", fail(errno.ENOSPC))
    step(saver, progress)
    with pytest.raises(OSError, match=r"No space left on device: .*last\.pt") as caught:
        saver.save(progress)
    assert "device; earlier checkpoints are whole: make room" in str(explain(caught.value))
    assert restored(build(tmp_path)).global_step == 1
    assert [*content(tmp_path)] == ["last.pt"]


def test_only_rank_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.distributed, "rank", lambda: 1)
    saved(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["weights", "momentum", "sums"])
def test_nothing_that_is_not_finite_is_saved(where, tmp_path, monkeypatch):
    """And every rank says so, or the others would wait for one that ended."""
    saver, progress = saved(tmp_path)
    step(saver, progress)
    if where == "weights":
        with torch.no_grad():
            saver.model[1].weight[3, 5] = float("nan")
    if where == "momentum":
        saver.optimizer.state_dict()["state"][0]["momentum_buffer"][2, 2] = float("inf")
    if where == "sums":
        progress.evaluated = {"test": {"count": 10.0, "loss": float("inf")}}
    for rank in (0, 1):
        monkeypatch.setattr(checkpoint.distributed, "rank", lambda rank=rank: rank)
        with pytest.raises(Diverged, match="not finite at step 2") as caught:
            saver.save(progress)
        assert caught.value.reported_elsewhere == bool(rank), "one line for all ranks"
    monkeypatch.undo()
    assert restored(build(tmp_path)).global_step == 1


def test_another_optimizer_is_refused_and_a_parameter_that_is_not_saved(tmp_path):
    saved(tmp_path)
    model = models.build_model("linear")
    wrong = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="optimizer SGD, this command says AdamW"):
        restored(build(tmp_path, model, optimizer=wrong))
    with pytest.raises(UsageError, match="pass its module to Run in `extra`"):
        build(tmp_path, model, optimizer=sgd([*model.parameters(), nn.Parameter(torch.ones(1))]))


def test_a_mask_may_be_infinite_and_no_other_buffer(tmp_path):
    """A resume tells which buffers have changed, since it gives rank 0's to all ranks."""
    model = models.build_model("linear")
    model.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
    model.register_buffer("mean", torch.zeros(2))
    untrained = copy.deepcopy(model)
    saver, progress = saved(tmp_path, module=model)
    model.mean[0] = 1
    saver.save(progress)
    assert build(tmp_path, untrained).restore(begin()) == ["mean"]
    model.mean[0] = float("-inf")
    with pytest.raises(Diverged):
        saver.save(progress)


def test_more_parts_are_restored_or_refused_in_a_line(tmp_path):
    ema, part = nn.Linear(2, 3), nn.Linear(1, 1)
    model = models.build_model("linear")
    both = sgd([*model.parameters(), *part.parameters()])
    saved(tmp_path, module=model, optimizer=both, extra={"ema": ema, "part": part})
    other = nn.Linear(2, 3)
    restored(build(tmp_path, extra={"ema": other, "part": nn.Linear(1, 1)}))
    assert torch.equal(other.weight, ema.weight)
    for extra, message in (
        ({}, r"extra \['ema', 'part'\], this command says \[\]"),
        ({"ema": nn.Linear(2, 4), "part": part}, "does not fit ema: size mismatch"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            restored(build(tmp_path, extra=extra))
        assert "\n" not in str(caught.value)


class Part:
    """Something to save beside the model."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {"own": self.state}

    def load_state_dict(self, state):
        self.state = state["own"]


def test_what_numpy_counted_is_read_back_as_plain_values(tmp_path):
    own = [np.float64(0.5), {np.int64(3): np.bool_(True)}, np.arange(3.0), Counter(a=2)]
    before, part, other = repr(own), Part(own), Part(None)
    saved(tmp_path, extra={"part": part})
    restored(build(tmp_path, extra={"part": other}))
    tensor = torch.arange(3.0, dtype=torch.float64)
    assert repr(other.state) == repr([0.5, {3: True}, tensor, Counter(a=2)])
    assert repr(part.state) == before, "changed in the run that goes on"


def test_what_a_resume_would_refuse_is_refused_when_the_run_opens_and_at_a_save(tmp_path):
    part, message = Part(None), r"extra\['part'\]\['own'\]\[1\] is a \S*PosixPath, which could not"
    saver, progress = saved(tmp_path, extra={"part": part})
    before = content(tmp_path)
    part.state = [0, Path("x")]
    with pytest.raises(UsageError, match=message):
        saver.save(progress)
    with pytest.raises(UsageError, match=message):
        build(tmp_path, extra={"part": part})
    assert content(tmp_path) == before


def test_what_would_train_or_resume_wrongly_is_one_line(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    head, stem = (sgd(model[i].parameters()) for i in (1, 0))
    scheduler = torch.optim.lr_scheduler.StepLR(head, 9)
    lbfgs = torch.optim.LBFGS(model.parameters())
    for message, options in {
        r"no optimizer has 0.weight, 0.bias \(2 of 4 parameters\)": {"optimizer": head},
        r"extra\['rate'\] is a StepLR: .*run.samples_seen": {"extra": {"rate": scheduler}},
        r"extra\['best'\] is a list, which has no state_dict": {"extra": {"best": [1]}},
        "LBFGS calls the model by itself": {"optimizer": lbfgs},
        "no parameters, or all are frozen": {"module": nn.Linear(2, 3).requires_grad_(False)},
    }.items():
        with pytest.raises(UsageError, match=message):
            build(tmp_path, **{"module": model} | options)
    build(tmp_path, model, optimizer=head, extra={"other": stem})


# Weights of other files


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_a_malicious_pickle_is_refused_and_never_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Bomb()}, tmp_path / "zip.pt")
    with pytest.raises(CheckpointError, match="can run code") as caught:
        load_weights(models.build_model("linear"), str(tmp_path / "zip.pt"))
    assert "weights_only=False" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()


def test_weights_go_by_name_and_shape(tmp_path, capsys):
    """A transposed matrix has as many numbers, and is not the same."""
    source, target, path = nn.Linear(3, 4), nn.Linear(4, 3), tmp_path / "weights.pt"
    state = {"module.weight": source.weight.detach(), "module.bias": torch.arange(3.0)}
    torch.save({"state_dict": state}, path)
    before = target.weight.detach().clone()
    load_weights(target, str(path))
    assert target.bias.tolist() == [0, 1, 2]
    assert torch.equal(target.weight, before)
    told = capsys.readouterr().out
    assert "weights loaded 1 tensors" in told
    assert "skipped: weight" in told
    names = r"fits the model .*: it has weight, bias ..., the model 1\.weight, 1\.bias"
    with pytest.raises(CheckpointError, match=names):
        load_weights(models.build_model("linear"), str(path))


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [("", "module."), ("model", ""), ("state_dict", "_orig_mod."), ("net", "module._orig_mod.")],
)
def test_weights_are_found_where_people_keep_them(wrap, prefix, tmp_path):
    source, target = models.build_model("linear"), models.build_model("linear")
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    torch.save({wrap: state, "epoch": 3} if wrap else state, tmp_path / "weights.pt")
    load_weights(target, str(tmp_path / "weights.pt"))
    assert weights_sha256(target) == weights_sha256(source)
