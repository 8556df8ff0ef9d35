"""Checkpoints: nothing saved is lost, nothing damaged or foreign is loaded."""

import errno
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import models
from utils import checkpoint
from utils.checkpoint import Checkpointer
from utils.progress import Progress
from utils.weights import CheckpointError, load_weights, read_tensors, weights_sha256

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
    return Progress(epoch_size=1000, global_batch_size=10, epochs=1)


def resume(checkpointer: Checkpointer, progress: Progress | None = None) -> Progress:
    """Return where a training goes on."""
    progress = progress or start()
    checkpointer.resume(progress)
    return progress


def test_a_round_trip_restores_everything(tmp_path: Path) -> None:
    saver, progress = build(tmp_path, fp16=True), start()
    step(saver, progress)
    progress.train_sums, progress.test_sums = [1.5, 2, 10], [0.5, 9, 10]
    saver.scaler._scale = torch.tensor(1024.0)
    saver.save(progress)

    loader = build(tmp_path, fp16=True)
    loader.scaler.scale(torch.ones(()))  # a scaler makes its scale when it is first used
    loaded = resume(loader)
    assert loaded == progress
    assert weights_sha256(loader.model) == weights_sha256(saver.model)
    ours, theirs = loader.optimizer.state_dict(), saver.optimizer.state_dict()
    assert torch.equal(ours["state"][0]["momentum_buffer"], theirs["state"][0]["momentum_buffer"])
    assert loader.scaler.get_scale() == 1024.0


@pytest.mark.parametrize(
    "part",
    [
        {"scale": float("nan")},
        {"scale": "x"},
        {"scale": None},
        {"scale": 2**70},
        {"growth_factor": "x"},
        {"growth_interval": 1.5},
        {"_growth_tracker": [1]},
        {"_growth_tracker": 2**31},
        {"foreign": 1.0},
    ],
    ids=str,
)
def test_a_loss_scale_that_cannot_be_is_refused(part: dict[str, Any], tmp_path: Path) -> None:
    """With NaN every step would be left out, without a word; the others fail in a step."""
    saver, progress = build(tmp_path, fp16=True), start()
    step(saver, progress)
    saver.save(progress)
    change(tmp_path / "last.pt", scaler=saver.scaler.state_dict() | part)
    with pytest.raises(CheckpointError, match=r"is damaged \(ValueError: the loss scaler"):
        resume(build(tmp_path, fp16=True))
    resume(build(tmp_path))  # without fp16 nobody asks for it


def test_a_folder_among_the_checkpoints_takes_no_place(tmp_path: Path) -> None:
    saver, progress = build(tmp_path, keep=2), start()
    (tmp_path / "step-00009999.pt").mkdir()
    for _ in range(3):
        step(saver, progress)
        saver.save(progress)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["last.pt", "step-00000002.pt", "step-00009999.pt"]


@pytest.mark.parametrize("name", ["last.pt", "last.pt.tmp", "step-00000001.pt"])
def test_a_folder_in_the_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    saver, progress = build(tmp_path), start()
    if name != "last.pt":
        step(saver, progress)
        saver.save(progress)
    (tmp_path / name).mkdir()
    step(saver, progress)
    with pytest.raises(CheckpointError, match=rf"cannot save {tmp_path / name}: Is a directory"):
        saver.save(progress)


def test_the_learning_rate_is_that_of_the_new_world(tmp_path: Path) -> None:
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)
    loader = build(tmp_path)
    loader.optimizer.param_groups[0]["lr"] = 0.7
    loaded = resume(loader, Progress(1000, 40, 1))
    assert loader.optimizer.param_groups[0]["lr"] == 0.7
    assert (loaded.epoch_samples, loaded.global_batch_size) == (10, 40)


def test_no_checkpoint_is_the_start_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(build(tmp_path)) == start()
    assert capsys.readouterr().err == f"warning: no checkpoint in {tmp_path}: starting at step 0\n"
    build(tmp_path).resume(start(), resume=False)
    assert capsys.readouterr().err == ""


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


