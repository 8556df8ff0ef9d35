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
    assert status["state"] in ("failed", "running")
    checkpoint = tmp_path / "run" / "checkpoints" / "last.pt"
    assert checkpoint.exists()


@pytest.mark.slow
def test_spawn_names_the_rank_that_was_killed(synthetic_dir: Path, tmp_path: Path) -> None:
    result = fail("kill", 1, 2, synthetic_dir, tmp_path / "run", "--nprocs", "2")
    assert result.returncode == 1
    assert "rank 1" in result.stderr
    assert "SIGKILL" in result.stderr
