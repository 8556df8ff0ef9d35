"""The folder of a run: it belongs to one run, and nothing in it is overwritten."""

import errno
import fcntl
import os
import signal

import pytest

from tests.helpers import FORK, fork, parse
from utils.errors import UsageError
from utils.run_dir import open_run_dir


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
    try:
        with pytest.raises(UsageError, match="a is in use by another run: pass another --run-dir"):
            open_run_dir(args)
        holder.kill()
        os.waitpid(holder.pid, 0)  # join() would wait for the child, too
        open_run_dir(args)
    finally:
        holder.kill()  # again, if the lock was missing
        os.kill(child, signal.SIGKILL)


def test_a_folder_that_holds_a_run_is_continued_and_not_overwritten(monkeypatch, capsys):
    args = parse("--run-dir", "a/b")
    resuming = parse("--run-dir", "a/b", "--resume")
    folder = open_run_dir(args)
    assert open_run_dir(args) == folder, "nothing was saved yet"
    open_run_dir(resuming)  # a job that Slurm queues again has the flag from the start
    assert "a/b holds no checkpoint yet, so the run begins at step 0" in capsys.readouterr().err
    (folder / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="a/b holds a run: continue it with --resume"):
        open_run_dir(args)
    assert open_run_dir(resuming) == folder
    # A restart by torchrun resumes, too. Over c10d not every restart is counted, so it is enough
    # that there may be one.
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert open_run_dir(args) == folder


def test_a_file_system_without_locks_warns_and_goes_on(capsys, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    open_run_dir(parse("--run-dir", "a"))
    assert "a/.lock cannot be locked (No locks available)" in capsys.readouterr().err
