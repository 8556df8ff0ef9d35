"""Networks and tasks of another kind, through the scripts from start to end.

The README's own edits run in tests/test_commands.py; these are what others may bring.
"""

import re
import sys

import pytest
import torch

from tests.layouts import state
from tests.processes import (
    ROOT,
    STANDALONE,
    Training,
    copy_project,
    error_line,
    metrics,
    run,
    script,
    succeed,
    summary,
    torchrun,
)

COMPARE = ROOT / "scripts/tools/compare.py"
TECHNIQUES = ("single", "dp", "ddp")


def train(technique, own, folder, *extra):
    """Train a task of tests/altered.py on two devices, at a global batch of 24."""
    common = ["--model", "mine", "--dataset", "mine"]
    common += ["--batch-size", 24 if technique == "single" else 12]
    return Training(folder, folder).run(technique, *common, *extra, ALTER=own)


@pytest.mark.slow
def test_a_regression_has_the_same_losses_in_all_three_and_no_accuracy(tmp_path):
    found = []
    for technique in TECHNIQUES:
        flags = ["--epochs", 3, "--lr", 0.01, "--max-grad-norm", 0, "--no-augment"]
        told = succeed(train(technique, "regression", tmp_path / technique, *flags)).stdout
        assert "accuracy" not in told
        found.append(summary(tmp_path / technique))
    assert {facts["test_accuracy"] for facts in found} == {None}
    assert found[0]["test_loss"] < 0.03, "a constant has 0.08"
    for name in ("test_loss", "test_error"):
        assert [facts[name] for facts in found] == pytest.approx([found[0][name]] * 3, rel=1e-3)
    told = succeed(run(sys.executable, COMPARE, *(tmp_path / name for name in TECHNIQUES))).stdout
    assert "dp" in told


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(tmp_path):
    """Weights that are not finite would end the run; the scale is halved once, from 65,536."""
    succeed(train("ddp", "overflow", tmp_path / "run", "--amp", "fp16", "--max-steps", 5))
    assert state(tmp_path / "run")["scaler"]["scale"] == 2**15


@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_all_state_is_restored_exactly(technique, tmp_path):
    """Two groups of AdamW, an average of the weights, and a buffer that training changes."""
    parts = []
    for name, steps in (("calm", [8]), ("disturbed", [5, 8])):
        for count in steps:
            flags = ["--max-steps", count, "--amp", "fp16", *["--resume"] * (count != steps[0])]
            ended = succeed(train(technique, "state", tmp_path / name, *flags))
        parts.append(state(tmp_path / name))
        assert parts[-1].pop("identity")["optimizer"] == "AdamW"
    assert ("all ranks have rank 0's queue" in ended.stdout) == (technique == "ddp")
    assert [*parts[0]["extra"]] == ["ema"]
    torch.testing.assert_close(*parts, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("own", ["depth", "uneven"])
def test_a_graph_that_changes_is_told_what_helps(own, tmp_path):
    """From step to step, or between ranks, where gloo aborts the other rank with a stack."""
    ended = train("ddp", own, tmp_path / "run", "--max-steps", 9)
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if ".py: error: " in line]
    advice = ("did not receive grad for rank ", "another branch")
    assert any(text in line for line in lines for text in advice), ended.stderr
    assert not any(line.count("--find-unused-parameters") > 1 for line in lines), "told twice"
    assert own == "depth" or sum("rank 0 lost rank 1" in line for line in lines) == 1, ended.stderr
    more = ["--max-steps", 9, "--find-unused-parameters"]
    succeed(train("ddp", own, tmp_path / "helped", *more))


NETWORK = """from torch import nn


class MyNetwork(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 3))


def sized(classes):
    return MyNetwork()


NUMBER = 3
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
    "my_syntax.py": "def build(:\n",
}
OWN = ["--model", "my_network:MyNetwork", "--dataset", "my_data:load"]


@pytest.fixture
def own_folder(tmp_path):
    """A folder with files of a user, beside no file of this project."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(script("train_single.py"), marks=pytest.mark.slow, id="single"),
        pytest.param(script("train_dp.py"), marks=pytest.mark.slow, id="dp"),
        pytest.param(torchrun(2, "train_ddp.py"), id="ddp"),
    ],
)
def test_a_model_and_data_in_files_of_ones_own(words, own_folder):
    """The checkpoint has their names. Nothing of it is imported because the checkpoint says so."""
    words = [*words, *OWN, "--run-dir", "here", "--batch-size", 24, "--num-workers", 1]
    ended = succeed(run(*words, "--epochs", 2, cwd=own_folder))
    assert summary(own_folder / "here")["test_accuracy"] == 1, ended.stdout
    assert state(own_folder / "here")["identity"]["model"] == "my_network:MyNetwork"
    assert state(own_folder / "here")["identity"]["dataset"] == "my_data:load"
    succeed(run(*words, "--epochs", 3, "--resume", cwd=own_folder))
    other = [*words, "--resume", "--model", "linear"]
    told = run(*other, cwd=own_folder).stderr
    assert "cannot take the images of --dataset, [3, 8, 8]" in told
    (own_folder / "my_network.py").write_text("raise ArithmeticError('imported')\n")
    (own_folder / "my_other.py").write_text(NETWORK)
    other[-1] = "my_other:MyNetwork"
    told = run(*other, cwd=own_folder).stderr
    assert "model my_network:MyNetwork, this command says my_other:MyNetwork" in told
    assert "imported" not in told


