"""What the ranks compare before they train, and how a rank ends."""

import atexit
import os

import pytest
import torch
from torch.utils.data import Dataset

from tests.helpers import ended, fork, in_group, parse
from utils.distributed import check_same, end_process
from utils.errors import UsageError

FIRST, SECOND = torch.tensor([0, 1]), torch.tensor([1, 1])


def compare(*ranks):
    """Return the error of each rank, or None, if each has its flags and the labels of a set."""

    def check(rank):
        flags, *labels = ranks[rank]
        dataset = [(torch.rand(1), label) for label in labels]
        check_same(parse(*flags.split(), technique="ddp"), dataset)

    return in_group(check, len(ranks))


def test_equal_ranks_pass_and_a_machine_may_have_its_own_folders_and_cores():
    own = "--data-dir {0} --run-dir {0} --threads {0} --num-workers {0} --devices {0}"
    ranks = [(own.format(rank), 5, torch.tensor(6), FIRST, [1, 2]) for rank in (1, 2, 3)]
    assert compare(*ranks) == [None] * 3
    # Of labels of another kind only the number is compared.
    assert compare(("", 0.5, "cat", {"x": 1}), ("", float("nan"), "dog", {"x": 2})) == [None] * 2


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([("--lr 0.1",), ("--lr 0.1",), ("--lr 0.2",)], "rank 2 has --lr 0.2, rank 0 has 0.1"),
        ([("--weight-decay 0.1",), ("",)], "rank 1 has --weight-decay 0.0005, rank 0 has 0.1"),
        ([("", 1, 2), ("", 1)], r"rank 1 has the length of data set 0 1"),
        ([("", 1, 2), ("", 1, 3)], "the labels of data set 0"),
        ([("", FIRST), ("", SECOND)], "the labels of data set 0"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(ranks, message):
    errors = compare(*ranks)
    assert [type(error) for error in errors] == [UsageError] * len(ranks)
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(UsageError, match=message):
        raise errors[0]


def test_another_torch_is_named(monkeypatch):
    def check(rank):
        monkeypatch.setattr(torch, "__version__", f"2.{rank}")
        check_same(parse(technique="ddp"))

    assert "rank 1 has torch 2.1, rank 0 has 2.0" in str(in_group(check)[1])


class Opening(Dataset):
    """A data set that opens its file with the first sample, as one for many workers should."""

    opened_by = None

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        self.opened_by = self.opened_by or os.getpid()
        return torch.rand(3), index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_workers_read_is_not_opened_in_the_rank(workers):
    def check(rank):
        dataset = Opening()
        check_same(parse("--num-workers", workers, technique="ddp"), dataset)
        return dataset.opened_by == (None if workers else os.getpid())

    assert in_group(check, 1) == [True]


def test_a_rank_ends_with_its_status_its_exit_handlers_and_its_files(tmp_path):
    def end():
        atexit._clear()  # those of pytest
        atexit.register((tmp_path / "handler").touch)
        file = (tmp_path / "file").open("w")
        file.write("not flushed")
        end_process(7)

    assert ended(fork(end)) == [7]
    assert (tmp_path / "handler").exists()
    assert (tmp_path / "file").read_text() == "not flushed"
