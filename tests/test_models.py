"""The networks: their shapes, their weights, and what may be missing for them."""

import sys

import pytest
import torch
from torch import nn

import models
from utils.errors import UsageError

PARAMETERS = {"convnet": 65_450, "basic": 1_199_882, "linear": 7_850, "mlp": 235_146}


@pytest.mark.parametrize("name", models.MODELS)
def test_images_in_logits_out_and_every_parameter_has_a_gradient(name):
    """DDP waits for every gradient: a parameter without one is an error there."""
    if name == "resnet18":
        pytest.importorskip("torchvision", reason="resnet18 needs it", exc_type=ImportError)
    model = models.build_model(name)
    assert name not in PARAMETERS or sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    logits = model(torch.randn(4, 1, 28, 28))
    assert logits.shape == (4, 10)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    assert all(p.grad is not None for p in model.parameters())
    model.eval()
    assert model(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


def test_resnet18_says_why_it_cannot_be_built(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(UsageError, match="needs torchvision"):
        models.build_model("resnet18")


def test_label_smoothing_is_that_of_pytorch():
    logits, classes = torch.randn(9, 10, requires_grad=True), torch.randint(10, (9,))
    loss, counted = models.loss_and_counts(logits, classes, 0.1)
    expected = nn.functional.cross_entropy(logits, classes, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(each, logits)[0] for each in (loss, expected)]
    torch.testing.assert_close(*gradients)
    assert counted["count"] == 9
