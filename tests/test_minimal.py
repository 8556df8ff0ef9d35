"""scripts/minimal: the files that people copy."""

import itertools
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset
from torchvision.datasets import MNIST

from tests.processes import ROOT, succeed, torchrun
from tests.test_scripts import changes, code_lines

FOLDER = ROOT / "scripts" / "minimal"
EPOCH = re.compile(r"epoch (\d+): lr (\S+), (\S+)% correct\n")


def text_of(name):
    return (FOLDER / f"{name}.py").read_text()


@pytest.mark.parametrize("name", ["single", "dp", "ddp", "ddp_resume", "fsdp"])
def test_a_copied_file_needs_pytorch_alone(name):
    imported = re.findall(r"^(?:from|import) (\w+)", text_of(name), re.M)
    assert {*imported} - sys.stdlib_module_names == {"torch", "torchvision"}


@pytest.mark.parametrize(
    ("old", "new", "most_removed", "most_added", "word"),
    [
        ("single", "dp", 3, 4, "DP"),
        ("single", "ddp", 7, 25, "DDP"),
        ("ddp", "ddp_resume", 5, 44, "RESUME|STOP"),
        ("ddp", "fsdp", 5, 18, "FSDP"),
    ],
)
def test_a_diff_is_small_and_each_hunk_has_its_reason(old, new, most_removed, most_added, word):
    hunks = [*changes(code_lines(text_of(old)), code_lines(text_of(new)))]
    assert sum(len(removed) for removed, _ in hunks) <= most_removed
    assert sum(len(added) for _, added in hunks) <= most_added
    bodies = [text_of(name).partition("\ndef main")[2].splitlines() for name in (old, new)]
    for _, added in changes(*bodies):
        hunk = "\n".join(added)
        assert not code_lines(hunk) or re.search(rf"# ({word}): ", hunk), hunk


# Training on drawn digits


def check_result(output, path, data_dir, lr):
    """Two epochs had this rate, and the accuracy in the last line is that of the saved model."""
    first, second = EPOCH.findall(output)
    assert first[:2] == ("1", lr)
    assert second[:2] == ("2", lr)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10)),
    ).eval()
    model.load_state_dict(torch.load(path / "model.pt", map_location="cpu", weights_only=True))
    test_set = MNIST(data_dir, train=False)
    with torch.no_grad():
        predicted = model(test_set.data[:, None] / 255).argmax(1)
    correct = int((predicted == test_set.targets).sum())
    assert f"{second[2]}%" == f"{correct / len(test_set):.2%}"
    assert float(second[2]) > 80


@pytest.mark.parametrize(
    ("name", "ranks", "lr"),
    [
        pytest.param("single", 1, "0.015", marks=pytest.mark.slow),
        pytest.param("dp", 1, "0.015", marks=pytest.mark.slow),
        ("ddp", 3, "0.045"),
        pytest.param("fsdp", 3, "0.045", marks=pytest.mark.slow),
    ],
)
def test_a_file_trains_and_evaluates_the_saved_model_exactly(
    name, ranks, lr, run_ranks, digits_dir, tmp_path
):
    """500 images do not divide by 3. One rank prints, and the rate follows the number of ranks."""
    flags = ["--data-dir", digits_dir, "--epochs", 2, "--batch-size", 32]
    statuses, output = run_ranks(FOLDER / f"{name}.py", ranks, *flags, cwd=tmp_path)
    assert statuses == [0] * ranks
    check_result(output, tmp_path, digits_dir, lr)


@pytest.mark.slow
def test_the_first_epoch_reaches_98_percent(mnist_dir, tmp_path):
    command = torchrun(2, FOLDER / "ddp.py", "--data-dir", mnist_dir)
    [(_, _, accuracy)] = EPOCH.findall(succeed(*command, cwd=tmp_path).stdout)
    assert float(accuracy) >= 98


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["dp", "ddp", "fsdp"])
def test_two_gpus_train(name, digits_dir, tmp_path):
    words = [FOLDER / f"{name}.py", "--data-dir", digits_dir, "--epochs", 2]
    words = [sys.executable, *words] if name == "dp" else torchrun(2, *words)
    check_result(succeed(*words, cwd=tmp_path).stdout, tmp_path, digits_dir, lr="0.06")


