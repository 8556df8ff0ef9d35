"""The networks, and the two lines that put in one's own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import models
from tests.processes import environment

ROOT = Path(__file__).parent.parent
PARAMETERS = {"convnet": 65_450, "basic": 1_199_882, "linear": 7_850, "mlp": 235_146}


@pytest.mark.parametrize("name", models.MODELS)
def test_images_in_logits_out(name: str) -> None:
    if name == "resnet18":
        pytest.importorskip("torchvision", reason="resnet18 needs it", exc_type=ImportError)
    model = models.build_model(name)
    model.eval()
    for batch in (1, 5):
        assert model(torch.zeros(batch, 1, 28, 28)).shape == (batch, 10)
    if name in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_weights_come_from_the_seed() -> None:
    def weight(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return models.build_model("mlp").state_dict()["1.weight"]

    assert torch.equal(weight(3), weight(3))
    assert not torch.equal(weight(3), weight(4))


def test_resnet18_says_why_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(models.ModelError, match="needs torchvision, which cannot be imported"):
        models.build_model("resnet18")


def test_an_own_model_takes_two_lines(tmp_path: Path, synthetic_dir: Path) -> None:
    """An import and an entry in MODELS, as the README says, in a copy of the project."""
    for name in ("train_single.py", "models.py", "data.py", "utils"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my_network.py").write_text(
        "from torch import nn\n\n\nclass MyNetwork(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    text = (ROOT / "models.py").read_text()
    text = text.replace(
        "import torch.nn.functional as F",
        "import torch.nn.functional as F\nfrom my_network import MyNetwork",
    )
    text = text.replace(
        '    "convnet": ConvNet,', '    "convnet": ConvNet,\n    "mine": MyNetwork,'
    )
    (tmp_path / "models.py").unlink()
    (tmp_path / "models.py").write_text(text)
    (tmp_path / "train_single.py").unlink()
    (tmp_path / "train_single.py").write_text((ROOT / "train_single.py").read_text())
    flags = ["--model", "mine", "--max-steps", "5", "--dataset", "synthetic", "--threads", "1"]
    command = [sys.executable, "train_single.py", *flags, "--data-dir", str(synthetic_dir)]
    # Its own folder first on the path: the copy's models.py, not this project's.
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "mine, 7,850 parameters" in done.stdout


def test_no_model_has_a_parameter_without_gradient() -> None:
    """DDP waits for every gradient: a parameter without one is an error there."""
    for name in PARAMETERS:
        model = models.build_model(name)
        nn.functional.cross_entropy(
            model(torch.randn(4, 1, 28, 28)), torch.tensor([0, 1, 2, 3])
        ).backward()
        assert all(p.grad is not None for p in model.parameters())
