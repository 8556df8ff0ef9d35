"""The batch loop: accumulation, clipping, scaling, schedule, randomness."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import data
import models
from tests import processes
from utils import engine, optim
from utils.device import Precision
from utils.errors import UsageError
from utils.metrics import Metrics
from utils.progress import Progress

CPU = torch.device("cpu")
Batch = tuple[Tensor, Tensor]


def batches(count: int, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randint(256, (size, 28, 28), generator=generator, dtype=torch.uint8),
            torch.randint(10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def train(
    model: nn.Module,
    loader: list[Batch],
    *,
    lr: float = 0.1,
    amp: str = "off",
    accumulate: int = 1,
    **options: object,
) -> tuple[Metrics, Progress, optim.Schedule, Precision]:
    optimizer = optim.build_optimizer(model, lr, 0.0, 0.0)
    schedule = optim.Schedule(optimizer, 1000, 1, 0)
    precision = Precision(CPU, amp)
    progress = Progress(1000, len(loader[0][1]) * accumulate, 1)
    metrics = engine.train_one_epoch(
        model,
        loader,
        data.Transform(CPU, "mnist"),
        optimizer,
        schedule,
        precision,
        progress,
        grad_accum_steps=accumulate,
        **options,  # type: ignore[arg-type]
    )
    return metrics, progress, schedule, precision


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def test_accumulation_is_the_larger_batch() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        small, large = linear(), linear()
        parts = batches(4, 6)
        train(small, parts, accumulate=2)
        whole = [tuple(torch.cat(p) for p in zip(*parts[i : i + 2])) for i in (0, 2)]  # noqa: B905
        train(large, whole)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_no_sync_holds_the_forward_and_backward_of_all_but_the_last() -> None:
    events: list[str] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()
            self.inner[1].weight.register_post_accumulate_grad_hook(
                lambda _: events.append("backward")
            )

        def forward(self, images: Tensor) -> Tensor:
            events.append("forward")
            return self.inner(images)

    @contextmanager
    def no_sync() -> Iterator[None]:
        events.append("(")
        yield
        events.append(")")

    _, progress, _, _ = train(Spy(), batches(6, 4), accumulate=3, no_sync=no_sync)
    micro = ["(", "forward", "backward", ")"]
    assert events == [*micro, *micro, "forward", "backward"] * 2
    assert (progress.global_step, progress.epoch_samples) == (2, 24)


def test_clipping_bounds_the_true_gradient() -> None:
    """With fp16 the gradient is scaled by 65,536 until it is unscaled, then clipped."""
    for amp in ("off", "fp16"):
        model = linear()
        before = [p.detach().clone() for p in model.parameters()]
        train(model, batches(1, 8), lr=1.0, amp=amp, max_grad_norm=0.01)
        moved = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
        norm = torch.cat([m.flatten() for m in moved]).norm()
        assert float(norm) == pytest.approx(0.01, rel=1e-2), amp


def test_a_norm_of_0_does_not_clip() -> None:
    free, unclipped = linear(), linear()
    unclipped.load_state_dict(free.state_dict())
    train(free, batches(1, 8), lr=1.0)
    train(unclipped, batches(1, 8), lr=1.0, max_grad_norm=0.0)
    assert torch.equal(free[1].weight, unclipped[1].weight)  # type: ignore[index]


def test_an_overflow_in_fp16_skips_the_step_and_lowers_the_scale() -> None:
    model = linear()
    before = model[1].weight.detach().clone()  # type: ignore[index]
    model[1].weight.register_hook(lambda g: g * float("inf"))  # type: ignore[index]
    *_, precision = train(model, batches(1, 4), amp="fp16")
    assert torch.equal(model[1].weight, before)  # type: ignore[index]
    assert precision.scaler.get_scale() == 65536.0 / 2


def test_bf16_computes_in_bf16_and_keeps_the_weights() -> None:
    model, seen = linear(), []
    model[1].register_forward_hook(lambda m, i, o: seen.append(o.dtype))  # type: ignore[index]
    train(model, batches(1, 4), amp="bf16")
    assert seen == [torch.bfloat16]
    assert model[1].weight.dtype == torch.float32  # type: ignore[index]


def test_the_schedule_is_set_for_each_optimizer_step() -> None:
    seen: list[float] = []

    class Spy(optim.Schedule):
        def set(self, samples_seen: int) -> None:
            super().set(samples_seen)
            seen.append(samples_seen)

    original, optim.Schedule = optim.Schedule, Spy  # type: ignore[misc]
    try:
        train(linear(), batches(6, 5), accumulate=2)
    finally:
        optim.Schedule = original  # type: ignore[misc]
    assert seen == [0, 10, 20]


def test_random_numbers_come_from_seed_rank_and_position() -> None:
    def draws(**options: object) -> list[float]:
        drawn: list[float] = []
        model = linear()
        model.register_forward_pre_hook(lambda m, i: drawn.append(float(torch.rand(1))))
        train(model, batches(3, 4), **options)
        return drawn

    first = draws()
    assert draws() == first
    assert len(set(first)) == 3, "each step draws its own numbers"
    assert not set(draws(rank=1)) & set(first), "ranks draw different numbers"
    assert not set(draws(seed=1)) & set(first)


def test_after_step_can_end_the_epoch() -> None:
    metrics, progress, _, _ = train(
        linear(), batches(5, 4), after_step=lambda metrics: metrics.count >= 8
    )
    assert progress.global_step == 2
    assert metrics.count == 8


def test_evaluation_leaves_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784), nn.Linear(784, 10))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader = batches(3, 7)
    metrics, predictions = engine.evaluate(
        model, loader, data.Transform(CPU, "mnist"), Precision(CPU, "off")
    )
    assert metrics.count == len(predictions) == 21
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_sums_are_exact_whatever_the_batches() -> None:
    model = linear()
    images = torch.cat([i for i, _ in batches(5, 8)])
    labels = torch.cat([y for _, y in batches(5, 8)])
    results = []
    for size in (1, 7, 40):
        parts = list(zip(images.split(size), labels.split(size), strict=True))
        metrics, _ = engine.evaluate(
            model, parts, data.Transform(CPU, "mnist"), Precision(CPU, "off")
        )
        results.append((metrics.correct, metrics.count, pytest.approx(metrics.loss, rel=1e-5)))
    assert results[0] == results[1] == results[2]


def test_nothing_counted_is_not_a_number() -> None:
    metrics = Metrics(CPU)
    assert metrics.count == 0
    assert metrics.loss != metrics.loss
    assert metrics.accuracy != metrics.accuracy


def test_learning_rate_scaling() -> None:
    assert optim.scale_lr(0.1, "none", 512, 64) == 0.1
    assert optim.scale_lr(0.1, "linear", 512, 64) == pytest.approx(0.8)
    assert optim.scale_lr(0.1, "sqrt", 256, 64) == pytest.approx(0.2)
    rates = [optim.scale_lr(0.1, "capped-linear", size, 96) for size in (48, 96, 384, 768, 6144)]
    assert rates == pytest.approx([0.05, 0.1, 0.4, 0.4, 0.4])


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    optimizer = torch.optim.SGD(linear().parameters(), lr=2.0)
    schedule = optim.Schedule(optimizer, epoch_size=1000, epochs=5, warmup_epochs=1)
    factors = [schedule.factor(images) for images in range(0, 5001, 50)]
    assert factors[0] == optim.WARMUP_START
    assert schedule.factor(1000) == 1.0
    assert factors[-1] == pytest.approx(0, abs=1e-9)
    peak = factors.index(max(factors))
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    schedule.set(3000)
    assert schedule.lr == pytest.approx(1.0)
    short = optim.Schedule(optimizer, epoch_size=1000, epochs=1, warmup_epochs=1)
    assert short.warmup_samples == 300


def test_a_loss_that_is_not_finite_stops_before_the_weights_move() -> None:
    model = linear()
    with torch.no_grad():
        model[1].bias[3] = float("nan")  # type: ignore[index]
    before = model[1].weight.detach().clone()  # type: ignore[index]
    with pytest.raises(engine.NonFiniteLoss, match="loss is nan at step 1 on rank 2"):
        train(model, batches(2, 4), rank=2)
    assert torch.equal(model[1].weight, before)  # type: ignore[index]


# Prints how many pages a training step of convnet asks the kernel for, on average.
PAGE_FAULTS = """
import resource, torch, models
from utils.device import setup_device

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

