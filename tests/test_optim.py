"""The arithmetic of a step: learning rates, momentum, random numbers, sums."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import models
from utils import optim
from utils.device import seed_step
from utils.errors import UsageError
from utils.metrics import Metrics

CPU = torch.device("cpu")


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def test_learning_rate_scaling():
    rates = {rule: optim.scale_lr(0.1, rule, 4 * 96) for rule in ("none", "linear", "sqrt")}
    assert rates == pytest.approx({"none": 0.1, "linear": 0.4, "sqrt": 0.2})
    rates = [optim.scale_lr(0.1, "capped-linear", size) for size in (48, 384, 768)]
    assert rates == pytest.approx([0.05, 0.4, 0.4])


def test_a_layer_may_get_its_first_gradient_late():
    """The fused SGD fails on one without a momentum."""
    layers = nn.ModuleList([linear(), linear()])
    optimizer = torch.optim.SGD(layers.parameters(), 0.1, momentum=0.9, fused=True)
    optim.fill_momentum(optimizer)
    for used in (1, 2):
        optimizer.zero_grad()
        sum(layer(torch.ones(8, 1, 28, 28)).mean() for layer in layers[:used]).backward()
        optimizer.step()


def test_random_numbers_come_from_seed_rank_and_position():
    def draw(*place):
        seed_step(CPU, *place)
        return float(torch.rand(1)), float(np.random.beta(0.2, 0.2)), random.random()

    places = [(seed, rank, samples) for seed in (0, 1) for rank in (0, 1) for samples in (0, 96)]
    assert [draw(*place) for place in places] == [draw(*place) for place in places]
    for generator in range(3):
        assert len({draw(*place)[generator] for place in places}) == len(places)


def test_sums_of_ranks_and_a_stop_are_added_up():
    """A line says when there are too many metrics."""
    ranks = [Metrics(CPU), Metrics(CPU)]
    for rank, metrics in enumerate(ranks):
        counted = {"count": 3 - rank, "points": torch.full((3 - rank,), 7)}
        for _ in range(2):
            metrics.update(torch.tensor(0.5), counted)
    ranks[1].interrupt()
    ranks[0].sums.add_(ranks[1].sums)
    assert ranks[0].averages == {"loss": 0.5, "points": 7}
    assert (ranks[0].count, ranks[0].interrupted) == (10, 1)
    with pytest.raises(UsageError, match="sums, of which more252 is the first too many"):
        ranks[0].update(torch.tensor(0.5), {"count": 1} | {f"more{i}": 0 for i in range(300)})


@pytest.mark.parametrize("targets", [torch.zeros(8, 10), torch.zeros(8).int()])
def test_targets_of_another_kind_are_told(targets):
    with pytest.raises(UsageError, match="cross-entropy takes class numbers"):
        models.loss_and_counts(torch.zeros(8, 10), targets)
