"""The networks: their shapes, their weights, and what may be missing for them."""

import sys

import pytest
import torch
from torch import nn

import models

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


def test_no_model_has_a_parameter_without_gradient() -> None:
    """DDP waits for every gradient: a parameter without one is an error there."""
    for name in PARAMETERS:
        model = models.build_model(name)
        nn.functional.cross_entropy(
            model(torch.randn(4, 1, 28, 28)), torch.tensor([0, 1, 2, 3])
        ).backward()
        assert all(p.grad is not None for p in model.parameters())
