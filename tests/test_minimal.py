"""The minimal scripts are short, and train as well and evaluate as exactly as the long ones."""

import ast
import difflib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import data
import models
from tests.documents import docstring_commands
from tests.processes import ROOT, Finished, finish, run, shell_line, start
from tests.sources import code_lines
from tests.test_hosts import Hosts
from tests.test_launch import free_port

FOLDER = ROOT / "scripts" / "minimal"
SCRIPTS = ("single", "dp", "ddp")
MAX_LINES = 55
MAX_ADDED = {"dp": 3, "ddp": 20}
IMAGES = 1920  # for training, where a whole epoch would only take longer
TIMEOUT = 150.0
STANDALONE = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
RESULT = re.compile(r"^epoch (\d+): loss (\d+\.\d+), (\d+\.\d+)% of (\d+)$", re.MULTILINE)


def changes(technique: str) -> list[tuple[list[str], list[tuple[int, str]]]]:
    """Return the removed and the added code lines of each hunk of ``diff single.py ...``."""
    old = code_lines((FOLDER / "single.py").read_text())
    new = code_lines((FOLDER / f"{technique}.py").read_text())
    lines = [[line for _, line in each] for each in (old, new)]
    opcodes = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
    return [(lines[0][i:j], new[k:m]) for tag, i, j, k, m in opcodes if tag != "equal"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short(script: str) -> None:
    assert len(code_lines((FOLDER / f"{script}.py").read_text())) <= MAX_LINES


@pytest.mark.parametrize("technique", MAX_ADDED)
def test_a_technique_adds_few_lines(technique: str) -> None:
    added = [line for _, lines in changes(technique) for line in lines]
    assert 0 < len(added) <= MAX_ADDED[technique], added


@pytest.mark.parametrize("technique", MAX_ADDED)
def test_every_hunk_says_why(technique: str) -> None:
    lines = (FOLDER / f"{technique}.py").read_text().splitlines()
    for removed, added in changes(technique):
        assert added, f"only removes {removed}: nothing is left to carry the reason"
        comment = []
        for line in reversed(lines[: added[0][0] - 1]):
            if not line.strip().startswith("#"):
                break
            comment.append(line.strip())
        assert any(line.startswith(f"# {technique.upper()}: ") for line in comment), added


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reader_replaces_two_imports(script: str) -> None:
    tree = ast.parse((FOLDER / f"{script}.py").read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    others = {str(name).partition(".")[0] for name in names} - {"torch"} - sys.stdlib_module_names
    assert others == {"data", "models"}


def test_started_plainly_ddp_says_in_one_line_how_to_start_it(tmp_path: Path) -> None:
    ended = run(sys.executable, FOLDER / "ddp.py", cwd=tmp_path)
    assert ended.returncode == 2
    (line,) = ended.text.splitlines()
    command = "torchrun --standalone --nproc_per_node 2"
    assert line == f"start it with: {command} {FOLDER / 'ddp.py'}"


def test_variables_of_half_a_launcher_are_none(tmp_path: Path) -> None:
    ended = run(sys.executable, FOLDER / "ddp.py", cwd=tmp_path, RANK="0")
    assert ended.returncode == 2
    assert ended.text.startswith("start it with: torchrun "), ended.text


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_data_set_is_told(script: str, tmp_path: Path) -> None:
    ended = run(sys.executable, FOLDER / f"{script}.py", "--dataset", "nowhere", cwd=tmp_path)
    assert ended.returncode == 2
    assert "invalid choice: 'nowhere'" in ended.stderr
    assert "Traceback" not in ended.stderr


def train(script: str, ranks: int, folder: Path, *flags: Any, **variables: str) -> Finished:
    """Train a script on the first images, in ``folder``, where it leaves its checkpoint."""
    launcher = [*STANDALONE, ranks] if script == "ddp" else []
    command = [sys.executable, *launcher, ROOT / "tests" / "shortened.py"]
    folder.mkdir(exist_ok=True)
    variables = {"TEST_IMAGES": str(IMAGES)} | variables
    return run(
        *[*command, f"scripts/minimal/{script}.py", "--dataset", "synthetic", *flags],
        cwd=folder,
        timeout=TIMEOUT,
        **variables,
    )


@torch.no_grad()
def evaluate(model: torch.nn.Module, folder: Path, dataset: str) -> tuple[float, int]:
    """Return loss and number of correct images over the test set, as any script would."""
    test_set = data.load_tensors(dataset, str(folder))[1]
    model.eval()
    loss, correct = 0.0, 0
    for images, labels in DataLoader(test_set, 500):
        logits = model(images)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(dim=1) == labels).sum())
    return loss / len(test_set), correct


def result(ended: Finished) -> tuple[float, float]:
    """Return loss and accuracy in per cent, of the last epoch."""
    assert ended.returncode == 0, ended.text
    _, loss, accuracy, count = RESULT.findall(ended.stdout)[-1]
    assert count == "10000"
    return float(loss), float(accuracy)


