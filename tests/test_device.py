"""The hardware of a process: its device, its threads, --deterministic."""

import os

import pytest
import torch

from tests.helpers import ended, fork, parse
from utils.device import select_devices, setup_device
from utils.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture
def offer(monkeypatch):
    """Return a function that pretends a number of GPUs."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_a_cuda_build_without_a_gpu_uses_the_cpu(offer):
    offer(0)
    assert select_devices(parse()) == select_devices(parse("--device", "cpu")) == [CPU]
    with pytest.raises(UsageError, match=r"--device cuda: this machine .* offers cpu only"):
        select_devices(parse("--device", "cuda"))


def test_gpus_are_chosen_by_their_numbers(offer):
    offer(3)
    zero, one, two = (torch.device("cuda", index) for index in range(3))
    assert select_devices(parse()) == [zero, one, two]
    assert select_devices(parse("--devices", "2,0", technique="dp")) == [two, zero]
    assert select_devices(parse("--device", "cpu")) == [CPU]
    with pytest.raises(UsageError, match="--devices 5: there are 3 GPUs"):
        select_devices(parse("--devices", "5"))
    args = parse("--threads", "1", technique="ddp")
    devices = [setup_device(args, local_rank=rank) for rank in range(4)]
    assert devices == [zero, one, two, zero], "one for each rank of a machine"


@pytest.mark.parametrize(
    ("flags", "variable", "processes", "threads"),
    [
        (["--threads", "3"], "5", "1", 3),  # the flag before the variable
        ([], "5", "1", 5),  # a number of the user's own is kept
        ([], "1", "4", 2),  # torchrun's 1 is replaced by a fair share of 8 cores
        ([], "1", "99", 1),
    ],
)
def test_the_number_of_threads(flags, variable, processes, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before = torch.get_num_threads()
    torch.set_num_threads(5)  # as OMP_NUM_THREADS=5 does at the start
    setup_device(parse(*flags))
    try:
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_deterministic_refuses_irreproducible_operations():
    def check():
        setup_device(parse("--threads", "1"))
        assert not torch.are_deterministic_algorithms_enabled()
        setup_device(parse("--threads", "1", "--deterministic"))
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    assert ended(fork(check)) == [0]
