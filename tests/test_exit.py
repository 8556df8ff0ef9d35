"""The end of a rank: what is registered with atexit runs, and open files are flushed."""

import signal
import sys

import pytest

from tests.processes import copy_project, run

# What a user adds to train_ddp.py: rank 0 keeps a record of each epoch.
LINES = {
    "\n        for epoch in run.epochs()": "\n        own.begin(rank)",
    "\n            run.end_epoch(test)": "\n            own.note(rank)",
    "\nimport models": "\nimport own",
}
BEGIN = """
import atexit, os, signal, time

def begin(rank):
    if rank == 0:
        begin_record()

def note(rank):
    if rank == 0:
        record(12345)
    if os.environ["END"] == "exit" and rank == 0:
        raise SystemExit("no data is left")
    if os.environ["END"] == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    if os.environ["END"] == "raise" and rank == 0:
        raise ArithmeticError("wrong on purpose")
"""
FILE = """
def begin_record():
    global rows
    rows = open("rows.csv", "w")
    atexit.register(rows.write, "handled")

def record(value):
    rows.write(f"{value}\\n")
"""
WANDB = """
import wandb

def begin_record():
    wandb.init(project="mine", mode="offline")

def record(value):
    wandb.log({"value": value})
"""
MLFLOW = """
import mlflow

def begin_record():
    mlflow.start_run(run_name="mine")

def record(value):
    mlflow.log_metrics({"value": value})
"""
STUCK = FILE.replace('atexit.register(rows.write, "handled")', "atexit.register(time.sleep, 600)")
ENDS = ["done", "SIGTERM", "raise"]
STATUS = {"done": 0, "SIGTERM": 128 + signal.SIGTERM, "raise": 1, "exit": 1}
SLOW = [pytest.param(end, marks=pytest.mark.slow) for end in ("SIGTERM", "exit")]


@pytest.fixture
def train(short_dir, tmp_path):
    """Train an epoch on two ranks, whose script records something, to an end of some kind."""

    def train(code, end, **variables):
        copy_project(tmp_path, short_dir)
        script = tmp_path / "train_ddp.py"
        text = script.read_text()
        for old, new in LINES.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new + old if "for" in old else old + new)
        script.write_text(text)
        (tmp_path / "own.py").write_text(BEGIN + code)
        words = [sys.executable, script, "--nprocs", 2, "--threads", 1, "--no-progress"]
        words += ["--dataset", "synthetic", "--model", "linear"]
        words += ["--epochs", 50 if end == "SIGTERM" else 1]
        ended = run(*words, cwd=tmp_path, timeout=200, END=end, **variables)
        assert ended.returncode == STATUS[end], ended.text
        if end == "exit":  # the other rank says no more than that
            (line,) = [line for line in ended.stderr.splitlines() if "lost rank" not in line]
            assert line.startswith("train_ddp.py: error: ")
            assert "own.py, line 12, has called sys.exit(no data is left)" in line
        return tmp_path

    return train


@pytest.mark.parametrize("end", ["done", *SLOW])
def test_exit_handlers_run_and_files_are_flushed(end, train):
    rows = (train(FILE, end) / "rows.csv").read_text()
    assert rows.startswith("12345\n")
    assert rows.endswith("\nhandled")


@pytest.mark.slow
def test_an_exit_handler_that_waits_for_ever_is_left(train):
    assert (train(STUCK, "done") / "rows.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_wandb_has_the_last_value(end, train):
    pytest.importorskip("wandb", reason="needs wandb")
    (file,) = train(WANDB, end, WANDB_SILENT="true").glob("wandb/offline-run-*/run-*.wandb")
    assert b"12345" in file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_run_of_mlflow_is_finished(end, train):
    pytest.importorskip("mlflow", reason="needs mlflow")
    folder = train(MLFLOW, end, MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_TRACKING_URI="mlruns")
    (run_dir,) = (folder / "mlruns").glob("*/*/meta.yaml")
    assert "status: 1" not in run_dir.read_text(), "it is still running"
    assert " 12345" in (run_dir.parent / "metrics" / "value").read_text()
