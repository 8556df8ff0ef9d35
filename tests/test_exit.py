"""The end of a rank: what is registered with atexit runs, and open files are flushed."""

import sys

import pytest

from tests.processes import copy_project, run

# What a user adds to train_ddp.py: rank 0 keeps a record of each epoch.
OWN = """
import atexit, os

def begin():
    global rows
    rows = open("rows.csv", "w")
    atexit.register(rows.write, "handled")

def note():
    rows.write("12345\\n")
    if os.environ["END"] == "exit":
        raise SystemExit("no data is left")
"""
BEFORE_EPOCHS = "\n        for epoch in run.epochs()"
AFTER_EPOCH = "\n            run.end_epoch(test)"


@pytest.mark.parametrize("end", ["done", "exit"])
def test_exit_handlers_run_and_files_are_flushed(end, short_dir, tmp_path):
    script = copy_project(tmp_path, short_dir) / "train_ddp.py"
    text = script.read_text()
    assert text.count(BEFORE_EPOCHS) == text.count(AFTER_EPOCH) == 1
    begin, note = (f"\n{' ' * n}if rank == 0:\n{' ' * n}    own." for n in (8, 12))
    text = text.replace(BEFORE_EPOCHS, f"{begin}begin(){BEFORE_EPOCHS}")
    text = text.replace(AFTER_EPOCH, f"{AFTER_EPOCH}{note}note()")
    script.write_text(text.replace("\nimport models", "\nimport models\nimport own"))
    (tmp_path / "own.py").write_text(OWN)
    words = [sys.executable, script, "--nprocs", 2, "--threads", 1, "--no-progress"]
    words += ["--dataset", "synthetic", "--model", "linear", "--epochs", 1]
    ended = run(*words, cwd=tmp_path, END=end)
    assert ended.returncode == (end == "exit"), ended.text
    if end == "exit":  # the other rank says no more than that
        (line,) = [line for line in ended.stderr.splitlines() if "lost rank" not in line]
        assert line.startswith("train_ddp.py: error: ")
        assert "own.py, line 12, has called sys.exit(no data is left)" in line
    rows = (tmp_path / "rows.csv").read_text()
    assert rows == "12345\nhandled"