@pytest.mark.parametrize("name", ["ddp", "ddp_resume", "fsdp"])
def test_a_start_without_torchrun_says_how_to_start(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match=rf"^start it with: torchrun .*{name}\.py$"):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


# A run of ddp_resume.py that is interrupted


class Watched(Dataset):
    """Instead of MNIST: files beside the script tell who reads what."""

    def __init__(self, root, train=True, transform=None, download=False):
        self.train = train

    def __len__(self):
        return 960 if self.train else 50

    def __getitem__(self, index):
        if self.train:
            with open(f"read_by_{os.environ['RANK']}", "a") as file:
                print(index, file=file)
        return torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(index)), index % 10


@pytest.fixture
def resume(run_ranks, tmp_path):
    """Return a function that starts ddp_resume.py with this data set, as ``run_ranks`` does.

    The script saves every four steps, in the folder ``tmp_path / name``. ``changes`` are made in
    its text.
    """

    def run(name, ranks, *flags, changes=(), prepare=int):
        script = tmp_path / name / "ddp_resume.py"
        script.parent.mkdir(exist_ok=True)
        text = text_of("ddp_resume")
        for old, new in [("step % 100 ==", "step % 4 =="), *changes]:
            assert text.count(old) == 1
            text = text.replace(old, new)
        script.write_text(text)

        def watch():
            torchvision.datasets.MNIST = Watched
            prepare()

        return run_ranks(script, ranks, *flags, cwd=script.parent, prepare=watch)

    return run


def stop_rank_1_in_step_5():
    steps = itertools.count(1)

    def hook(*_):
        if next(steps) == 5 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(hook)


def test_every_parameter_group_gets_the_rate(resume, tmp_path):
    groups = ("SGD(model.parameters()", "SGD([{'params': [p]} for p in model.parameters()]")
    resume("run", 2, "--batch-size", 96, changes=[groups])
    saved = torch.load(tmp_path / "run" / "checkpoint.pt")["optimizer"]["param_groups"]
    assert len(saved) > 1
    assert [group["lr"] for group in saved] == pytest.approx([0.09 / 5] * len(saved))


def kill_rank_0_while_it_saves():
    save = torch.save

    def save_half(state, file, **options):
        if file != "checkpoint.pt.tmp":
            save(state, file, **options)  # pickle calls it for each tensor of a broadcast
        else:
            Path(file).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_half


def test_a_run_that_is_stopped_and_killed_ends_in_the_weights_of_one_that_is_not(resume, tmp_path):
    """Then it goes on with more epochs, and with another number of ranks."""
    flags = ["--batch-size", 24]
    resume("calm", 2, *flags)
    statuses, output = resume("run", 2, *flags, prepare=stop_rank_1_in_step_5)
    assert statuses == [0, 0]
    assert "stopped after 240 images of epoch 1" in output
    assert not (tmp_path / "run" / "model.pt").exists()
    statuses, _ = resume("run", 2, *flags, prepare=kill_rank_0_while_it_saves)
    assert statuses[0] == -signal.SIGKILL
    _, output = resume("run", 2, *flags)
    assert "resume after 0 of 1 epochs, and 240 images\n" in output
    for name in ("model.pt", "checkpoint.pt"):
        states = [torch.load(tmp_path / folder / name) for folder in ("calm", "run")]
        torch.testing.assert_close(*states, rtol=0, atol=0)

    before = [path.read_text().split() for path in sorted(tmp_path.glob("calm/read_by_*"))]
    for path in tmp_path.glob("run/read_by_*"):
        path.unlink()
    statuses, output = resume("run", 3, "--batch-size", 8, "--epochs", 2)
    assert statuses == [0, 0, 0]
    assert "resume after 1 of 2 epochs, and 0 images\n" in output
    [(epoch, rate, _)] = EPOCH.findall(output)
    # The rate of a batch of 24 images, in the last step of 1,920 images.
    assert (epoch, float(rate)) == ("2", pytest.approx(0.01125 * 24 / 1920))
    reads = [path.read_text().split() for path in sorted(tmp_path.glob("run/read_by_*"))]
    assert sorted([*before[0], *before[1]]) == sorted(itertools.chain(*reads)), "all images, once"
    assert reads[0][0] != before[0][0], "each epoch has its own order"
