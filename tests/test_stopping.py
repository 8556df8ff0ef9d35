"""Stop requests: all ranks finish the step, save and end."""

import os
import signal
import sys
import time

import pytest

import train_ddp
from tests.helpers import on_ranks
from tests.processes import Training, finish, said_by_ranks, wait_until
from utils import checkpoint
from utils.cli import parse_args

# Far more training than any test waits for.
LONG = ["--model", "mlp", "--epochs", 9999, "--no-tensorboard", "--save-every-steps", 10]
SLOW = ["--model", "mlp", "--dataset", "tests.user_code:slow", "--batch-size", 4]
SLOW += ["--no-tensorboard", "--save-every-steps", 1]
STOPPING = "stopping: this run will save and end"


def begin(training, technique, *flags, **more):
    """Start a run and wait for its third epoch.

    All loader workers are running then. A signal in the first moments of a worker, before it has
    left the group of its rank, would reach it.
    """
    process = training.start(technique, *flags, **more)
    rows = training.folder / "metrics.jsonl"
    wait_until(lambda: rows.exists() and len(training.rows) > 2, process)
    return process


def check_stopped(training, ended):
    """It is saved, and the last line says how to go on."""
    assert training.checkpoint["position"]["step"] > 0
    assert f"--run-dir {training.folder} --resume" in ended.stdout.splitlines()[-1]
    assert ended.text.count(STOPPING) == 1
    assert not (training.folder / "summary.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(number, train, monkeypatch, capfd):
    """The signal is sent in step 13, and the ranks agree in step 20, or earlier if they are slow.

    test_errors.py has the exit status.
    """
    monkeypatch.setenv("FAULT", f"1:13:{number.name}")
    flags = ["--model", "tests.user_code:network", "--batch-size", 48, "--no-tensorboard"]
    run = train("run", *flags, "--epochs", 9, script="ddp", ranks=2, stop=number)
    step = run.checkpoint["position"]["step"]
    assert 13 <= step <= 20
    assert "stopped and saved: " in capfd.readouterr().out


def test_a_run_whose_steps_are_long_stops_after_the_step_of_the_signal(train, monkeypatch):
    """Ten more steps might take longer than a cluster waits. Here a step loads for 1.3 s."""
    monkeypatch.setenv("FAULT", "1:3:SIGTERM")
    monkeypatch.setenv("SLOW", "0.04")
    flags = ["--model", "tests.user_code:network", "--dataset", "tests.user_code:slow"]
    flags += ["--batch-size", 32, "--no-tensorboard"]
    run = train("run", *flags, script="ddp", ranks=2, stop=signal.SIGTERM)
    assert run.checkpoint["position"]["step"] == 3


def test_no_rank_ends_before_rank_0_has_saved(digits_dir, tmp_path, monkeypatch):
    """Or a launcher that sees a rank end might kill the save."""
    run = Training(digits_dir, tmp_path)
    flags = ["--model", "tests.user_code:network", "--no-tensorboard", "--epochs", 9]
    monkeypatch.setenv("FAULT", "1:3:SIGTERM")
    monkeypatch.setattr(sys, "argv", run.arguments("ddp", *flags))
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args: (time.sleep(1), save(*args)))

    def end(rank):
        train_ddp.train(parse_args("ddp", ""))
        return (tmp_path / "checkpoints" / "last.pt").exists()

    assert on_ranks(end, 2) == [True, True]


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
    process = training.start("single", *SLOW, SLOW="120", STARTED=str(began))
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
        flags = ["--model", "tests.user_code:network", "--max-steps", 6, "--no-tensorboard"]
        run = train("run", *flags)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run.summary["global_step"] == 6
