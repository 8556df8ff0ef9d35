"""The networks, their weights from a file, and the loss and the evaluation of the scripts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import data
import models
import train_single
from utils.errors import UsageError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_maps_images_to_logits_and_follows_the_seed(name):
    built = []
    for _ in range(2):
        torch.manual_seed(3)
        built.append(models.build(name))
    model, again = built
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    kernels = [x for x in model.parameters() if x.dim() == 4]
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in kernels)


def test_a_model_of_your_own_is_named_with_its_module():
    assert isinstance(models.build("torch.nn:Flatten"), nn.Flatten)
    with pytest.raises(UsageError, match="--model convent is none of convnet, basic"):
        models.build("convent")


class Watched(nn.Linear):
    """A linear layer with dropout that notes how it is called."""

    def forward(self, images):
        self.graph = torch.is_grad_enabled()
        self.sizes.append(len(images))
        return F.dropout(super().forward(images), training=self.training)


def test_an_evaluation_is_exact_and_labels_of_minus_100_count_nowhere():
    torch.manual_seed(0)
    images = torch.randn(23, 4)
    labels = torch.randint(10, (23,))
    labels[[3, 20]] = -100
    model = Watched(4, 10)
    model.sizes = []
    loader = DataLoader(TensorDataset(images, labels), 10)
    autocast = torch.autocast("cpu", enabled=False)
    sums = train_single.evaluate(model, loader, data.Transform("my:load", CPU), autocast)
    assert model.sizes == [10, 10, 3]
    assert not model.graph
    assert not sums.requires_grad
    outputs = F.linear(images, model.weight, model.bias).detach()
    loss = F.cross_entropy(outputs, labels, reduction="sum")
    torch.testing.assert_close(sums[0], loss.double())
    assert sums[1:].tolist() == [(outputs.argmax(1) == labels).sum(), 21]
