"""A script that knows nothing of this project becomes a DDP script by the README's few hunks."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import data
from tests.processes import ROOT, Finished, run
from tests.sources import code_lines

FOLDER = ROOT / "tests" / "port"
PATCH = (FOLDER / "ddp.patch").read_text()
MAX_LINES, MAX_ADDED = 60, 30
TRAIN_SIZE, TEST_SIZE = 1920, 1000  # 1,000 do not divide by 3
RESULT = re.compile(r"^Test set: Average loss: (\d+\.\d+), Accuracy: (\d+)/(\d+)$", re.MULTILINE)

pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="needs the patch command")


@pytest.fixture
def project(synthetic_dir: Path, tmp_path: Path) -> Path:
    """A folder with both scripts and a file of data, in float64: what differs is not rounding."""
    shutil.copy(FOLDER / "mnist.py", tmp_path / "single.py")
    shutil.copy(FOLDER / "mnist.py", tmp_path / "ddp.py")
    command = ["patch", "--silent", "ddp.py", FOLDER / "ddp.patch"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=10)
    train_set, test_set = data.load_tensors("synthetic", str(synthetic_dir))
    tensors = (*train_set[:TRAIN_SIZE], *test_set[:TEST_SIZE])
    whole = [t.double() if t.is_floating_point() else t.clone() for t in tensors]
    torch.save(whole, tmp_path / "digits.pt")
    return tmp_path


def train(project: Path, ranks: int, *flags: str) -> Finished:
    """Train single.py (0 ranks) or ddp.py, both in the order of ``DistributedSampler``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", ranks]
    script = project / ("ddp.py" if ranks else "single.py")
    command = [sys.executable, *(launcher if ranks else []), ROOT / "tests" / "shortened.py"]
    return run(*[*command, script, "digits.pt", *flags], cwd=project, timeout=120, TEST_EXACT="1")


def test_it_is_a_short_script_and_a_short_patch() -> None:
    assert len(code_lines((FOLDER / "mnist.py").read_text())) <= MAX_LINES
    added = [line for line in PATCH.splitlines() if re.match(r"\+(?!\+\+ )", line)]
    assert 0 < len(added) <= MAX_ADDED


def test_neither_imports_anything_of_this_project(project: Path) -> None:
    for script in ("single.py", "ddp.py"):
        tree = ast.parse((project / script).read_text())
        names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        assert names
        assert {str(name).partition(".")[0] for name in names} <= {
            "torch"
        } | sys.stdlib_module_names


def test_it_trains_the_same_and_evaluates_exactly(project: Path) -> None:
    """Without dropout, on 2 and on 3 processes; the order alone is given to both."""
    told, weights = [], []
    for ranks in (0, 2, 3):
        ended = train(project, ranks, "--dropout", "0")
        assert ended.returncode == 0, ended.text
        told.append(RESULT.findall(ended.stdout))
        weights.append(torch.load(project / "mnist.pt", weights_only=True))
        (project / "mnist.pt").unlink()
    _, correct, count = told[0][-1]
    assert len(told[0]) == 2, "two epochs"
    assert int(count) == TEST_SIZE
    assert int(correct) > 0.7 * TEST_SIZE, "nothing was learnt"
    assert told[1] == told[2] == told[0], "one rank reports, the same to six digits"
    for found in weights[1:]:
        apart = max(float((weights[0][k] - found[k]).abs().max()) for k in weights[0])
        print(f"{apart:.1e} apart")
        assert found["fc1.weight"].dtype == torch.float64
        assert apart < 1e-10


def test_the_checkpoint_has_the_accuracy_that_was_told(project: Path) -> None:
    ended = train(project, 3)
    assert ended.returncode == 0, ended.text
    loss, correct, _ = RESULT.findall(ended.stdout)[-1]
    namespace: dict = {}
    exec((project / "single.py").read_text().partition("\ndef train(")[0], namespace)
    model = namespace["Net"](0.25).double().eval()
    model.load_state_dict(torch.load(project / "mnist.pt", weights_only=True))
    *_, images, labels = torch.load(project / "digits.pt", weights_only=True)
    with torch.no_grad():
        logits = model(images)
    assert int((logits.argmax(dim=1) == labels).sum()) == int(correct)
    assert float(F.cross_entropy(logits, labels)) == pytest.approx(float(loss), abs=1e-6)
