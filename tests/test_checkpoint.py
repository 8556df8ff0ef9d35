"""Checkpoints: nothing saved is lost, and nothing damaged or foreign is loaded."""

import os
import resource
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import models
from tests.helpers import ended, fork
from utils import checkpoint
from utils.checkpoint import Position, weights_sha256
from utils.errors import UserError

IDENTITY = {"model": "linear", "dataset": "mnist", "seed": 0}
ARGS = SimpleNamespace(**IDENTITY, epochs=9, max_steps=99)


def with_flags(**changed):
    return SimpleNamespace(**vars(ARGS) | changed)


def parts_of(model, fp16=False, **more):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=fp16)
    return {"model": model, "optimizer": optimizer, "scaler": scaler} | more


class Run:
    """A run in a folder, which has saved after each of two steps."""

    def __init__(self, folder, model=None):
        self.folder = folder
        self.parts = parts_of(model or models.build("linear"))
        self.position = Position(epoch=3)
        self.last = folder / "checkpoints" / "last.pt"
        self.previous = self.last.with_name("previous.pt")
        self.step_and_save()
        self.step_and_save()

    def step_and_save(self):
        self.position.step += 1
        self.position.seen += 96
        step(self.parts, self.position.step)
        checkpoint.save(self.folder, ARGS, self.parts, self.position)

    def read(self):
        return checkpoint.read(self.folder, ARGS)

    def content(self):
        return {path.name: path.read_bytes() for path in self.last.parent.iterdir()}


def step(parts, number):
    """Take an optimizer step, so that weights and momentum change."""
    generator = torch.Generator().manual_seed(number)
    for parameter in parts["model"].parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    parts["optimizer"].step()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_a_round_trip_restores_every_part(run):
    checkpoint.restore(run.read(), parts_of(models.build("linear"), fp16=True))  # it began without
    run.parts["ema"] = nn.Linear(2, 3)
    run.parts["scaler"] = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.parts["scaler"].scale(torch.ones(()))  # a scaler makes its scale when it is first used
    run.step_and_save()
    other = parts_of(models.build("linear"), fp16=True, ema=nn.Linear(2, 3))
    assert checkpoint.restore(run.read(), other) == Position(epoch=3, seen=3 * 96, step=3)
    assert weights_sha256(other["model"]) == weights_sha256(run.parts["model"])
    assert torch.equal(other["ema"].weight, run.parts["ema"].weight)
    ours, theirs = (x["optimizer"].state_dict()["state"] for x in (other, run.parts))
    assert torch.equal(ours[0]["momentum_buffer"], theirs[0]["momentum_buffer"])
    assert other["scaler"].state_dict()["scale"] == 1024


@pytest.mark.parametrize("renamed", [0, 1])
def test_a_run_killed_while_it_saves_goes_on_from_the_save_before(renamed, run):
    """Before a file is renamed, or when last.pt has become previous.pt."""

    def save():
        replace = os.replace
        done = []

        def replace_or_die(*paths):
            if len(done) == renamed:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(replace(*paths))

        os.replace = replace_or_die
        run.step_and_save()

    assert ended(fork(save)) == [-signal.SIGKILL]
    assert run.read()["position"]["step"] == 2
    run.step_and_save()
    assert run.read()["position"]["step"] == 3
    assert sorted(run.content()) == ["last.pt", "previous.pt"]


def test_a_full_disk_leaves_both_checkpoints(run):
    """A limit of the file size is an error in the middle of a write."""

    def save():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9999, 9999))
        with pytest.raises(UserError, match=r"last\.pt cannot be written \(.*File too large"):
            run.step_and_save()

    before = run.content()
    assert ended(fork(save)) == [0]
    assert run.content() == before


