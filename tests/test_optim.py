"""The learning rate: how it follows the batch, and its schedule."""

import pytest

from utils import optim


def test_the_rate_follows_the_global_batch():
    rates = {rule: optim.scale_lr(0.1, rule, 16 * 96) for rule in optim.RULES}
    assert rates == pytest.approx({"capped-linear": 0.4, "linear": 1.6, "sqrt": 0.4, "none": 0.1})
    halves = {rule: optim.scale_lr(0.1, rule, 48) for rule in optim.RULES}
    assert halves == pytest.approx(
        {"capped-linear": 0.05, "linear": 0.05, "sqrt": 0.1 / 2**0.5, "none": 0.1}
    )


def test_the_schedule_rises_linearly_and_falls_to_zero():
    shares = [optim.warmup_cosine(seen, 1000, 200) for seen in (0, 100, 200, 400, 600, 1000)]
    assert shares == pytest.approx([0.1, 0.55, 1.0, 0.853553, 0.5, 0.0])
    falling = [optim.warmup_cosine(seen, 1000, 200) for seen in range(200, 1001, 10)]
    assert falling == sorted(falling, reverse=True)


def test_the_warm_up_is_at_most_a_part_of_the_run_and_may_be_left_out():
    assert optim.warmup_cosine(300, 1000, 1000) == 1.0
    assert optim.warmup_cosine(150, 1000, 1000) == pytest.approx(0.55)
    assert optim.warmup_cosine(0, 1000, 0) == 1.0