EVALUATED = {"evaluated_step": 0}
DAMAGE = {
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-500]),
    "empty": lambda p: p.write_bytes(b""),
    "bit flipped": flip_bit,
    "foreign": lambda p: torch.save({"something": torch.zeros(3)}, p),
    "text": lambda p: p.write_text("not a checkpoint"),
    "folder": lambda p: (p.unlink(), p.mkdir()),
    "pipe": lambda p: (p.unlink(), os.mkfifo(p)),
    "nothing but a format": lambda p: torch.save({"format": checkpoint.FORMAT}, p),
    "an old format, no parts": lambda p: torch.save({"format": 1}, p),
    "a newer format": lambda p: change(p, format=checkpoint.FORMAT + 1),
    "model of another kind": lambda p: change(p, model=3),
    "position of a newer version": lambda p: change(p, progress={"epoch": 0, "shard": 1}),
    "position without steps": lambda p: change(p, progress={"epoch": 0}),
    "negative position": lambda p: change(p, progress=start().position() | {"epoch": -7}),
    "sums of another kind": lambda p: change(p, progress=start().position() | {"test_sums": [1]}),
    "evaluated without sums": lambda p: change(p, progress=start().position() | EVALUATED),
    "more correct than there are": lambda p: change(
        p, progress=start().position() | EVALUATED | {"test_sums": [-5.0, 99999.0, 10.0]}
    ),
    "sums that are not finite": lambda p: change(
        p, progress=start().position() | {"train_sums": [float("nan"), 1.0, 10.0]}
    ),
    "samples below 0": lambda p: change(p, progress=start().position() | {"epoch_samples": -1}),
    "steps beyond all": lambda p: change(p, progress=start().position() | {"global_step": 2**70}),
    "a sum that no float can hold": lambda p: change(
        p, progress=start().position() | {"train_sums": [10**400, 1, 2]}
    ),
    "a name that moves the cursor": lambda p: change(
        p, progress=start().position() | {"\x1b[31m\nname": 0}
    ),
    "identity of tensors": lambda p: change(p, identity={"model": torch.ones(3)}),
}


def change(path: Path, **parts: Any) -> None:
    torch.save(torch.load(path, weights_only=True) | parts, path)


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
    assert resume(build(tmp_path)).global_step == 1
    warning = capsys.readouterr().err
    assert warning.removesuffix("\n").isprintable()
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
        read_tensors(path)


def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        resume(build(tmp_path))


def test_another_model_data_set_or_seed_is_refused(tmp_path: Path) -> None:
    build(tmp_path).save(start())
    for key, other in (("model", "mlp"), ("dataset", "synthetic"), ("seed", 7)):
        before = build(tmp_path, identity={**IDENTITY, key: other})
        weights = weights_sha256(before.model)
        with pytest.raises(CheckpointError, match=f"{key} {IDENTITY[key]}.*{other}"):
            resume(before)
        assert weights_sha256(before.model) == weights
    with pytest.raises(CheckpointError, match="does not fit --model"):
        resume(build(tmp_path, models.build_model("mlp")))


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
            load_weights(models.build_model("linear"), str(tmp_path / name))
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
    assert resume(build(tmp_path)).global_step == 1


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
    report = load_weights(target, str(tmp_path / "weights.pt"))
    assert report.loaded == ["bias"]
    assert target.bias.tolist() == [0, 1, 2]
    assert torch.equal(target.weight, before)
    assert "weight has the shape (4, 3), not (3, 4)" in str(report)
    assert "x is not in the model" in str(report)


@pytest.mark.parametrize("wrap", ["bare", "model", "model_state_dict", "state_dict", "net"])
def test_weights_are_found_where_people_keep_them(wrap: str, tmp_path: Path) -> None:
    source, target = models.build_model("mlp"), models.build_model("mlp")
    state = nn.DataParallel(source).state_dict()
    assert all(name.startswith("module.") for name in state)
    torch.save(state if wrap == "bare" else {wrap: state, "epoch": 3}, tmp_path / "weights.pt")
    report = load_weights(target, str(tmp_path / "weights.pt"))
    assert weights_sha256(target) == weights_sha256(source)
    assert not report.problems


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_wrappers_put_before_names_is_stripped(prefix: str, tmp_path: Path) -> None:
    source, target = models.build_model("linear"), models.build_model("linear")
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    assert not load_weights(target, str(tmp_path / "weights.pt")).problems
    assert weights_sha256(target) == weights_sha256(source)