def test_after_damage_the_checkpoint_before_is_used_with_a_warning(run, capsys):
    """One flipped bit, which torch.load would read, and then a file that is cut off."""
    content = bytearray(run.last.read_bytes())
    weights = run.parts["model"][1].weight.detach().numpy().tobytes()
    content[content.index(weights) + 1000] ^= 1
    run.last.write_bytes(content)
    before = run.content()
    assert run.read()["position"]["step"] == 1
    [warning] = capsys.readouterr().err.splitlines()
    assert f"{run.last} cannot be loaded" in warning
    assert run.content() == before
    run.previous.write_bytes(run.previous.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        run.read()


def test_a_run_with_another_model_data_set_or_seed_or_a_shorter_one_is_refused(run):
    for name, was in IDENTITY.items():
        with pytest.raises(UserError, match=f"trained with --{name} {was}, this command says 7"):
            checkpoint.read(run.folder, with_flags(**{name: "7"}))
    for limit in ({"epochs": 3}, {"max_steps": 1}):
        with pytest.raises(UserError, match=r"is longer than --epochs \d and --max-steps allow"):
            checkpoint.read(run.folder, with_flags(**limit))
    same = with_flags(epochs=4, max_steps=2)
    assert checkpoint.read(run.folder, same) is not None, "its evaluation may be owed"


def test_what_is_not_finite_is_not_saved_unless_it_is_a_buffer(run):
    """Such as a causal mask."""
    model = run.parts["model"]
    model.register_buffer("mask", torch.tensor(float("-inf")))
    run.step_and_save()
    before = run.content()
    run.parts["optimizer"].state[model[1].weight]["momentum_buffer"][3] = float("nan")
    with pytest.raises(UserError, match="not finite at step 4, which is not saved: choose a lower"):
        run.step_and_save()
    assert run.content() == before


def test_what_could_run_code_is_refused_when_it_is_saved_or_read(run):
    before = run.content()
    run.parts["own"] = SimpleNamespace(state_dict=lambda: ARGS)
    with pytest.raises(UserError, match="cannot be loaded as tensors and plain values"):
        run.step_and_save()
    assert run.content() == before
    torch.save({"own": ARGS}, run.last)
    assert run.read()["position"]["step"] == 1, "that of previous.pt"


def test_a_part_that_is_missing_or_does_not_fit_is_named(run):
    state = run.read()
    with pytest.raises(UserError, match="the checkpoint holds no scheduler"):
        checkpoint.restore(state, run.parts | {"scheduler": run.parts["optimizer"]})
    with pytest.raises(UserError, match="does not fit the model: size mismatch for 1"):
        checkpoint.restore(state, parts_of(nn.Sequential(nn.Flatten(), nn.Linear(784, 11))))


def test_momentum_in_another_memory_order_is_copied(tmp_path):
    """The next step is that of a run in which nothing had to be copied."""
    plain = Run(tmp_path, nn.Conv2d(3, 8, 3))
    other = parts_of(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last))
    checkpoint.restore(plain.read(), other)
    for parts in (plain.parts, other):
        step(parts, 3)
    assert torch.equal(other["model"].weight, plain.parts["model"].weight)


# Weights of other files


@pytest.mark.parametrize(("key", "prefix"), [("", "module."), ("model", "module._orig_mod.")])
def test_initial_weights_are_chosen_by_name_and_shape(key, prefix, tmp_path, capsys):
    """Of a state dict or a checkpoint. A transposed matrix has as many numbers."""
    target = nn.Linear(4, 3)
    path = str(tmp_path / "weights.pt")
    weight = target.weight.detach().clone()
    given = {"weight": torch.ones(4, 3), "bias": torch.arange(3.0), "head.bias": torch.ones(2)}
    state = {prefix + name: tensor for name, tensor in given.items()}
    torch.save({key: state, "epoch": 3} if key else state, path)
    checkpoint.load_weights(target, path)
    assert target.bias.tolist() == [0, 1, 2]
    assert torch.equal(target.weight, weight)
    assert capsys.readouterr().out.endswith("skipped: head.bias, weight\n")


def test_a_file_without_weights_for_this_model_is_an_error(tmp_path):
    path = tmp_path / "weights.pt"
    with pytest.raises(UserError, match="No such file"):
        models.build("linear", str(path))
    path.write_text("<html>404</html>")
    with pytest.raises(UserError, match="not a zip file"):
        models.build("linear", str(path))
    torch.save({"bias": torch.ones(2)}, path)
    with pytest.raises(UserError, match=r"fits the model .* the file has \['bias'\]"):
        models.build("linear", str(path))
