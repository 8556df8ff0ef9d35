"""DataParallel on CPU threads: the algorithm of nn.DataParallel, with nothing passed through."""

import threading

import pytest
import torch
from torch import nn

from utils import device
from utils.data_parallel import CPUDataParallel, keep_autocast_dtype, replica_devices
from utils.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Spy(nn.Linear):
    """Notes the threads and the shares that it was called with."""

    def __init__(self):
        super().__init__(784, 10)
        self.calls = []  # shared by all replicas

    def forward(self, images):
        self.calls.append((threading.get_ident(), len(images), torch.get_num_threads()))
        return super().forward(images)


def test_a_batch_is_split_over_threads():
    """Outputs and gradients are those of the whole batch."""
    spy, threads, images = Spy(), torch.get_num_threads(), torch.randn(10, 784)
    model = nn.Sequential(spy)
    torch.set_num_threads(8)
    outputs = CPUDataParallel(model, 4)(images)
    torch.set_num_threads(threads)
    idents, sizes, each = zip(*spy.calls, strict=True)
    assert sorted(sizes) == [1, 3, 3, 3]
    assert {*each} == {2}, "they fight for the cores"
    assert threading.get_ident() not in idents, "passed through on the calling thread"
    found = [outputs, *torch.autograd.grad(outputs.square().mean(), model.parameters())]
    outputs = model(images)
    expected = [outputs, *torch.autograd.grad(outputs.square().mean(), model.parameters())]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert CPUDataParallel.forward is nn.DataParallel.forward, "its own forward, unchanged"


def test_grad_mode_and_the_dtype_of_autocast_reach_the_threads():
    """A new thread has autocast's default dtype, bf16 on a CPU and fp16 on CUDA, as in PyTorch."""
    found = []

    class Recording(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            found.append((outputs.dtype, torch.is_grad_enabled()))
            return outputs.float()

    model = Recording(4, 4).float()
    wrapped, inputs = CPUDataParallel(model, 2), torch.zeros(4, 4, dtype=torch.float32)
    with torch.no_grad():
        wrapped(inputs)
        assert found == [(torch.float32, False)] * 2
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", torch.float16):
            wrapped(inputs)
        assert found[-2:] == [(dtype, True)] * 2
        keep_autocast_dtype(model, "cpu", torch.float16)


CUDA = [torch.device("cuda", index) for index in (0, 3)]


@pytest.mark.parametrize(
    ("found", "arguments", "words"),
    [
        (CUDA, (None, 1), r"--output-device 1 is not one of the GPUs \[0, 3\]"),
        (CUDA, (2, None), "--replicas is for the CPU"),
        ([torch.device("mps", 0)], (None, None), "does not work on mps"),
    ],
)
def test_arguments_that_cannot_be_used(found, arguments, words, monkeypatch):
    monkeypatch.setattr(device, "select_devices", lambda kind, ids: list(found))
    with pytest.raises(UsageError, match=words):
        replica_devices("auto", None, *arguments)


def test_without_a_gpu_there_are_two_replicas_or_as_many_as_asked_for():
    assert replica_devices("cpu", None, None, None) == [CPU] * 2
    assert replica_devices("cpu", None, 3, None) == [CPU] * 3
    if not torch.accelerator.is_available():
        with pytest.raises(UsageError, match="there are 0 GPUs"):
            device.select_devices("auto", [0])
