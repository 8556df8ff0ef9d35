"""The run directory: which one is taken, what is refused in one line, and full disks."""

import json
import os
import sys
import time
from contextlib import nullcontext as nothing
from pathlib import Path

import pytest

from tests.processes import (
    fork,
    succeed,
    wait_until,
)
from utils.errors import UsageError
from utils.training.logger import Logger
from utils.training.progress import Progress
from utils.training.run_dir import Status, open_run

LINEAR = ["--model", "linear", "--no-tensorboard"]
FLAGS = {"lr": 0.1}


def open_any(folder=None, resume=False, agents=(), technique="single"):
    """Return the folder, and what the run there was before, or nothing if one begins."""
    launch = {"technique": technique, "agents": agents}
    launch["launch_id"] = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return open_run(folder and str(folder), resume, launch, FLAGS)


def write_status(folder, flags=FLAGS, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"state": "stopped", "technique": "single", "launch_id": "none", "global_step": 7}
    (folder / "status.json").write_text(json.dumps(content | changes))
    (folder / "args.json").write_text(json.dumps(flags))


def test_a_fresh_folder_is_made_and_one_with_a_run_needs_resume(tmp_path):
    folder = tmp_path / "deep" / "run"
    assert open_any(folder) == (folder, {})
    for state, said in (("stopped", "stopped"), ("running", "killed")):
        write_status(folder, state=state)
        with pytest.raises(UsageError, match=rf"holds a run \({said}\): continue it with --resume"):
            open_any(folder)
    assert open_any(folder, resume=True)[1]["lr"] == 0.1


def test_resume_begins_in_an_empty_folder_and_in_no_folder_of_others(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "slurm-7.out").touch()
    (tmp_path / "status.json").touch()
    assert open_any(tmp_path, resume=True)[1] == {"state": "unknown"}
    assert "holds no run yet, so this one begins at step 0" in capsys.readouterr().out
    (tmp_path / "logs" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"thesis.tex: is --run-dir misspelt"):
        open_any(tmp_path, resume=True)
    (tmp_path / "checkpoints").mkdir()
    assert open_any(tmp_path, resume=True)[1], "checkpoints without a status are a run"


@pytest.mark.parametrize(
    ("state", "same", "goes_on"),
    [
        ("failed", "name and flags", True),
        ("complete", "name and flags", False),
        ("complete", "agent and flags", True),
        ("running", "agent and name", False),
        ("running", "flags", False),
    ],
)
def test_only_a_restart_of_the_same_job_goes_on_unasked(
    state, same, goes_on, tmp_path, monkeypatch, capsys
):
    """A name that a person typed comes again, with other flags, or after the run was complete."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7" if "name" in same else "none")
    flags = FLAGS if "flags" in same else {"lr": 0.2}
    write_status(tmp_path / "runs" / "a", flags, state=state, launch_id="job 7", agents=[0, 5])
    monkeypatch.chdir(tmp_path)
    agents = [0, 4, 5] if "agent" in same else [0, 4]
    folder, before = open_any(agents=agents)
    assert (folder == Path("runs/a"), bool(before)) == (goes_on, goes_on)
    assert ("goes on at step 7" in capsys.readouterr().out) == goes_on
    with nothing() if goes_on else pytest.raises(UsageError, match="holds a run"):
        open_any("runs/a", agents=agents)


def test_without_a_folder_the_latest_run_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "half").mkdir(parents=True)
    (tmp_path / "runs" / "half" / "status.json").touch()
    with pytest.raises(UsageError, match=r"no single run of yours below runs/"):
        open_any(resume=True)
    for age, (name, technique) in enumerate({"b": "single", "a": "dp", "c": "single"}.items()):
        write_status(Path("runs") / name, technique=technique)
        os.utime(Path("runs") / name / "status.json", (age, age))
    assert open_any(resume=True)[0] == Path("runs/c")
    assert open_any(resume=True, technique="dp")[0] == Path("runs/a")
    assert open_any()[0] != open_any()[0], "two runs of one second"
    monkeypatch.setattr(os, "getuid", lambda: os.stat("runs").st_uid + 1)
    with pytest.raises(UsageError, match="of yours"):  # those above are another user's
        open_any(resume=True)


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"):
        open_any(tmp_path / "file" / "run")


def test_a_folder_is_locked_as_long_as_its_process_lives(tmp_path):
    holder = fork(lambda: [open_any(tmp_path), time.sleep(600)])
    lock = tmp_path / ".lock"
    wait_until(lambda: lock.exists() and lock.read_text())
    with pytest.raises(UsageError, match=f"is in use by process {holder.pid} on"):
        open_any(tmp_path)
    holder.kill()
    holder.join()
    assert open_any(tmp_path) == (tmp_path, {})


PYTHON = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = PYTHON | {"TORCHELASTIC_RUN_ID": "none"}
WORDS = "the same launch as before, with"


@pytest.mark.parametrize(
    ("words", "technique", "variables", "command"),
    [
        ("--init-weights=a.pt --resume --run-dir x --lr 1", "single", {}, "python x.py --lr 1"),
        ("--nprocs 2", "ddp", PYTHON, "python x.py --nprocs 2"),
        ("", "ddp", TORCHRUN, "torchrun --standalone --nproc_per_node 2 x.py"),
        ("", "ddp", TORCHRUN | {"WORLD_SIZE": "4"}, WORDS),  # several hosts
        ("", "ddp", PYTHON, WORDS),  # srun, mpirun, variables by hand
    ],
)
def test_how_to_continue_is_right_as_printed(words, technique, variables, command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", *words.split()])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    status = Status(Path("runs/a"), {"technique": technique}, Progress(100, 10, 3))
    assert status.how_to_continue() == f"{command} --run-dir runs/a --resume"


def test_metrics_keep_the_complete_rows_up_to_the_checkpoint(tmp_path):
    rows = [json.dumps({"epoch": epoch, "global_step": 10 * epoch}) for epoch in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"epo']))
    progress = Progress(100, 10, 3)
    progress.epoch, progress.global_step = 2, 20
    Logger(tmp_path, progress, is_main=True, tensorboard=False, show_bar=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == "\n".join([*rows[:2], ""])


def test_a_resume_says_what_is_other_than_before(training):
    def train(batch_size, *extra):
        ended = training.run("single", *LINEAR, "--batch-size", batch_size, *extra)
        return succeed(ended).stdout

    assert "note " not in train(96, "--epochs", 6, "--max-steps", 15)
    said = train(48, "--epochs", 3, "--max-steps", 50, "--resume")
    note = "epochs 3.0, was 6.0; max-steps 50, was 15; batch-size 48, was 96;"
    assert f"note    {note} global-batch-size 48, was 96\n" in said
    assert "rate    0.05 at the peak\n" in said
    advice = "raise --epochs or --max-steps; epochs 1.0, was 3.0; "
    said = train(1900, "--epochs", 1, "--resume")
    assert f"is complete: nothing to resume ({advice}" in said
