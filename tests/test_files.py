"""Files are written whole or not at all, and a folder belongs to one run."""

import os
import resource
import signal

import pytest

from tests.helpers import FORK, ended, fork, parse
from utils import files
from utils.errors import UsageError
from utils.files import lock_file, open_run_dir, replace_file


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_locks", [])  # so that the locks end with the test


def test_the_file_before_is_kept_under_another_name(tmp_path):
    path, before = tmp_path / "file", tmp_path / "before"
    for content in (b"1", b"2", b"3"):
        replace_file(path, content, keep_as=before)
    assert (path.read_bytes(), before.read_bytes()) == (b"3", b"2")
    assert sorted(os.listdir()) == ["before", "file"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_disk_without_room_leaves_the_old_file(is_killed, tmp_path):
    """The limit of a file's size is an error in the middle of a write, or it kills the process."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if is_killed else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(OSError, match=r"File too large: .*file") as caught:
            replace_file(path, bytes(1000))
        assert caught.value.filename == str(path)
        assert os.listdir() == ["file"], "no half of a new file is left"

    assert ended(fork(write)) == (-signal.SIGXFSZ if is_killed else 0)
    assert path.read_bytes() == b"old"


def test_a_lock_ends_with_its_process_and_not_with_its_children(tmp_path):
    path = tmp_path / "lock"
    receive, send = FORK.Pipe()

    def hold():
        lock = lock_file(path, wait=False)
        child = os.fork()  # as a loader worker
        if child == 0:
            signal.pause()
        send.send(child)
        signal.pause()
        lock.close()

    holder = fork(hold)
    child = receive.recv()
    with pytest.raises(BlockingIOError):
        lock_file(path, wait=False)
    holder.kill()
    os.waitpid(holder.pid, 0)  # join() would wait for the child, too
    lock_file(path, wait=False).close()
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


def test_a_folder_in_use_is_refused():
    ready, done = FORK.Event(), FORK.Event()

    def use():
        open_run_dir(parse("--run-dir", "a"))
        ready.set()
        done.wait(60)

    process = fork(use)
    assert ready.wait(60)
    with pytest.raises(UsageError, match="a is in use by another run: pass another --run-dir"):
        open_run_dir(parse("--run-dir", "a"))
    done.set()
    assert ended(process) == 0


def test_resume_finds_the_latest_run_of_this_script(tmp_path, capsys):
    with pytest.raises(UsageError, match="--resume: runs/ holds no run of this script"):
        open_run_dir(parse("--resume"))
    for name in ("single-20260102-030405-9", "single-20260203-040506-1", "ddp-20270101-000000-1"):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "single-20280101-000000-1").mkdir()  # nothing was saved in it
    assert open_run_dir(parse("--resume")).name == "single-20260203-040506-1"
    assert "latest run of this script is runs/single-20260203-040506-1" in capsys.readouterr().out


def test_resume_begins_in_a_folder_of_a_run_and_not_among_other_files(tmp_path, capsys):
    args = parse("--run-dir", "a", "--resume")
    open_run_dir(args)
    (tmp_path / "a" / ".lock").unlink()
    open_run_dir(args)
    (tmp_path / "a" / "args.json").write_text("{}")
    open_run_dir(args)
    assert capsys.readouterr().out.count("a holds no checkpoint yet, so the run begins at") == 3
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").touch()
    with pytest.raises(UsageError, match="photos holds other files, and no run"):
        open_run_dir(parse("--run-dir", "photos", "--resume"))
    assert os.listdir("photos") == ["1.jpg"]
