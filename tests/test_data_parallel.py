"""DataParallel on CPU threads: the algorithm of nn.DataParallel, with nothing passed through."""

import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn

import models
from utils import device
from utils.data_parallel import CPUDataParallel, keep_autocast_dtype, place_replicas
from utils.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Spy(nn.Module):
    """Notes the threads and the shares that it was called with."""

    def __init__(self):
        super().__init__()
        self.inner = models.build_model("mlp")
        self.calls = []  # shared by all replicas

    def forward(self, images):
        self.calls.append((threading.get_ident(), len(images), torch.get_num_threads()))
        return self.inner(images)


@pytest.mark.parametrize(
    ("batch", "replicas", "shares"),
    [(8, 2, [4, 4]), (10, 4, [3, 3, 3, 1]), (1, 4, [1])],
)
def test_a_batch_is_split_over_threads(batch, replicas, shares):
    model, threads = Spy(), torch.get_num_threads()
    torch.set_num_threads(8)
    wrapped = CPUDataParallel(model, replicas)
    images = torch.randn(batch, 1, 28, 28)
    out = wrapped(images)
    torch.set_num_threads(threads)
    torch.testing.assert_close(out, model.inner(images), rtol=0, atol=1e-12)
    assert sorted((size for _, size, _ in model.calls), reverse=True) == shares
    assert {each for *_, each in model.calls} == {8 // replicas}, "they fight for the cores"
    threads = {ident for ident, *_ in model.calls}
    assert threading.get_ident() not in threads, "passed through on the calling thread"


def test_gradients_are_those_of_the_whole_batch():
    model = models.build_model("mlp")
    images, labels = torch.randn(12, 1, 28, 28), torch.randint(10, (12,))
    nn.functional.cross_entropy(model(images), labels).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    nn.functional.cross_entropy(CPUDataParallel(model, 3)(images), labels).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-12)


def test_the_first_replica_keeps_its_running_statistics():
    """As on GPUs: what the other replicas notice is lost with them."""
    model = nn.BatchNorm1d(1)
    model.train()
    images = torch.tensor([[0.0], [2.0], [100.0], [102.0]])
    CPUDataParallel(model, 2)(images)
    assert model.running_mean is not None
    assert float(model.running_mean) == pytest.approx(0.1 * 1.0)
    assert int(model.num_batches_tracked or 0) == 1


def test_an_error_of_a_replica_is_raised():
    class Broken(nn.Module):
        def forward(self, images):
            raise ArithmeticError("no")

    with pytest.raises(ArithmeticError, match="no"):
        CPUDataParallel(Broken(), 2)(torch.zeros(4, 1))


def test_grad_mode_and_autocast_reach_the_threads():
    model = models.build_model("linear").float()
    wrapped = CPUDataParallel(model, 2)
    images = torch.zeros(4, 1, 28, 28, dtype=torch.float32)
    with torch.no_grad():
        assert not wrapped(images).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert wrapped(images).dtype == torch.bfloat16


def test_the_replicas_keep_the_dtype_of_autocast():
    """A new thread has autocast's default dtype, bf16 on a CPU and fp16 on CUDA, as in PyTorch."""
    found = []

    class Recording(nn.Linear):
        def forward(self, inputs):
            found.append(torch.get_autocast_dtype("cpu"))
            return super().forward(inputs).float()

    model, precision = Recording(4, 2).float(), device.Precision(CPU, "fp16")
    parallel = CPUDataParallel(model, 2)
    for dtype in (torch.bfloat16, torch.float16):
        with precision.autocast():
            parallel(torch.zeros(4, 4, dtype=torch.float32))
        assert found == [dtype] * 2
        found.clear()
        keep_autocast_dtype(model, precision)


class Outputs(NamedTuple):
    logits: torch.Tensor
    others: dict


class Particular(nn.Module):
    """Changes its input in place, and returns a tree of tensors."""

    def __init__(self):
        super().__init__()
        self.inner = models.build_model("linear")

    def forward(self, images):
        images.sub_(0.5).relu_()
        return Outputs(self.inner(images), {"sums": [images.sum(), None]})


def test_a_model_may_return_a_tree_and_change_its_input():
    """Several times: views of one tensor have one version, and autograd notices the other's."""
    model, images = Particular(), torch.randn(8, 1, 28, 28)
    expected = model(images.clone())
    for _ in range(3):
        outputs = CPUDataParallel(model, 2)(images.clone())
        outputs.logits.sum().backward()
    assert isinstance(outputs, Outputs)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=0, atol=1e-12)
    sums, nothing = outputs.others["sums"]
    assert nothing is None
    assert (len(sums), float(sums.sum())) == (2, pytest.approx(float(expected.others["sums"][0])))


@pytest.mark.filterwarnings("ignore:.*torch.jit:")
def test_a_scripted_model_gets_the_gradients_of_the_plain_one():
    plain, images = models.build_model("mlp"), torch.randn(8, 1, 28, 28)
    scripted = torch.jit.script(plain)
    keep_autocast_dtype(scripted, device.Precision(CPU, "off"))  # which could set no hook
    gradients = []
    for model in (plain, scripted):
        plain.zero_grad()
        CPUDataParallel(model, 2)(images).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_keys_and_type_are_those_of_dataparallel():
    wrapped = CPUDataParallel(models.build_model("linear"), 2)
    assert isinstance(wrapped, nn.DataParallel)
    assert list(wrapped.state_dict()) == ["module.1.weight", "module.1.bias"]
    forward = CPUDataParallel.forward
    assert forward is nn.DataParallel.forward, "DataParallel's own forward, unchanged"


def test_torch_passes_through_where_there_is_no_gpu():
    """The reason for all of this; should torch change it, this module can go."""
    if torch.accelerator.is_available():
        pytest.skip("needs a machine without a GPU")
    assert nn.DataParallel(nn.Linear(1, 1)).device_ids == []


def test_arguments_that_cannot_be_used(monkeypatch):
    def pretend(*devices):
        monkeypatch.setattr(device, "select_devices", lambda kind, ids: list(devices))

    if not torch.accelerator.is_available():
        with pytest.raises(UsageError, match="there are 0 GPUs"):
            place_replicas("auto", [0], None, None)
        with pytest.raises(UsageError, match="offers cpu only"):
            place_replicas("cuda", None, None, None)
    assert place_replicas("cpu", None, 3, None) == (CPU, [CPU] * 3)
    assert place_replicas("cpu", None, None, None) == (CPU, [CPU] * 2)
    with pytest.raises(UsageError, match=r"not one of the GPUs \[\]"):
        place_replicas("cpu", None, None, 1)
    for kind in ("mps", "xpu"):
        pretend(torch.device(kind, 0))
        with pytest.raises(UsageError, match=f"does not work on {kind}"):
            place_replicas("auto", None, None, None)
    pretend(torch.device("cuda", 0), torch.device("cuda", 3))
    with pytest.raises(UsageError, match=r"not one of the GPUs \[0, 3\]"):
        place_replicas("auto", None, None, 1)
    with pytest.raises(UsageError, match="--replicas is for the CPU"):
        place_replicas("auto", None, 2, None)
