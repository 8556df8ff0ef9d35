"""A process: its device and threads, and what the ranks compare before they train."""

import os

import pytest
import torch

from tests.helpers import ended, fork, in_group, parse
from utils.errors import UsageError
from utils.process import check_same, select_devices, setup_device


def compare(*ranks):
    """Return the error of each rank, or None, if each has its flags and the labels of a set."""

    def check(rank):
        flags, *labels = ranks[rank]
        dataset = [x if isinstance(x, dict) else (torch.rand(1), x) for x in labels]
        check_same(parse(*flags.split(), technique="ddp"), dataset)

    return in_group(check, len(ranks))


def test_equal_ranks_pass_and_a_machine_may_have_its_own_folders_and_cores():
    own = "--data-dir {0} --run-dir {0} --threads {0} --num-workers {0}"
    ranks = [(own.format(rank), 5, torch.tensor(6), [1, 2]) for rank in (1, 2, 3)]
    assert compare(*ranks) == [None] * 3
    # Of labels of another kind only the number is compared.
    image = torch.zeros(2, 2, dtype=torch.uint8)
    assert compare(("", 0.5, "cat", image), ("", float("nan"), "dog", image + 1)) == [None] * 2


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([("--lr 0.1",), ("--lr 0.1",), ("--lr 0.2",)], "rank 2 has --lr 0.2, rank 0 has 0.1"),
        ([("", 1, 2), ("", 1)], r"rank 1 has the length of data set 0 1"),
        ([("", 1, torch.tensor(2)), ("", 1, torch.tensor(3))], "the labels of data set 0"),
        ([("", {"x": 1, "y": 5}), ("", {"x": 1, "y": 6})], "the labels of data set 0"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(ranks, message):
    errors = compare(*ranks)
    assert len({(type(error), str(error)) for error in errors}) == 1
    with pytest.raises(UsageError, match=message):
        raise errors[-1]


def test_another_torch_is_named(monkeypatch):
    def check(rank):
        monkeypatch.setattr(torch, "__version__", f"2.{rank}")
        check_same(parse(technique="ddp"))

    assert "rank 1 has torch 2.1, rank 0 has 2.0" in str(in_group(check)[1])


class Noted(list):
    """A data set that notes that a sample is read in this process."""

    is_read = False

    def __getitem__(self, index):
        self.is_read = True
        return super().__getitem__(index)


def test_a_data_set_that_workers_read_is_not_opened_in_the_rank():
    """Or all workers would share a file that it opens with the first sample."""

    def check(rank):
        dataset = Noted([(torch.rand(1), 5)])
        check_same(parse("--num-workers", 1, technique="ddp"), dataset)
        return dataset.is_read

    assert in_group(check, 1) == [False]


@pytest.fixture
def offer(monkeypatch):
    """Return a function that pretends a number of GPUs."""

    def pretend(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_gpus_are_chosen_by_their_numbers(offer):
    offer(3)
    zero, one, two = (torch.device("cuda", index) for index in range(3))
    assert select_devices(parse()) == [zero, one, two]
    assert select_devices(parse("--devices", "2,0", technique="dp")) == [two, zero]
    assert select_devices(parse("--device", "cpu")) == [torch.device("cpu")]
    with pytest.raises(UsageError, match="--devices 5: there are 3 GPUs"):
        select_devices(parse("--devices", "5", technique="dp"))
    offer(0)
    assert select_devices(parse()) == [torch.device("cpu")], "with a build for CUDA, too"
    with pytest.raises(UsageError, match="--device cuda: torch finds no GPU"):
        select_devices(parse("--device", "cuda"))


def test_each_rank_has_a_gpu_of_its_own(offer):
    offer(3)
    args = parse("--threads", "1", technique="ddp")
    assert [setup_device(args, local_rank=rank).index for rank in range(3)] == [0, 1, 2]
    with pytest.raises(UsageError, match="there is no GPU 3: start at most 3 processes"):
        setup_device(args, local_rank=3)
    offer(1)  # some launchers show each rank its own GPU only
    assert setup_device(args, local_rank=3) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("flags", "variable", "processes", "threads"),
    [
        (["--threads", "3"], "5", "2", 3),  # the flag before the variable
        ([], "5", "2", 5),  # a number of the user's own is kept
        ([], "1", "1", 5),  # and so is a 1 of the user's, which torchrun sets for several processes
        ([], "1", "4", 2),  # torchrun's 1 is replaced by a fair share of 8 cores
    ],
)
def test_a_process_uses_its_share_of_the_cores_or_as_many_as_the_user_says(
    flags, variable, processes, threads, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)

    def check():
        torch.set_num_threads(5)  # as OMP_NUM_THREADS=5 does at the start
        setup_device(parse(*flags))
        assert torch.get_num_threads() == threads

    assert ended(fork(check)) == [0]


def test_deterministic_refuses_irreproducible_operations():
    def check():
        setup_device(parse("--threads", "1", "--deterministic"))
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))
        assert "CUBLAS_WORKSPACE_CONFIG" in os.environ, "or each product on a GPU is refused"

    assert ended(fork(check)) == [0]
