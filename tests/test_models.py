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
def test_a_model_maps_images_to_logits_in_the_quick_memory_order(name):
    model = models.build(name)
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    kernels = [x for x in model.parameters() if x.dim() == 4]
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in kernels)


def test_a_model_of_your_own_is_named_with_its_module():
    assert isinstance(models.build("torch.nn:Flatten"), nn.Flatten)
    with pytest.raises(UsageError, match="--model convent is none of convnet, basic"):
        models.build("convent")


def test_labels_of_minus_100_count_nowhere_in_an_evaluation():
    torch.manual_seed(0)
    images = torch.randn(23, 4)
    labels = torch.randint(10, (23,))
    labels[[3, 20]] = -100
    model = nn.Sequential(nn.Linear(4, 10), nn.Dropout())
    loader = DataLoader(TensorDataset(images, labels), 10)
    autocast = torch.autocast("cpu", enabled=False)
    sums = train_single.evaluate(model, loader, data.Transform("my:load", CPU), autocast)
    outputs = model[0](images)
    loss = F.cross_entropy(outputs, labels, reduction="sum").item()
    correct = int((outputs.argmax(1) == labels).sum())
    assert sums.tolist() == pytest.approx([loss, correct, 21])
    assert not sums.requires_grad, "or the graphs of all batches would stay in memory"