setup_device(torch.device("cpu"), 1)
model, images = models.build_model("convnet"), torch.rand(96, 1, 28, 28)
for step in range(15):
    if step == 5:
        before = faults()
    model(images).sum().backward()
print((faults() - before) / 10)
"""


def test_a_step_takes_its_memory_from_the_step_before() -> None:
    done = processes.run(sys.executable, "-c", PAGE_FAULTS)
    assert done.returncode == 0, done.stderr
    # Left to itself, glibc gives back and asks again for some 2,500 pages, 10 MB, in each step.
    assert float(done.stdout) < 500


class Branch(nn.Module):
    """Has a layer that only some steps use: its first gradient comes later than the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.late = linear(), nn.Linear(10, 10)
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        outputs = self.stem(images)
        return outputs + self.late(outputs) if self.calls > 2 else outputs


def test_a_layer_may_get_its_first_gradient_late() -> None:
    model = Branch()
    before = model.late.weight.detach().clone()
    optimizer = optim.build_optimizer(model, 0.1, 0.9, 0.0)
    options = (optimizer, optim.Schedule(optimizer, 1000, 1, 0), Precision(CPU, "off"))
    transform = data.Transform(CPU, "mnist")
    engine.train_one_epoch(model, batches(4, 8), transform, *options, Progress(1000, 8, 1))
    assert not torch.equal(model.late.weight, before)


