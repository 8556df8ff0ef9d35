"""Stop requests: all ranks finish the step, save and end."""

import os
import signal
import time

import pytest

import train_ddp
from tests.helpers import ended, fork
from tests.processes import finish, said_by_ranks, wait_until
from utils import checkpoint
from utils.process import StopSignal

# Far more training than any test waits for.
LONG = ["--model", "mlp", "--epochs", 9999, "--no-tensorboard"]
RECORDS = ["--model", "tests.user_code:network", "--no-tensorboard", "--batch-size", 48]
STOPPING = "stopping: this run will save and end"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(number, train, monkeypatch):
    """It is sent in step 13, and the ranks agree in step 20, or earlier if they are slow."""
    monkeypatch.setenv("FAULT", f"1:13:{number.name}")
    run = train("run", *RECORDS, "--epochs", 9, script="ddp", ranks=2, stop=number)
    assert 13 <= run.checkpoint["position"]["step"] <= 20


def test_a_run_whose_steps_are_long_stops_after_the_step_of_the_signal(train, monkeypatch):
    """Ten more steps might take longer than a cluster waits. Here a step loads for 1.2 s."""
    monkeypatch.setenv("FAULT", "1:2:SIGTERM")
    monkeypatch.setenv("SLOW", "0.0075")
    flags = [*RECORDS, "--dataset", "tests.user_code:slow", "--batch-size", 160]
    run = train("run", *flags, script="ddp", ranks=2, stop=signal.SIGTERM)
    assert run.checkpoint["position"]["step"] == 2


def test_no_rank_ends_before_rank_0_has_saved(train, tmp_path, monkeypatch):
    """Or a launcher that sees a rank end might kill the save."""
    save = checkpoint.save
    train_ranks = train_ddp.train

    def train_and_look(args):
        stop = train_ranks(args)
        assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()
        return stop

    monkeypatch.setenv("FAULT", "1:3:SIGTERM")
    monkeypatch.setattr(checkpoint, "save", lambda *args: (time.sleep(1), save(*args)))
    monkeypatch.setattr(train_ddp, "train", train_and_look)
    train("run", *RECORDS, script="ddp", ranks=2, stop=signal.SIGTERM)


@pytest.mark.parametrize(
    ("technique", "number"),
    [
        ("ddp", signal.SIGTERM),
        pytest.param("ddp", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("single", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_stop_from_outside_is_saved_and_says_how_to_go_on(technique, number, training):
    """It comes in the second epoch, when all loader workers have left the group of their rank."""
    process = training.start(technique, *LONG, "--num-workers", 1)
    rows = training.folder / "metrics.jsonl"
    wait_until(lambda: rows.exists() and training.rows, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal sends it to all processes
    else:
        process.terminate()  # torchrun passes it on to its ranks
    finished = finish(process)
    assert training.checkpoint["position"]["step"] > 0
    assert f"--run-dir {training.folder} --resume" in finished.stdout.splitlines()[-1]
    assert said_by_ranks(finished) == [STOPPING]
    assert "exitcode" not in finished.stderr, "no rank has failed"
    assert technique == "ddp" or finished.status == 130
    assert not (training.folder / "summary.json").exists()


def test_a_second_ctrl_c_ends_at_once():
    def interrupt_twice():
        StopSignal()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)

    assert ended(fork(interrupt_twice)) == [-signal.SIGINT]


def test_a_run_under_nohup_goes_on_after_its_terminal_is_closed(train, monkeypatch):
    """The script inherits that the signal is ignored. The terminal sends it in step 3."""
    monkeypatch.setenv("FAULT", "0:3:SIGHUP")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = train("run", *RECORDS, "--max-steps", 6)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.summary["global_step"] == 6
