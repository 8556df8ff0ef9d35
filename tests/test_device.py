"""The hardware of a process: whose word on CPU threads counts, and what is slow."""

import sys

import pytest
import torch

from tests.processes import ROOT, run, script
from tests.test_interrupted import FEW
from tests.test_scripts import flags, succeed
from utils import device
from utils.device import Precision, setup_device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "variable", "torchrun", "threads"),
    [
        (3, "5", False, 3),
        (None, "5", False, 5),
        (None, "5,2", False, 5),
        (None, "5", True, 2),
        (3, "5", True, 3),
        (None, "many", False, 2),
        (None, "0", False, 2),
        (None, "99999999", False, 2),
        (None, "9" * 5000, False, 2),
        (None, "", False, 2),
    ],
)
def test_whose_number_of_threads_counts(
    asked: int | None,
    variable: str,
    torchrun: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(device, "usable_cores", lambda: 8)
    before = torch.get_num_threads()
    try:
        setup_device(CPU, asked, processes=4)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


IMPORTS = """
import gc, sys, torch
from utils import device
if {early}: device.import_dynamo()
print("torch._dynamo" in sys.modules, gc.get_stats()[2]["collections"], gc.isenabled())
torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_what_an_optimizer_imports_is_imported_without_looking_for_garbage() -> None:
    """Where the first one no longer imports it by itself, ``import_dynamo`` has to go."""

    def lines(early: bool) -> list[str]:
        code = IMPORTS.format(early=early)
        return succeed(run(sys.executable, "-c", code, cwd=ROOT, real=True)).stdout.split()

    late, early = lines(False), lines(True)
    assert (late[0], late[3]) == ("False", "True")
    assert (early[0], early[2:]) == ("True", ["True", "True"])
    assert early[1] == late[1], "collections of the oldest generation"


@pytest.mark.parametrize(("amp", "lines"), [("fp16", 1), ("bf16", 0), ("off", 0)])
def test_fp16_on_a_cpu_is_warned_of(
    amp: str, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Precision(CPU, amp)
    assert capsys.readouterr().err.count("fp16 on a CPU is several times slower") == lines


@pytest.mark.slow
def test_a_users_threads_reach_the_header(synthetic_dir, tmp_path) -> None:  # type: ignore[no-untyped-def]
    words = script("train_single.py", *flags(synthetic_dir, tmp_path / "run", *FEW))
    at = words.index("--threads")
    ended = succeed(run(*words[:at], *words[at + 2 :], OMP_NUM_THREADS="3"))
    assert "cpu, 3 threads" in ended.stdout


SHOW = "OMP_DISPLAY_ENV=VERBOSE"  # libgomp tells its settings when it is loaded
UNSET = ("-u", "GOMP_SPINCOUNT", "-u", "OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    "technique",
    [
        "single",
        pytest.param("dp", marks=pytest.mark.slow),
        pytest.param("ddp", marks=pytest.mark.slow),
    ],
)
def test_threads_that_wait_soon_sleep(technique: str) -> None:
    """What OpenMP itself says: the variable has to be there before torch."""
    ended = run("env", *UNSET, SHOW, sys.executable, ROOT / f"train_{technique}.py", "--help")
    assert ended.returncode == 0, ended.text
    if "GOMP_SPINCOUNT" not in ended.stderr:
        pytest.skip("needs a PyTorch that was built with libgomp")
    assert "GOMP_SPINCOUNT = '10000'" in ended.stderr


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([], "10000 None"),
        (["GOMP_SPINCOUNT=5"], "5 None"),
        (["GOMP_SPINCOUNT="], " None"),
        (["OMP_WAIT_POLICY=ACTIVE"], "None ACTIVE"),
        (["GOMP_SPINCOUNT=7", "OMP_WAIT_POLICY=ACTIVE"], "7 ACTIVE"),
    ],
)
def test_a_users_own_word_on_waiting_counts(own: list[str], expected: str) -> None:
    show = f"import utils.early, os; print(*map(os.getenv, {UNSET[1::2]}))"
    ended = run("env", *UNSET, *own, sys.executable, "-c", show)
    assert ended.returncode == 0, ended.text
    assert ended.stdout == f"{expected}\n"
