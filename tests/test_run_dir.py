"""The folder of a run: it belongs to one run, and --resume finds it."""

import os
import signal

import pytest

from tests.helpers import FORK, fork, parse
from utils import files
from utils.errors import UsageError
from utils.files import open_run_dir


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_locks", [])  # so that the locks end with the test


def test_a_folder_belongs_to_one_process_until_it_ends():
    """A child of it, such as a loader worker, does not keep the folder."""
    args = parse("--run-dir", "a")
    receive, send = FORK.Pipe()

    def hold():
        open_run_dir(args)
        child = os.fork()
        if child:
            send.send(child)
        signal.pause()

    holder = fork(hold)
    child = receive.recv()
    with pytest.raises(UsageError, match="a is in use by another run: pass another --run-dir"):
        open_run_dir(args)
    holder.kill()
    os.waitpid(holder.pid, 0)  # join() would wait for the child, too
    open_run_dir(args)
    os.kill(child, signal.SIGKILL)


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path, monkeypatch):
    args = parse("--run-dir", "a/b")
    folder = open_run_dir(args)
    assert folder.samefile(tmp_path / "a/b")
    assert open_run_dir(args) == folder, "nothing was saved yet"
    (folder / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="a/b holds a run: continue it with --resume"):
        open_run_dir(args)
    assert open_run_dir(parse("--run-dir", "a/b", "--resume")) == folder
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # a restart resumes, too
    assert open_run_dir(args) == folder


def test_resume_finds_the_latest_run_of_this_script(tmp_path, capsys):
    args = parse("--resume", technique="dp")
    with pytest.raises(UsageError, match="--resume: runs/ holds no run of this script"):
        open_run_dir(args)
    for name in ("dp-20260102-030405-9", "dp-20260203-040506-1", "single-20270101-000000-1"):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "dp-20280101-000000-1").mkdir()  # nothing was saved in it
    assert open_run_dir(args).name == "dp-20260203-040506-1"
    assert "latest run of this script is runs/dp-20260203-040506-1" in capsys.readouterr().out


def test_resume_begins_in_a_folder_of_a_run_and_not_among_other_files(tmp_path, capsys):
    args = parse("--run-dir", "a", "--resume")
    open_run_dir(args)
    open_run_dir(args)
    (tmp_path / "a" / "args.json").write_text("{}")
    open_run_dir(args)
    assert capsys.readouterr().err.count("a holds no checkpoint yet, so the run begins at") == 3
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").touch()
    with pytest.raises(UsageError, match="photos holds other files, and no run"):
        open_run_dir(parse("--run-dir", "photos", "--resume"))
    assert os.listdir("photos") == ["1.jpg"]