def test_foreign_names_are_shown_beside_our_own(tmp_path: Path) -> None:
    torch.save({"fc1.weight": torch.ones(2), "fc1.bias": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError) as caught:
        load_weights(models.build_model("linear"), str(tmp_path / "weights.pt"))
    for name in ("fc1.weight", "fc1.bias", "1.weight", "1.bias"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    "kind",
    [
        lambda: torch.ones(10, 784).to_sparse(),
        lambda: torch.empty(10, 784, device="meta"),
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.ones(10, 784), 0.1, 0, torch.qint8),
            marks=pytest.mark.filterwarnings("ignore::UserWarning"),
        ),
    ],
    ids=["sparse", "meta", "quantized"],
)
def test_tensors_of_other_kinds_are_named(kind: Callable[[], Any], tmp_path: Path) -> None:
    tensor = kind()
    torch.save({"1.weight": tensor, "1.bias": torch.ones(10)}, tmp_path / "weights.pt")
    report = load_weights(models.build_model("linear"), str(tmp_path / "weights.pt"))
    assert report.loaded == ["1.bias"]
    assert report.problems[0].startswith("1.weight ")


KINDS = ["complex64", "float8_e4m3fn", "float4_e2m1fn_x2", "bits8", "int64", "bool"]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_other_kinds_are_named(kind: str, tmp_path: Path) -> None:
    """Of a complex number PyTorch would take the real part; others it cannot copy."""
    dtype = getattr(torch, kind)
    is_byte = kind.startswith(("bits", "float4"))
    weight = torch.zeros(10, 784).byte().view(dtype) if is_byte else torch.ones(10, 784).to(dtype)
    torch.save({"1.weight": weight, "1.bias": torch.ones(10)}, tmp_path / "weights.pt")
    report = load_weights(models.build_model("linear"), str(tmp_path / "weights.pt"))
    assert report.loaded == ["1.bias"]
    assert report.problems == [f"1.weight is of torch.{kind}, not of torch.float32"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_is_no_plain_one(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
    torch.save({"1.weight": nested, "1.bias": torch.ones(10)}, tmp_path / "weights.pt")
    try:
        report = load_weights(models.build_model("linear"), str(tmp_path / "weights.pt"))
        said = "; ".join(report.problems)
    except CheckpointError as error:  # torch 2.15 loads none with weights_only
        said = str(error)
    assert said == "1.weight is no plain tensor" or "is refused" in said


def test_names_from_a_file_are_shown_printable(tmp_path: Path) -> None:
    path, name = tmp_path / "weights.pt", "\x1b[31mred\nline"
    torch.save({name: torch.ones(1), "1.bias": torch.ones(10)}, path)
    report = load_weights(models.build_model("linear"), str(path))
    assert all(line.isprintable() for line in str(report).splitlines())
    assert r"skipped: \x1b[31mred\nline is not in the model" in str(report)
    torch.save({name: torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"it has \\x1b\[31mred\\nline") as caught:
        load_weights(models.build_model("linear"), str(path))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("content", [[1, 2], {"model": 3}, {"a": "text"}, {}])
def test_what_holds_no_fitting_weights_is_refused(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError):
        load_weights(models.build_model("linear"), str(tmp_path / "weights.pt"))


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
        read_tensors(path)
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


def test_the_format_before_is_read(tmp_path: Path) -> None:
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)
    old = {"epoch_size": 1000, "global_batch_size": 10, "epoch": 0, "samples": 10}
    old |= {"global_step": 1, "train_sums": [1.0, 2.0, 10.0], "test_sums": []}
    change(tmp_path / "last.pt", format=1, progress=old)
    loaded = resume(build(tmp_path))
    assert (loaded.epoch_samples, loaded.global_step, loaded.evaluated_step) == (10, 1, -1)
    assert loaded.train_sums == [1.0, 2.0, 10.0]


class Layers(nn.Module):
    """Two layers of one shape, declared in an order of choice."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(784, 784))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.a(images.flatten(1)) + 2 * self.b(images.flatten(1))


def test_momentum_goes_by_name(tmp_path: Path) -> None:
    saver, progress = build(tmp_path, Layers("a", "b")), start()
    step(saver, progress)
    saver.save(progress)
    loader = build(tmp_path, Layers("b", "a"))
    resume(loader)
    for name, parameter in loader.model.named_parameters():
        theirs = saver.optimizer.state[saver.model.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(loader.optimizer.state[parameter]["momentum_buffer"], theirs), name


def spoil(path: Path, momentum: Any) -> None:
    state = torch.load(path, weights_only=True)
    state["optimizer"]["1.weight"] = {"momentum_buffer": momentum}
    torch.save(state, path)


@pytest.mark.parametrize(
    "momentum", [torch.ones(784, 10), torch.ones(3), torch.ones(10, 784).to_sparse()]
)
def test_momentum_of_another_shape_is_refused(momentum: torch.Tensor, tmp_path: Path) -> None:
    """The fused SGD would write beyond it."""
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)
    spoil(tmp_path / "last.pt", momentum)
    with pytest.raises(CheckpointError, match="is damaged"):
        resume(build(tmp_path))


@pytest.mark.parametrize("momentum", [torch.tensor(1.0), "x", 5])
def test_momentum_of_another_kind_is_refused(momentum: Any, tmp_path: Path) -> None:
    """Of a single number the fused SGD would read and write what lies behind it in memory."""
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)
    spoil(tmp_path / "last.pt", momentum)
    loader = build(tmp_path)
    step(loader, start())  # as build_optimizer does, it has made the momentum
    with pytest.raises(CheckpointError, match="is damaged"):
        resume(loader)


def test_momentum_that_is_missing_stays_what_it_was(tmp_path: Path) -> None:
    """A layer that was frozen, say."""
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)
    spoil(tmp_path / "last.pt", None)
    loader = build(tmp_path)
    step(loader, start())
    before = loader.optimizer.state[loader.model[1].weight]["momentum_buffer"].clone()  # type: ignore[index]
    resume(loader)
    after = loader.optimizer.state[loader.model[1].weight]["momentum_buffer"]  # type: ignore[index]
    assert torch.equal(after, before)


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.pt.tmp").symlink_to(tmp_path / "precious")
    build(tmp_path / "run").save(start())
    assert (tmp_path / "precious").read_text() == "mine"
    assert resume(build(tmp_path / "run")) == start()


def test_an_epoch_ends_when_no_whole_batch_is_left() -> None:
    progress = Progress(epoch_size=25, global_batch_size=10, epochs=1)
    progress.step()
    progress.end_epoch([1.0, 2.0, 10.0], [])
    assert (progress.epoch, progress.epoch_samples, progress.train_sums) == (
        0,
        10,
        [1.0, 2.0, 10.0],
    )
    progress.step()
    progress.end_epoch([1.0, 2.0, 20.0], [])
    assert (progress.epoch, progress.epoch_samples, progress.train_sums) == (1, 0, [])
    assert progress.samples_seen == 25


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("where", ["weights", "momentum", "test_sums"])
def test_nothing_that_is_not_finite_is_saved(where: str, write: bool, tmp_path: Path) -> None:
    """Whatever the sums of the epoch say, which the end of an epoch empties; and on every rank."""
    saver, progress = build(tmp_path, write=write), start()
    step(saver, progress)
    if where == "weights":
        with torch.no_grad():
            saver.model[1].weight[3, 5] = float("nan")  # type: ignore[index]
    if where == "momentum":
        saver.optimizer.state_dict()["state"][0]["momentum_buffer"][2, 2] = float("inf")
    if where == "test_sums":
        progress.test_sums = [float("inf"), 1.0, 10.0]
    with pytest.raises(CheckpointError, match="not finite at step 1"):
        saver.save(progress)
    assert list(tmp_path.iterdir()) == []


def test_what_diverged_is_not_saved(tmp_path: Path) -> None:
    saver, progress = build(tmp_path), start()
    step(saver, progress)
    saver.save(progress)
    step(saver, progress)
    progress.train_sums = [float("nan"), 3.0, 20.0]
    with pytest.raises(CheckpointError, match="not finite at step 2"):
        saver.save(progress)
    assert resume(build(tmp_path)).global_step == 1
