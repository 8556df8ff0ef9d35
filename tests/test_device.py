"""The hardware of a process: whose word on CPU threads counts, and what is slow."""

import sys

import pytest
import torch

from tests.processes import run, succeed
from utils import device
from utils.cluster import launch
from utils.cluster.rank_info import RankInfo
from utils.device import setup_device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "variable", "torchrun", "threads"),
    [
        (3, "5", False, 3),
        (None, "5,2", True, 5),
        (None, "1", True, 2),
        (None, "1", False, 1),
        (None, "99999999", False, 2),
    ],
)
def test_whose_number_of_threads_counts(asked, variable, torchrun, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    for module in (device, launch):
        monkeypatch.setattr(module, "usable_cores", lambda: 8)
    before = torch.get_num_threads()
    try:
        launch.share_cores(RankInfo("torchrun" if torchrun else "environment"), 4)
        setup_device("cpu", threads=asked)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


FACTS = """
import gc, os, torch
from utils.device import setup_device, usable_cores
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
setup_device("cpu", deterministic=True)
print(usable_cores(), gc.isenabled(), torch.are_deterministic_algorithms_enabled())
"""


def test_what_is_set_up_for_a_process():
    """Cores that it may use, as in a container; garbage is collected; --deterministic refuses."""
    assert succeed(run(sys.executable, "-c", FACTS)).stdout == "1 True True\n"


UNSET = ("-u", "GOMP_SPINCOUNT", "-u", "OMP_WAIT_POLICY")


def test_a_users_own_word_on_waiting_counts():
    show = f"import utils.early, os; print(*map(os.getenv, {UNSET[1::2]}))"
    words = {"": "10000 None", "GOMP_SPINCOUNT=": " None", "OMP_WAIT_POLICY=ACTIVE": "None ACTIVE"}
    for own, expected in words.items():
        told = succeed(run("env", *UNSET, *own.split(), sys.executable, "-c", show)).stdout
        assert told == f"{expected}\n"
