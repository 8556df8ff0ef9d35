"""What was interrupted goes on as if it had not been, and what goes wrong ends soon."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset, dataloader

from tests.processes import ROOT, finish, metrics, run, script, start, summary
from tests.test_scripts import command, flags, succeed
from utils import errors

FEW = ["--model", "linear", "--max-steps", 6, "--save-every-steps", 3]


def dying(technique: str, how: str, *arguments: Any, **options: Any) -> Any:
    """Run a script of which a place goes wrong; see tests/dies.py."""
    words = script(f"train_{technique}.py", *arguments)[1:]
    words[0] = f"train_{technique}.py"
    return run(sys.executable, ROOT / "tests" / "dies.py", *words, DIES=how, **options)


@pytest.mark.parametrize("technique", ["single", "dp", "ddp"])
def test_an_evaluation_that_was_killed_is_made_on_resume(
    technique: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    """Between the save after the last step and the end of the evaluation nothing is complete."""
    folder = tmp_path / "run"
    killed = dying(technique, "evaluate", *flags(synthetic_dir, folder, *FEW))
    assert killed.returncode == -signal.SIGKILL, killed.text
    assert not (folder / "metrics.jsonl").exists()
    again = [*flags(synthetic_dir, folder, *FEW), "--resume"]
    succeed(run(*script(f"train_{technique}.py", *again)))
    facts = summary(folder)
    assert (facts["test_count"], facts["global_step"]) == (10_000, 6)
    assert 0 < facts["test_accuracy"] < 1
    [row] = metrics(folder)
    assert row["global_step"] == 6
    assert 0 < row["learning_rate"] < 0.2  # that of the last step, though it was made before


@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_a_run_that_was_killed_before_its_summary_keeps_its_metrics(
    technique: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    """All is evaluated and saved; the epoch, which --max-steps cut short, has not ended."""
    folder = tmp_path / "run"
    killed = dying(technique, "complete", *flags(synthetic_dir, folder, *FEW))
    assert killed.returncode == -signal.SIGKILL, killed.text
    before = metrics(folder)
    again = [*flags(synthetic_dir, folder, *FEW), "--resume"]
    succeed(run(*script(f"train_{technique}.py", *again)))
    assert metrics(folder) == before
    assert len(before) == 1
    assert summary(folder)["test_accuracy"] == before[0]["test_accuracy"]


def test_stopped_at_the_very_last_step(synthetic_dir: Path, tmp_path: Path) -> None:
    """The signal comes while the last step is made."""
    few = ["--model", "linear", "--max-steps", 1, "--batch-size", 60_000]
    process = start(*script("train_single.py", *flags(synthetic_dir, tmp_path / "run", *few)))
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "status.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process, 60)
    assert stopped.returncode in (0, 143), stopped.text
    if stopped.returncode == 143:
        again = [*flags(synthetic_dir, tmp_path / "run", *few), "--resume"]
        succeed(run(*script("train_single.py", *again)))
    assert summary(tmp_path / "run")["test_count"] == 10_000
    assert len(metrics(tmp_path / "run")) == 1


@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_an_exception_ends_the_run_although_loader_workers_live(
    technique: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    arguments = flags(synthetic_dir, tmp_path / "run", "--model", "linear", "--num-workers", 2)
    ended = dying(technique, "forward", *arguments, timeout=60)
    assert ended.returncode == 1
    assert "ArithmeticError: wrong on purpose" in ended.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "ArithmeticError: wrong on purpose" in status["reason"]


def test_a_loader_worker_that_is_killed_ends_the_run_with_one_line(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    """Out of memory, the kernel kills one of them."""
    arguments = ["--model", "linear", "--num-workers", 2, "--epochs", 500]
    words = script("train_single.py", *flags(synthetic_dir, tmp_path / "run", *arguments))
    process = start(*words, real=True)  # with no children but its loader's
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    psutil.Process(process.pid).children()[0].kill()
    ended = finish(process, 60)
    assert ended.seconds < 30
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "a loader worker died" in ended.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert "a loader worker died" in status["reason"]


def test_a_lost_connection_is_not_taken_for_a_dead_loader_worker() -> None:
    """A data set, a log or a store may lose one, too."""

    class Remote(Dataset):
        def __getitem__(self, index: int) -> int:
            raise ConnectionResetError("the storage is gone")

        def __len__(self) -> int:
            return 1

    class Receiver:
        def _try_get_data(self) -> None:  # as the loader calls the place
            raise EOFError

    for loader in (DataLoader(Remote()), DataLoader(Remote(), num_workers=1)):
        with pytest.raises(ConnectionResetError) as caught:
            next(iter(loader))
        assert errors.explain(caught.value) is caught.value
    with pytest.raises(EOFError) as ended:
        Receiver()._try_get_data()
    assert "a loader worker died (EOFError)" in str(errors.explain(ended.value))
    assert hasattr(dataloader._MultiProcessingDataLoaderIter, "_try_get_data")


@pytest.mark.parametrize("technique", ["single", "dp", "ddp"])
def test_nothing_that_diverged_is_saved(
    technique: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    """Not at the end of an epoch either, when the sums of the epoch were emptied."""
    folder = tmp_path / "run"
    arguments = ["--model", "linear", "--save-every-steps", 2, "--keep", 1]
    ended = dying(technique, "nan", *flags(synthetic_dir, folder, *arguments), timeout=60)
    assert ended.returncode == 1
    assert "not finite" in ended.stderr or "the loss is nan" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert not (folder / "summary.json").exists()
    # What was saved before is whole, and goes on.
    again = [*flags(synthetic_dir, folder, *FEW), "--resume"]
    succeed(run(*command(technique, 1, *again)))
    assert summary(folder)["test_count"] == 10_000


@pytest.mark.parametrize(
    "redirection",
    [
        "| head -1",
        pytest.param(">&- 2>&- <&-", marks=pytest.mark.slow),
        pytest.param("> /dev/full", marks=pytest.mark.slow),
        pytest.param(">&-", marks=pytest.mark.slow),
        pytest.param("2>&-", marks=pytest.mark.slow),
    ],
)
def test_output_that_nobody_takes_ends_no_training(
    redirection: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    arguments = flags(synthetic_dir, tmp_path / "run", *FEW)
    words = " ".join(map(str, script("train_single.py", *arguments)))
    ended = run("bash", "-c", f"set -o pipefail; {words} {redirection}")
    assert ended.returncode == 0, ended.text
    assert "Traceback" not in ended.text
    assert summary(tmp_path / "run")["test_count"] == 10_000


@pytest.mark.slow
def test_a_name_that_no_terminal_can_show(synthetic_dir: Path, tmp_path: Path) -> None:
    arguments = flags(synthetic_dir, tmp_path / "r\u00fcn", *FEW)
    ended = run(*script("train_single.py", *arguments), PYTHONIOENCODING="ascii")
    assert ended.returncode == 0, ended.text
    assert (tmp_path / "r\u00fcn" / "summary.json").exists()


@pytest.mark.slow
def test_too_few_open_files_is_one_line(synthetic_dir: Path, tmp_path: Path) -> None:
    arguments = flags(synthetic_dir, tmp_path / "run", *FEW, "--num-workers", 2)
    words = " ".join(map(str, script("train_single.py", *arguments)))
    ended = run("bash", "-c", f"ulimit -n 24; {words}", timeout=60)
    assert ended.returncode == 1, ended.text
    # A loader worker may report the same of itself before.
    assert ended.stderr.count("train_single.py: error: ") == 1, ended.stderr
    assert "ulimit -n" in ended.stderr.splitlines()[-1]