WRONG = [
    ("--model my_netwrok:MyNetwork", "there is no module my_netwrok in .*misspelt"),
    ("--model my_network:MyNet", "has no MyNet to call, but MyNetwork, sized"),
    ("--model my_network:NUMBER", "has no NUMBER to call, but MyNetwork, sized"),
    (
        "--model my_network:sized",
        "is called with no arguments: missing a required argument",
    ),
    ("--model my_labels:make", "gave Tensor, not an nn.Module"),
    ("--model my_broken:build", r"my_typo\.py, line 2: NameError: name 'torch'"),
    ("--model my_syntax:build", r"my_syntax\.py, line 1: SyntaxError"),
    ("--dataset my_network:MyNetwork", "is called with 'data': too many"),
    ("--dataset my_labels:load", "has no load to call, but make"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG)
def test_a_wrong_name_is_one_line_that_says_what_there_is(flags, words, own_folder):
    ended = run(*script("train_single.py", *OWN, *flags.split()), cwd=own_folder)
    assert re.search(words, error_line(ended)), ended.stderr
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


@pytest.mark.parametrize(
    "where", ["in the project", pytest.param("elsewhere", marks=pytest.mark.slow)]
)
def test_a_copy_of_a_script_runs_under_another_name(where, short_dir, own_folder, tmp_path):
    folder = copy_project(tmp_path / "clone") if where == "in the project" else own_folder
    (folder / "train_birds.py").write_text((ROOT / "train_ddp.py").read_text())
    words = ["--dataset", "synthetic", "--data-dir", short_dir, "--model", "linear"]
    words += ["--max-steps", 3, "--threads", 1, "--no-progress", "--run-dir", "here"]
    words = [*STANDALONE, 2, "train_birds.py", *words]
    path = {} if where == "in the project" else {"PYTHONPATH": str(ROOT)}
    succeed(run(*words, cwd=folder, **path))
    found = summary(folder / "here")
    assert (found["script"], found["technique"]) == ("train_birds.py", "ddp")
    again = succeed(run(*words, "--resume", cwd=folder, **path))
    assert "nothing to resume" in again.stdout


def test_a_validation_beside_the_test_has_its_own_name_everywhere(short_dir, tmp_path):
    """A set of 500 to test, of which the first 100 validate."""
    text, line = (ROOT / "train_single.py").read_text(), "run.end_epoch(test)"
    few = "DataLoader(torch.utils.data.Subset(test_set, range(100)), 50, **options)"
    more = f"run.end_epoch(test, val=evaluate(raw_model, {few}, transform, autocast))"
    assert text.count(line) == 1
    (tmp_path / "train_mine.py").write_text(text.replace(line, more))
    words = [
        "train_mine.py",
        "--dataset",
        "synthetic",
        "--data-dir",
        short_dir,
        "--model",
        "linear",
    ]
    words += ["--threads", 1, "--no-progress", "--run-dir", "here"]
    words = [sys.executable, *words, "--epochs", 2]
    told = succeed(run(*words, cwd=tmp_path, PYTHONPATH=str(ROOT))).stdout
    found, rows = summary(tmp_path / "here"), metrics(tmp_path / "here")
    assert (found["val_count"], found["test_count"]) == (100, 500)
    assert found["val_correct"] == round(100 * found["val_accuracy"])
    assert found["val_loss"] != found["test_loss"]
    for name in ("val_loss", "val_accuracy", "test_loss", "test_accuracy"):
        assert rows[-1][name] == found[name]
    assert re.search(r"^val accuracy \d+\.\d+%, \d+ of 100, ", told, re.MULTILINE)
    assert f"  val_accuracy {rows[-1]['val_accuracy']:.4f}  val_loss " in told
