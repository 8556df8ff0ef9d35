"""The run directory: what is refused in one line, and what goes on although its status is lost."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, Finished, run, script, summary
from tests.test_scripts import flags, succeed
from utils.errors import UsageError, UserError
from utils.run_dir import Complete, RunDir, open_run, read_status

QUICK = ["--model", "linear", "--no-tensorboard"]


def open_there(folder: Path | str, resume: bool = False, **options: Any) -> RunDir:
    return open_run(str(folder), "single", resume, 1, options.pop("max_steps", None), **options)


def write_status(folder: Path, **changes: Any) -> dict[str, Any]:
    status = {"state": "stopped", "technique": "single", "epoch": 0, "global_step": 7}
    status |= {"launch_id": None, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps(status))
    return status


def refused(result: Finished, status: int) -> str:
    """Return the one line with which a process ended."""
    assert result.returncode == status, result.text
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_a_fresh_folder_is_made_and_one_with_a_run_needs_resume(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    assert open_there(folder) == RunDir(folder, False)
    write_status(folder)
    with pytest.raises(UsageError, match=r"holds a run \(stopped\): continue it with --resume"):
        open_there(folder)
    assert open_there(folder, resume=True) == RunDir(folder, True)
    write_status(folder, state="running")
    with pytest.raises(UsageError, match=r"holds a run \(killed\)"):
        open_there(folder)


def test_a_complete_run_has_nothing_left_but_beyond_its_limits(tmp_path: Path) -> None:
    write_status(tmp_path, state="complete", epoch=1)
    with pytest.raises(Complete, match="raise --epochs to go on") as complete:
        open_there(tmp_path, resume=True)
    assert isinstance(complete.value, UserError)
    assert complete.value.exit_status == 0
    assert open_run(str(tmp_path), "single", True, 2, None).resume
    write_status(tmp_path, state="complete", global_step=7)
    with pytest.raises(Complete, match="raise --max-steps to go on"):
        open_there(tmp_path, resume=True, max_steps=7)
    assert open_there(tmp_path, resume=True, max_steps=8).resume


def test_a_launcher_that_restarts_us_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_status(tmp_path, launch_id="job 7")
    with pytest.raises(UsageError, match="holds a run"):
        open_there(tmp_path, launch_id="job 8")
    assert open_there(tmp_path, launch_id="job 7") == RunDir(tmp_path, True, "job 7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    assert open_there(tmp_path) == RunDir(tmp_path, True, "job 7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("MASTER_PORT", "29400")
    assert str(open_there(tmp_path, resume=True).launch_id).endswith(f":29400/{os.getppid()}")


def test_without_a_folder_the_launcher_s_run_or_the_latest_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no run of train_single\.py below runs/"):
        open_run(None, "single", True, 1, None)
    for age, (name, details) in enumerate(
        {"b": {}, "a": {"technique": "dp"}, "c": {"launch_id": "job 7"}, "d": {"state": 7}}.items()
    ):
        write_status(Path("runs") / name, **details)
        os.utime(Path("runs") / name / "status.json", (age, age))
    os.symlink("nowhere", "runs/e")
    (tmp_path / "runs" / "f").mkdir()
    os.symlink("nowhere", "runs/f/status.json")
    assert open_run(None, "single", True, 1, None).path == Path("runs/c")
    assert open_run(None, "dp", True, 1, None).path == Path("runs/a")
    assert open_run(None, "single", False, 1, None, launch_id="job 7").path == Path("runs/c")
    assert not open_run(None, "ddp", False, 1, None, launch_id="job 7").resume
    first, second = (open_run(None, "single", False, 1, None) for _ in range(2))
    assert first.path != second.path
    assert not first.resume


def test_what_rank_0_hands_out_is_small() -> None:
    run_dir = RunDir(Path("runs/x"), True, "job 7")
    assert pickle.loads(pickle.dumps(run_dir)) == run_dir
    assert len(pickle.dumps(run_dir)) < 300


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "x").touch()


def text(content: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return write


def status_with(**changes: Any) -> Callable[[Path], None]:
    return lambda path: void(write_status(path.parent, **changes))


def void(result: object) -> None:
    """Take a result that nobody wants."""


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(100_000_000)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": text(""),
    "torn": text('{"state": "runn'),
    "zeros": text(b"\0" * 500),
    "no UTF-8": text(b'{"state": "\xff\xfe"}'),
    "too deep": text("[" * 200_000),
    "deep and whole": text("[" * 100_000 + "]" * 100_000),
    "a list": text("[1, 2]"),
    "a number": text("7"),
    "null": text("null"),
    "no state": text("{}"),
    "a state of its own": status_with(state="x\x1b[2J"),
    "a state that is a list": status_with(state=["complete"]),
    "an epoch that is a word": status_with(epoch="x"),
    "a negative epoch": status_with(epoch=-1),
    "an epoch that is true": status_with(epoch=True),
    "an epoch without end": text('{"state": "complete", "epoch": 1e400, "global_step": 1}'),
    "an epoch of 5,000 digits": text(f'{{"state": "complete", "epoch": {"9" * 5_000}}}'),
    "a step that is null": status_with(global_step=None),
    "a fractional step": status_with(global_step=1.5),
    "no step": text('{"state": "complete", "epoch": 1}'),
    "100 MB": sparse,
    "a folder": Path.mkdir,
    "a full folder": folder_with_a_file,
    "a FIFO": fifo,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_status_is_one_line_and_can_be_resumed(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[damage](tmp_path / "status.json")
    begin = time.monotonic()
    assert read_status(tmp_path) == {"state": "damaged"}
    with pytest.raises(UsageError, match=r"holds a run \(damaged\): continue it with --resume"):
        open_there(tmp_path)
    assert open_there(tmp_path, resume=True, max_steps=1).resume
    assert time.monotonic() - begin < 30, "it waited"
    told = capsys.readouterr()
    assert told.err == f"warning: {tmp_path}/status.json is damaged; its checkpoints count\n"
    assert told.out == ""
    (tmp_path / "status.json.tmp").write_text("{}")
    os.replace(tmp_path / "status.json.tmp", tmp_path / "status.json")


def test_what_the_launcher_s_name_holds_is_only_compared(tmp_path: Path) -> None:
    write_status(tmp_path, launch_id=["job 7"], technique={"a": 1})
    with pytest.raises(UsageError, match="holds a run"):
        open_there(tmp_path, launch_id="job 7")


def test_checkpoints_without_a_status_are_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="damaged"):
        open_there(tmp_path)
    assert open_there(tmp_path, resume=True).resume


@pytest.mark.parametrize("damage", ["torn", "a full folder"])
def test_a_run_with_a_damaged_status_goes_on(
    damage: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    arguments = flags(synthetic_dir, tmp_path / "run", *QUICK, "--max-steps")
    succeed(run(*script("train_single.py", *arguments, 2)))
    path = tmp_path / "run" / "status.json"
    path.unlink()
    DAMAGES[damage](path)
    assert "(damaged)" in refused(run(*script("train_single.py", *arguments, 4)), 2)
    again = succeed(run(*script("train_single.py", *arguments, 4, "--resume")))
    assert again.stderr == f"warning: {path} is damaged; its checkpoints count\n"
    assert summary(tmp_path / "run")["resumed_from"] == 2
    assert read_status(tmp_path / "run")["state"] == "complete"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_a_status_that_may_not_be_read_is_damaged(tmp_path: Path) -> None:
    write_status(tmp_path / "run")
    (tmp_path / "run" / "status.json").chmod(0)
    of_pytest = [folder for folder in tmp_path.parents if "pytest-" in str(folder)]
    for folder in (tmp_path, *of_pytest, tmp_path / "run"):
        folder.chmod(0o777)
    code = (
        "import os, sys; from pathlib import Path; from utils.run_dir import read_status\n"
        "os.setuid(65534)\n"
        "print(read_status(Path(sys.argv[1])))"
    )
    assert run(sys.executable, "-c", code, tmp_path / "run").stdout == "{'state': 'damaged'}\n"


def dangling(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link"


def file_there(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (file_there, "is not a folder"),
        (dangling, "is not a folder"),
        (lambda folder: file_there(folder) / "run", "Not a directory"),
        (lambda folder: folder / ("x" * 300), "File name too long"),
        (lambda folder: folder / "/".join(["x" * 100] * 60), "File name too long"),
        (lambda folder: f"{folder}/a\0b", "cannot be printed"),
        (lambda folder: f"{folder}/a\nb\x1b[2J", "cannot be printed"),
        (lambda folder: os.fsdecode(bytes(folder) + b"/gr\xf6\xdfe"), "cannot be printed"),
        (lambda folder: "/proc/run", "No such file or directory"),
    ],
    ids=[
        "file",
        "dangling link",
        "below a file",
        "long name",
        "long path",
        "NUL",
        "newline",
        "no UTF-8",
        "proc",
    ],
)
def test_a_folder_that_cannot_be_one(
    place: Callable[[Path], Path | str], reason: str, tmp_path: Path
) -> None:
    folder = place(tmp_path)
    for resume in (False, True):
        with pytest.raises(UsageError, match=reason) as error:
            open_there(folder, resume)
        assert error.value.exit_status == 2
        assert "\n" not in str(error.value)


def test_a_lock_that_is_none(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UsageError, match="cannot be written"):
        open_there(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(UsageError, match="cannot be written"):
        open_there(tmp_path / "other")
    assert not (tmp_path / "target").exists(), "nothing outside the folder is written"


OPEN = "import sys; from utils.run_dir import open_run; from utils.errors import guard\n"
OPEN += "def work(): print(open_run(sys.argv[1], 'single', False, 1, None)); return 0\n"


def test_the_lock_ends_with_its_process_and_not_with_its_children(tmp_path: Path) -> None:
    """A loader worker that outlives a killed training does not keep others out."""
    code = f"{OPEN}work()\nimport os, time\n"
    code += "if not os.fork(): time.sleep(60)\nprint('locked', flush=True)\ntime.sleep(60)\n"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "run"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        assert "RunDir" in holder.stdout.readline()
        assert holder.stdout.readline() == "locked\n"
        attempt = [sys.executable, "-c", f"{OPEN}sys.exit(guard(work))", tmp_path / "run"]
        assert f"is in use by process {holder.pid} on" in refused(run(*attempt), 2)
        holder.kill()
        holder.wait(timeout=10)
        assert run(*attempt).returncode == 0
    finally:
        os.killpg(holder.pid, 9)
        holder.wait(timeout=10)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
@pytest.mark.parametrize("kind", ["full", "read-only"])
def test_a_disk_on_which_nothing_can_be_written(
    kind: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk)
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        arguments = flags(synthetic_dir, disk / "run", *QUICK, "--max-steps")
        succeed(run(*script("train_single.py", *arguments, 2)))
        if kind == "full":
            filled = run("dd", "if=/dev/zero", f"of={disk}/rest", "bs=512")
            assert "No space left" in filled.stderr
            result = run(*script("train_single.py", *arguments, 4, "--resume"))
            assert "No space left on device" in refused(result, result.returncode)
            assert result.returncode in (1, 2)
            new = flags(synthetic_dir, disk / "new", *QUICK)
            assert "No space left" in refused(run(*script("train_single.py", *new)), 2)
        else:
            run("mount", "-o", "remount,ro", disk)
            result = run(*script("train_single.py", *arguments, 4, "--resume"))
            assert "cannot be written (Read-only file system)" in refused(result, 2)
            run("mount", "-o", "remount,rw", disk)
        (disk / "rest").unlink(missing_ok=True)
        succeed(run(*script("train_single.py", *arguments, 4, "--resume")))
        assert summary(disk / "run")["resumed_from"] == 2
    finally:
        run("umount", disk)
