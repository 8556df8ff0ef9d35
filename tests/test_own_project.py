"""Networks and tasks of another kind, through the scripts from start to end.

The README's own edits run in tests/test_commands.py; these are what others may bring.
"""

import shutil
import sys

import pytest
import torch

from tests.layouts import state
from tests.processes import (
    ROOT,
    Training,
    copy_project,
    error_line,
    run,
    script,
    succeed,
    summary,
    torchrun,
)
from utils import callables
from utils.errors import UsageError

COMPARE = ROOT / "scripts/tools/compare.py"


def train(technique, own, folder, *extra):
    """Train a task of tests/altered.py on two devices, at a global batch of 24."""
    common = ["--model", "mine", "--dataset", "mine"]
    common += ["--batch-size", 24 if technique == "single" else 12, "--no-tensorboard"]
    return Training(folder, folder).run(technique, *common, *extra, ALTER=own)


def test_a_regression_has_no_accuracy(tmp_path):
    flags = ["--max-steps", 5, "--lr", 0.001]
    assert "accuracy" not in succeed(train("single", "regression", tmp_path / "run", *flags)).stdout
    facts = summary(tmp_path / "run")
    assert facts["test_accuracy"] is None
    assert 0 < facts["test_error"] ** 2 < facts["test_loss"]
    succeed(run(sys.executable, COMPARE, tmp_path / "run"))


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(tmp_path):
    """Weights that are not finite would end the run; the scale is halved once, from 65,536."""
    succeed(train("ddp", "overflow", tmp_path / "run", "--amp", "fp16", "--max-steps", 5))
    assert state(tmp_path / "run")["scaler"]["scale"] == 2**15


def test_all_state_is_restored_exactly(tmp_path):
    """Two groups of AdamW, an average of the weights, and a buffer that training changes."""
    calm, resumed = tmp_path / "calm", tmp_path / "resumed"
    flags = ["--max-steps", 8, "--save-every-steps", 5, "--amp", "fp16"]
    succeed(train("ddp", "state", calm, *flags))
    shutil.copytree(calm, resumed)
    (resumed / "checkpoints" / "previous.pt").replace(resumed / "checkpoints" / "last.pt")
    told = succeed(train("ddp", "state", resumed, *flags, "--resume")).stdout
    assert "all ranks have rank 0's queue" in told
    assert summary(resumed)["resumed_from"] == 5
    before, after = state(calm), state(resumed)
    assert before["identity"] == after["identity"]
    assert (before.pop("identity")["optimizer"], [*before["extra"]]) == ("AdamW", ["ema"])
    del after["identity"]
    torch.testing.assert_close(before, after, rtol=0, atol=0, equal_nan=True)


def test_a_graph_that_differs_between_ranks_is_told_what_helps(tmp_path):
    """gloo aborts the other rank with a stack."""
    ended = train("ddp", "uneven", tmp_path / "run", "--max-steps", 5)
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if ".py: error: " in line]
    assert any("did not receive grad for rank " in line for line in lines), ended.stderr
    assert not any(line.count("--find-unused-parameters") > 1 for line in lines), "told twice"
    assert sum("rank 0 lost rank 1" in line for line in lines) == 1, ended.stderr
    flags = ["--max-steps", 5, "--find-unused-parameters"]
    succeed(train("ddp", "uneven", tmp_path / "helped", *flags))


NETWORK = """from torch import nn


class MyNetwork(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 3))


def sized(classes):
    return MyNetwork()
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


def test_ranks_with_another_source_of_ones_own_model_are_found(own_folder):
    """As on two machines of which one has an older file, here by the rank."""
    (own_folder / "my_network0.py").write_text(NETWORK)
    (own_folder / "my_network1.py").write_text(NETWORK.replace("192, 3)", "8 * 24, 3)"))
    chosen = (
        "import importlib, os\nbuild = importlib.import_module('my_network' + os.environ['RANK'])"
    )
    (own_folder / "my_network.py").write_text(f"{chosen}.MyNetwork\n")
    words = torchrun(2, "train_ddp.py", *OWN, "--model", "my_network:build")
    told = run(*words, cwd=own_folder).stderr
    assert "rank 1 has the class MyNetwork with the hash: " in told


def test_a_copy_of_a_script_runs_under_another_name(short_dir, tmp_path):
    folder = copy_project(tmp_path / "clone")
    (folder / "train_birds.py").write_text((ROOT / "train_single.py").read_text())
    words = ["train_birds.py", "--dataset", "synthetic", "--data-dir", short_dir]
    words += ["--model", "linear", "--max-steps", 3, "--threads", 1, "--run-dir", "here"]
    succeed(run(sys.executable, *words, cwd=folder))
    found = summary(folder / "here")
    assert (found["script"], found["technique"]) == ("train_birds.py", "single")
