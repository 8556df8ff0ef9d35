"""A rank that fails: the job ends soon, and names that rank instead of a healthy one."""

import json
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, Finished, run
from tests.test_scripts import flags

TIMEOUT = 5  # of a collective, seconds


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
        ("stall", 1, 2, "lost rank 1 ("),
        ("raise", 1, 2, "ArithmeticError: wrong on purpose"),
        pytest.param("leave", 1, 3, "lost rank 1 (", marks=pytest.mark.slow),
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
        pytest.param("batches", "has images [59500, 10000], rank 0 (", marks=pytest.mark.slow),
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
import torch, torch.distributed as dist
from utils.distributed import largest
from utils.metrics import Metrics, OutOfStep
dist.init_process_group("gloo")
metrics = Metrics(torch.device("cpu"), [1.0, 2.0, 3.0])
assert metrics.all_reduce().state() == [2.0, 4.0, 6.0] and largest(dist.get_rank()) == 1
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
    [("metrics.all_reduce()", 4, "float64"), ("largest(0)", 3, "int64")],
)
def test_calls_of_the_same_size_are_told_apart(
    call: str, size: int, dtype: str, tmp_path: Path
) -> None:
    text = OUT_OF_STEP.format(call=call, size=size, dtype=dtype)
    (tmp_path / "out_of_step.py").write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]
    result = run(sys.executable, *launcher, tmp_path / "out_of_step.py", PYTHONPATH=str(ROOT))
    assert result.stdout.count("the ranks are out of step") == 1, result.text


@pytest.mark.slow
def test_spawn_names_the_rank_that_was_killed(synthetic_dir: Path, tmp_path: Path) -> None:
    result = fail("kill", 1, 2, synthetic_dir, tmp_path / "run", "--nprocs", "2")
    assert result.returncode == 1
    assert "rank 1" in result.stderr
    assert "SIGKILL" in result.stderr
