"""Stop requests: all ranks finish the step, save and end."""

import os
import signal
import time

import pytest

import train_ddp
from tests.processes import finish, said_by_ranks, wait_until
from utils import checkpoint

# Far more training than any test waits for.
LONG = ["--model", "mlp", "--epochs", 9999, "--no-tensorboard"]
RECORDS = ["--model", "tests.user_code:network", "--no-tensorboard", "--batch-size", 48]
SLOW = ["--dataset", "tests.user_code:slow"]
STOPPING = "stopping: this run will save and end"


def begin(training, technique, *flags):
    """Start a run and wait for its second epoch.

    All loader workers are running then. A signal in the first moments of a worker, before it has
    left the group of its rank, would reach it.
    """
    process = training.start(technique, *flags)
    rows = training.folder / "metrics.jsonl"
    wait_until(lambda: rows.exists() and training.rows, process)
    return process


def check_stopped(training, ended):
    """It is saved, and the last line says how to go on."""
    assert training.checkpoint["position"]["step"] > 0
    assert f"--run-dir {training.folder} --resume" in ended.stdout.splitlines()[-1]
    assert ended.text.count(STOPPING) == 1
    assert not (training.folder / "summary.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(number, train, monkeypatch):
    """The signal is sent in step 13, and the ranks agree in step 20, or earlier if they are slow.

    test_errors.py has the exit status.
    """
    monkeypatch.setenv("FAULT", f"1:13:{number.name}")
    run = train("run", *RECORDS, "--epochs", 9, script="ddp", ranks=2, stop=number)
    assert 13 <= run.checkpoint["position"]["step"] <= 20


def test_a_run_whose_steps_are_long_stops_after_the_step_of_the_signal(train, monkeypatch):
    """Ten more steps might take longer than a cluster waits. Here a step loads for 1.4 s."""
    monkeypatch.setenv("FAULT", "1:3:SIGTERM")
    monkeypatch.setenv("SLOW", "0.03")
    run = train("run", *RECORDS, *SLOW, script="ddp", ranks=2, stop=signal.SIGTERM)
    assert run.checkpoint["position"]["step"] == 3


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
    "name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)], ids=["TERM", "Ctrl-C"]
)
def test_torchrun_passes_a_stop_to_all_ranks(name, training):
    """The loader workers get it as well: from torchrun, or from the terminal."""
    process = begin(training, "ddp", *LONG, "--num-workers", 1)
    if name == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    ended = finish(process)
    check_stopped(training, ended)
    assert [line for line in said_by_ranks(ended) if line != STOPPING] == []
    assert "exitcode" not in ended.stderr, "no rank has failed"


def test_ctrl_c_saves_a_script_of_one_process_and_its_status_says_so(training):
    """As in a terminal, which sends it to the loader workers, too."""
    process = begin(training, "single", *LONG, "--num-workers", 2)
    os.killpg(process.pid, signal.SIGINT)
    ended = finish(process)
    assert (ended.status, ended.stderr.strip()) == (130, STOPPING)
    check_stopped(training, ended)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(training, tmp_path):
    """In the middle of loading a sample, which takes two minutes."""
    began = tmp_path / "began"
    process = training.start("single", *RECORDS, *SLOW, SLOW="120", STARTED=str(began))
    wait_until(lambda: began.exists() and (training.folder / "args.json").exists(), process)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().strip() == STOPPING
    time.sleep(1)
    assert process.poll() is None, "the first one waits for the step"
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert (ended.status, ended.stderr) == (-signal.SIGINT, "")


def test_a_run_under_nohup_goes_on_after_its_terminal_is_closed(train, monkeypatch):
    """The script inherits that the signal is ignored. The terminal sends it in step 3."""
    monkeypatch.setenv("FAULT", "0:3:SIGHUP")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = train("run", *RECORDS, "--max-steps", 6)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.summary["global_step"] == 6
