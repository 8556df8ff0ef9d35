"""DataParallel on CPU threads: the algorithm of nn.DataParallel, with nothing passed through."""

import threading

import pytest
import torch
from torch import Tensor, nn

import models
from utils import data_parallel, runtime
from utils.config import UsageError
from utils.data_parallel import CPUDataParallel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def float64() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Spy(nn.Module):
    """Notes the threads and the shares that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.build_model("mlp")
        self.calls: list[tuple[int, int]] = []  # shared by all replicas

    def forward(self, images: Tensor) -> Tensor:
        self.calls.append((threading.get_ident(), len(images)))
        return self.inner(images)


@pytest.mark.parametrize(
    ("batch", "replicas", "shares"),
    [(8, 2, [4, 4]), (10, 4, [3, 3, 3, 1]), (7, 3, [3, 3, 1]), (1, 4, [1]), (2, 3, [1, 1])],
)
def test_a_batch_is_split_over_threads(batch: int, replicas: int, shares: list[int]) -> None:
    model = Spy()
    wrapped = CPUDataParallel(model, replicas)
    images = torch.randn(batch, 1, 28, 28)
    out = wrapped(images)
    torch.testing.assert_close(out, model.inner(images), rtol=0, atol=1e-12)
    assert sorted((size for _, size in model.calls), reverse=True) == shares
    threads = {ident for ident, _ in model.calls}
    assert threading.get_ident() not in threads, "passed through on the calling thread"


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_gradients_are_those_of_the_whole_batch(replicas: int) -> None:
    model = models.build_model("mlp")
    images, labels = torch.randn(12, 1, 28, 28), torch.randint(10, (12,))
    nn.functional.cross_entropy(model(images), labels).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    nn.functional.cross_entropy(CPUDataParallel(model, replicas)(images), labels).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-12)


def test_the_first_replica_keeps_its_running_statistics() -> None:
    """As on GPUs: what the other replicas notice is lost with them."""
    model = nn.BatchNorm1d(1)
    model.train()
    images = torch.tensor([[0.0], [2.0], [100.0], [102.0]])
    CPUDataParallel(model, 2)(images)
    assert model.running_mean is not None
    assert float(model.running_mean) == pytest.approx(0.1 * 1.0)
    assert int(model.num_batches_tracked or 0) == 1


def test_an_error_of_a_replica_is_raised() -> None:
    class Broken(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise ArithmeticError("no")

    with pytest.raises(ArithmeticError, match="no"):
        CPUDataParallel(Broken(), 2)(torch.zeros(4, 1))


def test_grad_mode_and_autocast_reach_the_threads() -> None:
    model = models.build_model("linear").float()
    wrapped = CPUDataParallel(model, 2)
    images = torch.zeros(4, 1, 28, 28, dtype=torch.float32)
    with torch.no_grad():
        assert not wrapped(images).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert wrapped(images).dtype == torch.bfloat16


def test_keys_and_type_are_those_of_dataparallel() -> None:
    wrapped = data_parallel.wrap(models.build_model("linear"), [CPU, CPU], None)
    assert isinstance(wrapped, nn.DataParallel)
    assert list(wrapped.state_dict()) == ["module.1.weight", "module.1.bias"]
    forward = CPUDataParallel.forward
    assert forward is nn.DataParallel.forward, "DataParallel's own forward, unchanged"


def test_torch_passes_through_where_there_is_no_gpu() -> None:
    """The reason for all of this; should torch change it, this module can go."""
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without a GPU")
    assert nn.DataParallel(nn.Linear(1, 1)).device_ids == []


def test_arguments_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match="names a GPU"):
        data_parallel.wrap(models.build_model("linear"), [CPU], 1)
    with pytest.raises(UsageError, match="mps"):
        data_parallel.wrap(models.build_model("linear"), [torch.device("mps")], None)
    with pytest.raises(UsageError, match="not one of the devices"):
        data_parallel.wrap(models.build_model("linear"), [torch.device("cuda", 0)], 1)
    if not torch.accelerator.is_available():
        with pytest.raises(UsageError, match="there is no GPU here"):
            runtime.select_devices("auto", [0])
        with pytest.raises(UsageError, match="offers cpu only"):
            runtime.select_devices("cuda")
    assert runtime.select_devices("cpu", None, 3) == [CPU] * 3
