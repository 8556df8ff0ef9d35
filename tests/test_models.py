"""The networks: their shapes, their weights, and what may be missing for them."""

import sys

import pytest
import torch
from torch import nn

import models
from utils.errors import UsageError
from utils.metrics import Metrics

PARAMETERS = {"convnet": 65_450, "basic": 1_199_882, "linear": 7_850, "mlp": 235_146}


@pytest.mark.parametrize("name", [*PARAMETERS, pytest.param("resnet18", marks=pytest.mark.slow)])
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
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(UsageError, match="needs torchvision"):
        models.build_model("resnet18")


@pytest.mark.parametrize(("classes", "smoothing"), [(3, 0.1), (200, 0.0)])  # has a class C - 100
def test_ignored_samples_count_nowhere(classes, smoothing):
    """The others are the mean and the gradients that PyTorch has; a batch with none is no NaN."""
    targets = torch.arange(10) % 3
    metrics = Metrics(torch.device("cpu"))
    for ignored in (0, 3, 10):
        targets[:ignored] = models.IGNORED
        logits = nn.functional.one_hot(targets.clamp(min=0), classes).float().requires_grad_()
        loss, counted = models.loss_and_counts(logits, targets, smoothing)
        [gradient] = torch.autograd.grad(loss, logits)
        metrics.update(loss, counted)
        if ignored == len(targets):
            assert (float(loss.detach()), float(gradient.abs().max())) == (0, 0)
        else:
            expected = nn.functional.cross_entropy(logits, targets, label_smoothing=smoothing)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
    assert metrics.totals["count"] == metrics.totals["correct"] == 10 + 7
    assert metrics.averages["loss"] == pytest.approx(float(expected.detach()))