@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        ("single", 1),
        pytest.param("dp", 1, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        ("ddp", 3),
    ],
)
def test_it_learns_and_evaluates_exactly(
    script: str, ranks: int, synthetic_dir: Path, tmp_path: Path
) -> None:
    """10,000 images do not divide by 3; the checkpoint is that of plain single-device code."""
    flags = ["--data-dir", synthetic_dir, "--epochs", 2, "--batch-size", 96 // ranks]
    ended = train(script, ranks, tmp_path, *flags)
    loss, accuracy = result(ended)
    assert [epoch for epoch, *_ in RESULT.findall(ended.stdout)] == ["1", "2"], "one rank reports"
    assert accuracy > 80, "nothing was learnt"

    model = models.build_model("convnet")
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    true_loss, correct = evaluate(model, synthetic_dir, "synthetic")
    assert accuracy == correct / 100
    assert loss == pytest.approx(true_loss, abs=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.slow
def test_a_checkpoint_of_ddp_goes_on_in_plain_code(synthetic_dir: Path, tmp_path: Path) -> None:
    result(train("ddp", 2, tmp_path, "--data-dir", synthetic_dir))
    model = models.build_model("convnet")
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    before, _ = evaluate(model, synthetic_dir, "synthetic")
    train_set, _ = data.load_tensors("synthetic", str(synthetic_dir))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    for first in range(0, IMAGES, 96):
        images, labels = train_set[first : first + 96]
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert evaluate(model, synthetic_dir, "synthetic")[0] < before


@pytest.mark.slow
def test_the_same_global_batch_makes_the_same_weights(synthetic_dir: Path, tmp_path: Path) -> None:
    """In float64, without batch normalisation, and with the images in the same order.

    On its own, single.py takes another order: ``RandomSampler`` draws it from the default
    generator, ``DistributedSampler`` from one of its own, seeded by seed + epoch. Given that order,
    the k-th batches of all processes together are the k-th batch of one: a process takes every
    n-th image of it.
    """
    weights: dict[tuple[str, int], Any] = {}
    for script, ranks in (("single", 1), ("dp", 1), ("ddp", 1), ("ddp", 2), ("ddp", 3)):
        folder = tmp_path / f"{script}{ranks}"
        flags = ["--data-dir", synthetic_dir, "--batch-size", 96 // ranks, "--epochs", 2]
        result(train(script, ranks, folder, *flags, TEST_EXACT="0"))
        weights[script, ranks] = torch.load(folder / "model.pt", weights_only=True)
    expected = weights.pop(("single", 1))
    untrained = models.mlp().double().state_dict()
    assert expected.keys() == untrained.keys()
    for layout, found in weights.items():
        apart = max(float((expected[k] - found[k]).abs().max()) for k in expected)
        print(f"{layout}: {apart:.1e} apart")
        assert expected["1.weight"].dtype == torch.float64
        assert apart < 1e-12, layout


def test_when_a_rank_fails_all_of_them_end(synthetic_dir: Path, tmp_path: Path) -> None:
    ended = train("ddp", 2, tmp_path, "--data-dir", synthetic_dir, TEST_FAILS="1")
    assert ended.returncode == 1
    assert "RuntimeError: this rank fails" in ended.stderr
    assert not list(tmp_path.iterdir())


def shown(script: str, number: int, flags: str) -> str:
    """Return a command of a script's docstring, to be given from any folder."""
    command = docstring_commands(FOLDER / f"{script}.py")[number]
    return f"{command} {flags}".replace("scripts/", f"{ROOT}/scripts/")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_one_epoch_of_mnist_reaches_98_percent(
    script: str, mnist_dir: Path, tmp_path: Path
) -> None:
    """By the commands of the docstrings of single.py, dp.py and ddp.py."""
    words, _ = shell_line(shown(script, 0, f"--data-dir {mnist_dir}"))
    ended = run(*words, cwd=tmp_path, timeout=240)
    print(ended.stdout)
    assert result(ended)[1] > 98


@pytest.mark.slow
def test_two_epochs_of_drawn_digits(synthetic_dir: Path, tmp_path: Path) -> None:
    line = shown("single", 1, f"--data-dir {synthetic_dir}")
    assert "--dataset synthetic --epochs 2" in line
    ended = run(*shell_line(line)[0], cwd=tmp_path, timeout=240)
    assert result(ended)[1] > 98


TWO_MACHINES = "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint $HOST0:29500"


def on_two_machines(folder: Path) -> str:
    """Return the command for two machines, made short."""
    command = docstring_commands(FOLDER / "ddp.py")[1]
    assert command == f"{TWO_MACHINES} scripts/minimal/ddp.py"
    shortened = f"{ROOT}/tests/shortened.py scripts/minimal/ddp.py --dataset synthetic"
    command = command.replace("scripts/minimal/ddp.py", shortened).replace("29500", "$PORT")
    return f"{command} --data-dir {folder} --batch-size 48"


def check_two(ended: list[Finished], folder: Path) -> None:
    assert [one.returncode for one in ended] == [0, 0], [one.text for one in ended]
    reports = [one for one in ended if RESULT.search(one.stdout)]
    assert len(reports) == 1, "only rank 0 reports"
    model = models.build_model("convnet")
    (checkpoint,) = folder.glob("**/model.pt")
    model.load_state_dict(torch.load(checkpoint, weights_only=True))


def test_two_torchruns_on_one_host(synthetic_dir: Path, tmp_path: Path) -> None:
    """The command of ddp.py's docstring, twice."""
    known = {"HOST0": "127.0.0.1", "PORT": str(free_port())}
    words, variables = shell_line(on_two_machines(synthetic_dir), **known)
    variables |= {"TEST_IMAGES": str(IMAGES)}
    both = [start(*words, cwd=tmp_path, **variables) for _ in range(2)]
    check_two([finish(process, TIMEOUT) for process in both], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="needs root, iproute2 and unshare for network namespaces",
)
def test_two_hosts(synthetic_dir: Path, tmp_path: Path) -> None:
    line = f"cd {tmp_path}; {on_two_machines(synthetic_dir)}"
    with Hosts(2) as hosts:
        both = [hosts.start(node, line, TEST_IMAGES=str(IMAGES)) for node in range(2)]
        check_two([finish(process, TIMEOUT) for process in both], tmp_path)
