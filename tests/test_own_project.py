"""Networks and tasks of another kind, through the scripts from start to end.

The README's own edits run in tests/test_commands.py; these are what others may bring.
"""

import sys

import pytest

from tests.layouts import state
from tests.processes import (
    ROOT,
    copy_project,
    error_line,
    error_lines,
    run,
    script,
    succeed,
    summary,
    torchrun,
)
from utils import callables
from utils.errors import UsageError

COMPARE = ROOT / "scripts/tools/compare.py"


NETWORK = """from torch import nn


class MyNetwork(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 3))


def sized(classes):
    return MyNetwork()
"""
NETWORKS = """import os

from torch import nn

import models

RANK = os.environ.get("RANK")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.branch, self.head = nn.Linear(784, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.steps = 0

    def forward(self, images):
        self.steps += self.training
        return self.head(self.change(self.stem(images.flatten(1)).relu()))

    def change(self, x):
        return x + self.branch(x)


class Uneven(Network):
    def change(self, x):
        return x if self.steps > 2 and RANK != "0" else super().change(x)


class Overflow(Network):
    def change(self, x):
        if (self.steps, RANK) == (3, "1"):
            x.register_hook(lambda grad: grad + float("inf"))
        return super().change(x)


class Regression(Network):
    def __init__(self):
        super().__init__()
        models.loss_and_counts = squared_error


def squared_error(outputs, targets, label_smoothing=0.0):
    error = outputs[:, 0] - targets
    return error.square().mean(), {"count": len(targets), "error": error.detach().abs()}
"""
DATA = """import torch
from torch.utils.data import Subset, TensorDataset


def load(data_dir):
    import my_labels  # found although the project lies in another folder

    labels = my_labels.make()
    images = torch.zeros(600, 3, 8, 8, dtype=torch.uint8)
    images[torch.arange(600), labels] = 200  # the colour is the class
    whole = TensorDataset(images, labels)
    whole.mean, whole.std = (0.26, 0.26, 0.26), torch.tensor([0.37, 0.37, 0.37])
    return Subset(whole, range(480)), Subset(whole, range(480, 600))
"""
FILES = {
    "my_network.py": NETWORK,
    "my_networks.py": NETWORKS,
    "my_data.py": DATA,
    "my_labels.py": "import torch\n\n\ndef make():\n    return torch.arange(600) % 3\n",
    "my_broken.py": "import torch\n\nimport my_typo\n",
    "my_typo.py": "size = 3\nweights = torch.zeros(size)\n",
}
OWN = ["--model", "my_network:MyNetwork", "--dataset", "my_data:load"]


@pytest.fixture
def own_folder(tmp_path):
    """A folder with files of a user, beside no file of this project."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_model_and_data_in_files_of_ones_own(own_folder):
    """The checkpoint has their names. Nothing of it is imported because the checkpoint says so."""
    words = script("train_single.py")
    words = [*words, *OWN, "--run-dir", "here", "--batch-size", 24, "--num-workers", 1]
    ended = succeed(run(*words, "--epochs", 2, cwd=own_folder))
    assert summary(own_folder / "here")["test_accuracy"] == 1, ended.stdout
    identity = state(own_folder / "here")["identity"]
    assert (identity["model"], identity["dataset"]) == (OWN[1], OWN[3])
    succeed(run(*words, "--epochs", 3, "--resume", cwd=own_folder))
    told = run(*words, "--resume", "--model", "linear", cwd=own_folder).stderr
    assert "cannot take the images of --dataset, [3, 8, 8]" in told
    (own_folder / "my_network.py").write_text("raise ArithmeticError('imported')\n")
    (own_folder / "my_other.py").write_text(NETWORK)
    told = run(*words, "--resume", "--model", "my_other:MyNetwork", cwd=own_folder).stderr
    assert "model my_network:MyNetwork, this command says my_other:MyNetwork" in told
    assert "imported" not in told


def train(own_folder, data_dir, network, *flags, name="train_ddp.py"):
    """Train a network of my_networks.py on the drawn digits."""
    words = ["--model", f"my_networks:{network}", "--dataset", "synthetic", "--data-dir", data_dir]
    words += ["--max-steps", 5, "--run-dir", network.lower(), *flags]
    command = torchrun(2, name, *words) if "ddp" in name else script(name, *words)
    return run(*command, cwd=own_folder)


def test_a_regression_has_no_accuracy(own_folder, short_dir):
    ended = train(own_folder, short_dir, "Regression", "--lr", 0.001, name="train_single.py")
    assert "accuracy" not in succeed(ended).stdout
    facts = summary(own_folder / "regression")
    assert facts["test_accuracy"] is None
    assert 0 < facts["test_error"] ** 2 < facts["test_loss"]
    succeed(run(sys.executable, COMPARE, own_folder / "regression"))


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(own_folder, short_dir):
    """Weights that are not finite would end the run; the scale is halved once, from 65,536."""
    succeed(train(own_folder, short_dir, "Overflow", "--amp", "fp16"))
    assert state(own_folder / "overflow")["scaler"]["scale"] == 2**15


def test_a_graph_that_differs_between_ranks_is_told_what_helps(own_folder, short_dir):
    """gloo aborts the other rank with a stack."""
    ended = train(own_folder, short_dir, "Uneven")
    assert ended.returncode == 1
    lines = error_lines(ended)
    assert any("did not receive grad for rank " in line for line in lines), ended.stderr
    assert not any(line.count("--find-unused-parameters") > 1 for line in lines), "told twice"
    assert sum("rank 0 lost rank 1" in line for line in lines) == 1, ended.stderr
    flags = ["--find-unused-parameters", "--run-dir", "helped"]
    succeed(train(own_folder, short_dir, "Uneven", *flags))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("my_netwrok:MyNetwork", [], "there is no module my_netwrok in .*misspelt"),
        ("my_network:MyNet", [], "has no MyNet to call, but MyNetwork, sized"),
        ("my_network:sized", [], "is called with no arguments: missing a required argument"),
        ("my_broken:build", [], r"my_typo\.py, line 2: NameError: name 'torch'"),
    ],
)
def test_a_wrong_name_is_one_line_that_says_what_there_is(
    name, arguments, words, own_folder, monkeypatch
):
    monkeypatch.chdir(own_folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UsageError, match=words) as caught:
        callables.call("--model", name, *arguments)
    assert "\n" not in str(caught.value)
    for own in (name, "my_typo"):
        sys.modules.pop(own.partition(":")[0], None)


def test_a_callable_that_makes_no_network_is_one_line(own_folder):
    ended = run(*script("train_single.py", *OWN, "--model", "my_labels:make"), cwd=own_folder)
    assert "gave Tensor, not an nn.Module" in error_line(ended)
    assert not (own_folder / "runs").exists()


def test_a_copy_of_a_script_runs_under_another_name(short_dir, tmp_path):
    folder = copy_project(tmp_path / "clone")
    (folder / "train_birds.py").write_text((ROOT / "train_single.py").read_text())
    words = ["train_birds.py", "--dataset", "synthetic", "--data-dir", short_dir]
    words += ["--model", "linear", "--max-steps", 3, "--threads", 1, "--run-dir", "here"]
    succeed(run(sys.executable, *words, cwd=folder))
    found = summary(folder / "here")
    assert (found["script"], found["technique"]) == ("train_birds.py", "single")