def test_momentum_that_is_there_from_the_start_changes_nothing() -> None:
    ours, theirs = linear(), linear()
    optimizer = optim.build_optimizer(ours, 0.1, 0.9, 5e-4)
    reference = torch.optim.SGD(
        theirs.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True
    )
    for images, _ in batches(3, 8):
        for model, step in ((ours, optimizer), (theirs, reference)):
            step.zero_grad()
            model(images.float()[:, None]).square().mean().backward()
            step.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_is_trained_when_only_the_evaluation_is_owed() -> None:
    model = linear()
    before = model[1].weight.detach().clone()  # type: ignore[index]
    optimizer = optim.build_optimizer(model, 0.1, 0.9, 0.0)
    progress = Progress(1000, 4, 1, max_steps=3, epoch_samples=12, global_step=3)
    engine.train_one_epoch(
        model,
        batches(5, 4),
        data.Transform(CPU, "mnist"),
        optimizer,
        optim.Schedule(optimizer, 1000, 1, 0),
        Precision(CPU, "off"),
        progress,
    )
    assert progress.global_step == 3
    assert torch.equal(model[1].weight, before)  # type: ignore[index]


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [((8, 1), torch.zeros(8, 1)), ((8, 10), torch.zeros(8, 10)), ((8, 10), torch.zeros(8).int())],
)
def test_targets_of_another_kind_are_told(outputs: tuple[int, int], targets: Tensor) -> None:
    with pytest.raises(UsageError, match="cross-entropy takes class numbers") as caught:
        models.loss_and_correct(torch.zeros(outputs), targets)
    assert "\n" not in str(caught.value)


def test_a_loss_is_looked_at_before_an_epoch_ends_on_any_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU it is read every so many steps, and an epoch may end in between."""
    seen: list[Tensor] = []

    class Gpu:
        device = SimpleNamespace(type="cuda")

        def __call__(self, images: Tensor, labels: Tensor, train: bool) -> tuple[Tensor, Tensor]:
            seen.append(images)
            factor = float("nan") if len(seen) == 3 else 1.0
            return images[:, None].float() * factor, labels

    monkeypatch.setattr(engine, "seed_step", lambda *a: None)
    monkeypatch.setattr(engine, "Metrics", lambda device, sums=None: Metrics(CPU, sums))
    model = linear()
    optimizer = optim.build_optimizer(model, 0.1, 0.9, 0.0)
    schedule, precision = optim.Schedule(optimizer, 1000, 1, 0), Precision(CPU, "off")
    progress = Progress(1000, 4, 1, global_step=1)
    with pytest.raises(engine.NonFiniteLoss, match="the loss is nan at step 6"):
        engine.train_one_epoch(
            model,
            batches(5, 4),
            Gpu(),
            optimizer,
            schedule,
            precision,
            progress,  # type: ignore[arg-type]
        )
    assert len(seen) == 5, "it was noticed at the end"
