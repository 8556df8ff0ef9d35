"""What goes wrong: the job ends soon, says why in one line, and what was saved is whole."""

import shlex
import sys

import pytest

from tests.processes import error_line, finish, free_port, run, said_by_ranks
from utils.errors import UsageError, explain

LONG = ["--model", "tests.user_code:network", "--epochs", 9999, "--save-every-steps", 2]
LONG += ["--no-tensorboard"]
FEW = ["--model", "linear", "--max-steps", 3, "--no-tensorboard"]
BROKE = "another rank has ended or is stuck, or the network between them is down"


@pytest.mark.slow
def test_torchrun_shows_a_misspelt_name_in_one_line(training):
    """On a busy machine torchrun may be so late that the other rank says the same."""
    ended = training.run("ddp", *FEW, "--dataset", "my_dta:load")
    assert ended.status == 1
    assert {*said_by_ranks(ended)} == {
        "train_ddp.py: error: --dataset my_dta:load: ModuleNotFoundError: No module named 'my_dta'"
    }
    assert ended.stdout == ""


def test_ranks_with_other_data_do_not_train(train, tmp_path):
    flags = [*FEW, "--dataset", "tests.user_code:other_labels"]
    with pytest.raises(UsageError, match="rank 1 has the labels of data set 0 "):
        train("run", *flags, script="ddp", ranks=2)
    assert not (tmp_path / "run").exists()


def test_without_tensorboard_a_flag_helps(train, tmp_path, monkeypatch):
    (tmp_path / "tensorboard.py").write_text("raise ImportError(\"No module named 'tensorboard'\")")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError) as caught:
        train("run", "--model", "linear")
    assert ": pip install tensorboard, or --no-tensorboard" in explain(caught.value)
    train("other", *FEW)


@pytest.mark.slow
def test_a_rank_that_stalls_ends_the_others_after_the_timeout(training):
    port = free_port()
    flags = [*LONG, "--timeout", 20]
    waiting = training.start_rank(0, 2, port, *flags)
    stalled = training.start_rank(1, 2, port, *flags, FAULT="1:8:SIGSTOP")
    ended = finish(waiting)
    stalled.kill()
    stalled.communicate()
    assert BROKE in error_line(ended)
    assert training.checkpoint["position"]["step"] == 6


@pytest.mark.slow
def test_a_mistake_in_the_code_of_a_rank_has_its_traceback_alone(training):
    ended = training.run("ddp", *LONG, FAULT="1:8:wrong on purpose")
    assert ended.status == 1
    lines = said_by_ranks(ended)
    assert lines.count("[rank1]: Traceback (most recent call last):") == 1
    assert "ArithmeticError: wrong on purpose" in ended.stderr.partition("FAILED")[2], "torchrun"
    assert all(BROKE in line for line in lines if "error: rank 0" in line)


@pytest.mark.slow
def test_a_full_dev_shm_is_named(training):
    """As in a container, where it has 64 MB. A batch of a loader worker is 400 kB here."""
    if run("unshare", "-m", "true").status:
        pytest.skip("needs root, and the right to mount")
    command = training.command("ddp", *FEW, "--num-workers", 1, "--batch-size", 512)
    script = f"mount -t tmpfs -o size=200k tmpfs /dev/shm && exec {shlex.join(map(str, command))}"
    ended = run("unshare", "-m", "sh", "-c", script)
    assert ended.status == 1
    assert "No space left on device (28): give /dev/shm more room" in ended.stderr
