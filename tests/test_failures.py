"""A rank that fails: the job ends soon, and names that rank instead of a healthy one."""

import json
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, Finished, flags, run

TIMEOUT = 5  # of a collective, seconds
WAITS = pytest.mark.long  # who is lost is told when a real time limit has passed


def fail(
    how: str, rank: int, processes: int, data_dir: Path, folder: Path, *launcher: str
) -> Finished:
    start = launcher or ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
    extra = ["--model", "mlp", "--max-steps", 400, "--save-every-steps", 2, "--timeout", TIMEOUT]
    arguments = [ROOT / "tests" / "faulty.py", *flags(data_dir, folder, *extra), "--threads", 1]
    command = (
        [sys.executable, *start, processes, *arguments]
        if not launcher
        else [sys.executable, *arguments, *launcher]
    )
    return run(*command, timeout=60, FAULT=how, FAULT_RANK=str(rank), FAULT_STEP="7")


@pytest.mark.parametrize(
    ("how", "rank", "processes", "message"),
    [
        pytest.param("stall", 1, 2, "lost rank 1 (", marks=WAITS),
        ("raise", 1, 2, "ArithmeticError: wrong on purpose"),
        pytest.param("leave", 1, 3, "lost rank 1 (", marks=pytest.mark.slow),
        pytest.param("leave while one computes", 1, 3, "lost rank 1 (", marks=pytest.mark.slow),
        pytest.param("kill", 1, 2, "SIGKILL", marks=pytest.mark.slow),
        pytest.param("stall", 0, 3, "lost rank 0 (", marks=pytest.mark.slow),
        pytest.param("nan", 1, 2, "the loss is nan at step 8 on rank 1", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_failed_is_named(
    how: str, rank: int, processes: int, message: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    result = fail(how, rank, processes, synthetic_dir, tmp_path / "run")
    assert result.returncode == 1
    assert message in result.text, result.text
    healthy = [other for other in range(processes) if other != rank]
    assert not any(f"lost rank {other} (" in result.text for other in healthy), result.text
    # The start of two ranks under torchrun takes up to ten seconds on two busy cores.
    assert result.seconds < TIMEOUT + 5 + 20
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    if rank != 0:  # which else takes its word along
        assert status["state"] == "failed"
        assert how == "raise" or status["ranks"] == [rank], status
        assert how != "nan" or "the loss is nan at step 8 on rank 1" in status["reason"]
        assert how == "raise" or f"lost rank {rank} (" in status["reason"], status
    checkpoint = tmp_path / "run" / "checkpoints" / "last.pt"
    assert checkpoint.exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param(
            "batches", "has images: [59500, 10000], rank 0 [60000, 10000]", marks=pytest.mark.slow
        ),
        ("dtype", "rank 1 has 1.weight: float64 (256, 784), rank 0 float32 (256, 784)"),
        pytest.param("frozen", "(256, 784), frozen, rank 0 float32 (", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_differ_are_told_before_the_first_step(
    how: str, message: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    """Otherwise the first would hang in its last batch; the others compute nonsense or crash."""
    result = fail(how, 1, 2, synthetic_dir, tmp_path / "run")
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if "faulty.py: error" in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_collective_of_one_rank_cannot_corrupt_a_sum(synthetic_dir: Path, tmp_path: Path) -> None:
    """gloo pairs calls by their order alone, and adds up what does not belong together."""
    result = fail("collective", 1, 2, synthetic_dir, tmp_path / "run")
    assert result.returncode == 1
    assert "collective mismatch in your code" in result.stderr  # gloo's own, where sizes differ
    assert not (tmp_path / "run" / "summary.json").exists()


OUT_OF_STEP = """
import sys
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from utils.distributed import AgreedMax
from utils.metrics import Metrics, OutOfStep
dist.init_process_group("gloo")
metrics = Metrics(torch.device("cpu"), [1.0, 2.0, 3.0])
assert metrics.sum_over_ranks().state() == [2.0, 4.0, 6.0]
agreed = AgreedMax()
assert [agreed(dist.get_rank()), agreed(0)] == [0, 1]
if dist.get_rank() == 1:
    dist.all_reduce(torch.ones({size}, dtype=torch.{dtype}))
else:
    try:
        {call}
    except OutOfStep as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("call", "size", "dtype"),
    [("metrics.sum_over_ranks()", 4, "float64"), ("agreed(0); agreed(0)", 3, "int64")],
)
def test_calls_of_the_same_size_are_told_apart(
    call: str, size: int, dtype: str, tmp_path: Path
) -> None:
    text = OUT_OF_STEP.format(call=call, size=size, dtype=dtype, root=str(ROOT))
    (tmp_path / "out_of_step.py").write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    result = run(sys.executable, *launcher, tmp_path / "out_of_step.py")
    assert result.stdout.count("the ranks are out of step") == 1, result.text


@pytest.mark.slow
def test_spawn_names_the_rank_that_was_killed(synthetic_dir: Path, tmp_path: Path) -> None:
    result = fail("kill", 1, 2, synthetic_dir, tmp_path / "run", "--nprocs", "2")
    assert result.returncode == 1
    assert "rank 1" in result.stderr
    assert "SIGKILL" in result.stderr


JOINING = ["--rdzv-timeout", 6]


@WAITS
@pytest.mark.parametrize(
    ("how", "when", "rank", "processes", "message"),
    [
        ("stall", "data", 1, 2, "rank 0 met rank 1 ("),
        ("stall", "group", 0, 2, "rank 1 met rank 0 ("),
        pytest.param("stall", "data", 0, 3, "met rank 0 (", marks=pytest.mark.slow),
        pytest.param("stall", "group", 1, 3, "met rank 1 (", marks=pytest.mark.slow),
        pytest.param("stall", "group", 2, 3, "met rank 2 (", marks=pytest.mark.slow),
        pytest.param("leave", "data", 1, 3, "met rank 1 (", marks=pytest.mark.slow),
        pytest.param("leave", "group", 1, 2, "rank 0 met rank 1 (", marks=pytest.mark.slow),
        pytest.param("leave", "group", 0, 2, "rank 1 met rank 0 (", marks=pytest.mark.slow),
    ],
)
def test_who_does_not_come_to_the_process_group_is_named(
    how: str,
    when: str,
    rank: int,
    processes: int,
    message: str,
    synthetic_dir: Path,
    tmp_path: Path,
) -> None:
    """Rank 0's store is that of the group: while it is stopped PyTorch waits without a limit."""
    result, seconds = go_wrong(how, when, rank, processes, synthetic_dir, tmp_path, *JOINING)
    assert result.returncode == 1
    assert message in result.text, result.text
    healthy = [other for other in range(processes) if other != rank]
    assert not any(f"met rank {other} (" in result.text for other in healthy), result.text
    assert "on all ports" not in result.text
    assert "Exception raised from" not in result.text, "C++ frames"
    assert seconds < 6 + 5 + 5  # the bound, and torchrun's end on a busy machine


@WAITS
@pytest.mark.parametrize(
    ("how", "processes"), [("stall", 2), pytest.param("kill", 3, marks=pytest.mark.slow)]
)
def test_rank_0_does_not_write_the_results(
    how: str, processes: int, synthetic_dir: Path, tmp_path: Path
) -> None:
    """The others have nothing left to do, and nobody else would notice."""
    timeout = ["--max-steps", 20, "--timeout", TIMEOUT]
    result, seconds = go_wrong(how, "results", 0, processes, synthetic_dir, tmp_path, *timeout)
    assert result.returncode == 1
    assert "rank 1 lost rank 0 (" in result.text
    assert "after the last step" in result.text
    assert "Exception raised from" not in result.text, "C++ frames"
    assert not (tmp_path / "run" / "summary.json").exists()
    assert seconds < TIMEOUT + 5 + 5


def go_wrong(
    how: str, when: str, rank: int, processes: int, data_dir: Path, folder: Path, *extra: object
) -> tuple[Finished, float]:
    """Let one of torchrun's ranks go wrong; return what came of it, and after how many seconds."""
    flag, launcher = folder / "flag", ["-m", "torch.distributed.run", "--standalone"]
    arguments = flags(data_dir, folder / "run", "--model", "linear", *extra)
    result = run(
        *(sys.executable, *launcher, "--nproc_per_node", processes),
        *(ROOT / "tests" / "faulty.py", *arguments, "--threads", 1),
        timeout=90,
        FAULT=how,
        FAULT_RANK=str(rank),
        FAULT_STEP=when,
        FAULT_FLAG=str(flag),
    )
    return result, time.time() - flag.stat().st_mtime
