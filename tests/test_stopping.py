"""Stop requests: all ranks finish the step, save and end, and nothing takes long."""

import os
import signal
import time

import pytest

from tests.processes import finish, rank_pids, said_by_ranks, wait_until

# Far more training than any test waits for.
LONG = ["--model", "mlp", "--epochs", 9999, "--no-tensorboard", "--save-every-steps", 10]
SLOW = ["--model", "mlp", "--dataset", "tests.user_code:slow", "--batch-size", 4]
SLOW += ["--no-tensorboard"]
STOPPING = "stopping after this step; a second Ctrl-C ends at once"


def begin(training, technique, *flags, sign="metrics.jsonl", **more):
    """Start a run and wait for a file of it, by default for the first epoch's evaluation.

    After that all loader workers are running. A signal in the first moments of a worker, before it
    has left the group of its rank, would end it.
    """
    process = training.start(technique, *flags, **more)
    wait_until((training.folder / sign).exists, process)
    return process


def check_stopped(training, ended):
    """The last line says how to go on, and the checkpoint is what was trained."""
    step = training.checkpoint["position"]["step"]
    last = ended.stdout.splitlines()[-1]
    assert last == (
        f"stopped and saved at step {step}: repeat the command with"
        f" --run-dir {training.folder} --resume"
    )
    assert ended.text.count(STOPPING) == 1
    assert not (training.folder / "summary.json").exists()
    return step


def test_sigterm_to_torchrun_stops_all_ranks(training):
    """With loader workers, to which torchrun sends it as well."""
    process = begin(training, "ddp", *LONG, "--num-workers", 1)
    process.terminate()
    ended = finish(process)
    assert said_by_ranks(ended) == [STOPPING]
    assert "exitcode" not in ended.stderr, "no rank has failed"
    step = check_stopped(training, ended)
    training.succeed("single", *LONG, "--max-steps", step + 1, "--resume")


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("SIGINT", 130),
        pytest.param("SIGTERM", 143, marks=pytest.mark.slow),
        pytest.param("SIGUSR1", 138, marks=pytest.mark.slow),
        pytest.param("SIGHUP", 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_all_processes_stops_a_script(name, status, training):
    """As a terminal does: the loader workers get it, too."""
    process = begin(training, "single", *LONG, "--num-workers", 2)
    os.killpg(process.pid, getattr(signal, name))
    ended = finish(process)
    assert (ended.status, ended.stderr.strip()) == (status, STOPPING)
    check_stopped(training, ended)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_the_same_step(training):
    """Ended with status 0, or torchrun would report a failure, and might start them again."""
    process = begin(training, "ddp", *LONG)
    os.kill(rank_pids()[1], signal.SIGUSR1)
    ended = finish(process)
    assert ended.status == 0
    step = training.checkpoint["position"]["step"]
    assert f"stopped and saved at step {step}: " in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_ctrl_c_to_torchrun(training):
    process = begin(training, "ddp", *LONG, "--num-workers", 1)
    os.killpg(process.pid, signal.SIGINT)
    ended = finish(process)
    check_stopped(training, ended)
    assert "exitcode" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_agree_in_each_step_if_steps_are_long(workers, training):
    """A step takes 0.8 s or more, nearly all of it for loading data."""
    flags = [*SLOW, "--num-workers", workers, "--save-every-steps", 1]
    process = begin(training, "ddp", *flags, sign="checkpoints/last.pt", SLOW="0.2")
    step = training.checkpoint["position"]["step"]
    process.terminate()
    ended = finish(process)
    assert check_stopped(training, ended) <= step + 3


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
    ended = finish(process, 5)
    assert (ended.status, ended.stderr) == (-signal.SIGINT, "")
