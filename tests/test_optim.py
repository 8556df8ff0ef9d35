"""The learning rate: how it follows the batch, and its schedule."""

import pytest

from utils.optim import scale_lr, warmup_cosine


def test_the_rate_follows_the_global_batch_up_to_four_times():
    rates = [scale_lr(0.1, size) for size in (48, 96, 384, 6144)]
    assert rates == pytest.approx([0.05, 0.1, 0.4, 0.4])


def test_the_schedule_rises_linearly_and_falls_to_zero():
    shares = [warmup_cosine(done, 10, 2) for done in (0, 1, 2, 4, 6, 10)]
    assert shares == pytest.approx([0.1, 0.55, 1.0, 0.853553, 0.5, 0.0])
    assert warmup_cosine(0, 1, 0) == 1.0, "without a warm-up"
