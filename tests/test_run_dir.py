"""The run directory: which one is taken, what is refused in one line, and full disks."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.processes import (
    command,
    error_line,
    finish,
    flags,
    run,
    script,
    start,
    status,
    succeed,
    summary,
    wait_until,
)
from utils.errors import UsageError
from utils.logger import Logger
from utils.progress import Progress
from utils.run_dir import open_run
from utils.status import Status

LINEAR = ["--model", "linear", "--no-tensorboard"]
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system")


def open_there(folder, resume=False):
    return open_run(str(folder), "single", resume)


def write_status(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"state": "stopped", "technique": "single", "launch_id": None, **changes}
    (folder / "status.json").write_text(json.dumps(content))


def test_a_fresh_folder_is_made_and_one_with_a_run_needs_resume(tmp_path):
    folder = tmp_path / "deep" / "run"
    assert not open_there(folder).resume
    write_status(folder)
    with pytest.raises(UsageError, match=r"holds a run \(stopped\): continue it with --resume"):
        open_there(folder)
    assert open_there(folder, resume=True).resume
    write_status(folder, state="running")
    with pytest.raises(UsageError, match=r"holds a run \(killed\)"):
        open_there(folder)
    write_status(folder, state="complete")
    assert open_there(folder, resume=True).is_complete


def test_resume_begins_in_an_empty_folder_and_in_no_folder_of_others(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "slurm-7.out").touch()
    assert not open_there(tmp_path, resume=True).resume
    assert "holds no run yet, so this one begins at step 0" in capsys.readouterr().out
    (tmp_path / "logs" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"thesis.tex: is --run-dir misspelt"):
        open_there(tmp_path, resume=True)
    (tmp_path / "checkpoints").mkdir()
    assert open_there(tmp_path, resume=True).resume, "checkpoints without a status are a run"


def test_a_launcher_that_restarts_us_continues_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    write_status(tmp_path, launch_id="job 8")
    with pytest.raises(UsageError, match="holds a run"):
        open_there(tmp_path)
    write_status(tmp_path, launch_id="job 7")
    assert open_there(tmp_path).resume
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_PORT", "29400")
    assert open_there(tmp_path, resume=True).launch_id.endswith(f":29400/{os.getppid()}")


def test_without_a_folder_the_launcher_s_run_or_the_latest_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no run of train_single\.py below runs/"):
        open_run(None, "single", True)
    runs = {"b": {}, "a": {"technique": "dp"}, "c": {"launch_id": "job 7"}}
    for age, (name, details) in enumerate(runs.items()):
        write_status(Path("runs") / name, **details)
        os.utime(Path("runs") / name / "status.json", (age, age))
    assert open_run(None, "single", True).path == Path("runs/c")
    assert open_run(None, "dp", True).path == Path("runs/a")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    assert open_run(None, "single", False).path == Path("runs/c")
    assert not open_run(None, "ddp", False).resume
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    first, second = (open_run(None, "single", False) for _ in range(2))
    assert first.path != second.path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "File exists"),
        ("file/run", "Not a directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_folder_that_cannot_be_one(name, reason, tmp_path):
    (tmp_path / "file").touch()
    for resume in (False, True):
        with pytest.raises(UsageError, match=reason) as error:
            open_there(f"{tmp_path}/{name}", resume)
        assert "\n" not in str(error.value)


def test_the_lock_ends_with_its_process_and_not_with_its_children(tmp_path):
    """A loader worker that outlives a killed run does not keep others out."""
    code = "import os, sys, time; from utils.run_dir import open_run\n"
    code += "open_run(sys.argv[1], 'single', False)\n"
    code += "if not os.fork(): time.sleep(60)\nprint('locked', flush=True)\ntime.sleep(60)\n"
    holder = start(sys.executable, "-c", code, tmp_path)
    try:
        assert holder.stdout.readline() == "locked\n"
        attempt = [sys.executable, "-c", code.replace("sleep(60)", "sleep(0)"), tmp_path]
        assert f"is in use by process {holder.pid} on" in run(*attempt).stderr
        holder.kill()
        holder.wait(timeout=10)
        assert "locked\n" in run(*attempt).stdout
    finally:
        os.killpg(holder.pid, 9)
        holder.communicate(timeout=10)


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("--epochs 3 --init-weights a.pt --seed 1", "--epochs 3 --seed 1"),
        ("--init-weights=a.pt --resume --run-dir x", ""),
        ("--run-dir=x --lr 0.1", "--lr 0.1"),
    ],
)
def test_the_command_that_continues_runs_as_printed(words, left, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_single.py", *words.split()])
    printed = Status(tmp_path, "single", None, Progress(100, 10, 3)).continue_command()
    begin = f"python train_single.py {left}".strip()
    assert printed == f"{begin} --run-dir {tmp_path} --resume"


def test_metrics_keep_the_complete_rows_up_to_the_checkpoint(tmp_path):
    rows = [json.dumps({"epoch": epoch, "global_step": 10 * epoch}) for epoch in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"epo']))
    progress = Progress(100, 10, 3)
    progress.epoch, progress.global_step = 2, 20
    Logger(tmp_path, progress, is_main=True, tensorboard=False, show_bar=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == f"{rows[0]}\n{rows[1]}\n"


def test_a_start_that_fails_leaves_no_run_that_looks_killed(synthetic_dir, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    words = script("train_single.py", *flags(synthetic_dir, tmp_path, *LINEAR))
    assert "metrics.jsonl: Is a directory" in error_line(run(*words), 1)
    assert not (tmp_path / "status.json").exists()


# Disks


def mount(*words):
    mounted = run("mount", *words)
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount: {mounted.stderr.strip()}")


@NEEDS_ROOT
@pytest.mark.parametrize("when", ["at the start", pytest.param("later", marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_costs_no_checkpoint(when, short_dir, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=34m", "tmpfs", disk)
    try:
        # 1.2 million weights and as many of momentum: 9.6 MB a checkpoint.
        extra = ["--model", "basic", "--batch-size", 16, "--no-tensorboard", "--max-steps"]
        words = script("train_single.py", *flags(short_dir, disk / "run", *extra))
        succeed(run(*words, 2))
        left = 12_000_000 if when == "later" else 0  # for one more checkpoint
        space = os.statvfs(disk)
        (disk / "rest").write_bytes(bytes(max(0, space.f_bavail * space.f_frsize - left)))
        more = [*words, 9, "--resume", "--save-every-steps", 3]
        ended = run(*more)
        assert "No space left on device" in error_line(ended, ended.returncode)
        assert ended.returncode in (1, 2)
        new = script("train_single.py", *flags(short_dir, disk / "new", *extra), 1)
        ended = run(*new)  # 2 if no folder could be made, 1 if the run could not write to it
        assert when == "later" or "No space left" in error_line(ended, ended.returncode)
        (disk / "rest").unlink()
        succeed(run(*more))
        assert summary(disk / "run")["resumed_from"] in (2, 3)
    finally:
        run("umount", disk)


@NEEDS_ROOT
@pytest.mark.slow
def test_a_folder_that_becomes_read_only(synthetic_dir, tmp_path):
    """At the start nothing begins; later the last checkpoint stays, and the run fails."""
    folder = tmp_path / "run"
    extra = ["--model", "convnet", "--save-every-steps", 3, "--max-steps", 2000]
    words = command("single", 1, *flags(synthetic_dir, folder, *extra))
    process = start(*words)
    wait_until((folder / "checkpoints" / "last.pt").exists)
    try:
        for options in ("bind", "remount,ro,bind"):
            mount("-o", options, folder / "checkpoints", folder / "checkpoints")
        said = error_line(finish(process, timeout=60), 1)
        refused = run(*words[:-1], 9, "--run-dir", folder / "checkpoints" / "new")
    finally:
        process.kill()
        run("umount", folder / "checkpoints")
    assert "Read-only file system; earlier checkpoints are whole" in said
    assert status(folder)["state"] == "failed"
    assert "cannot be written (Read-only file system)" in error_line(refused)
    succeed(run(*words[:-1], status(folder)["global_step"] + 9, "--resume"))
