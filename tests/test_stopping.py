"""Stop requests, kills and failures: a resumed run ends as a calm one, and no end takes long."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import Training, error_line, finish, ranks, run, succeed, wait_until

# Far more training than any test waits for.
LONG = ["--model", "mlp", "--epochs", 9999, "--max-steps", 99999, "--save-every-steps", 3]
FEW = ["--model", "linear", "--max-steps", 6, "--save-every-steps", 3]
# Dropout, several gradient buckets, momentum, augmentation, accumulation and loader workers.
HARD = ["--max-steps", 10, "--save-every-steps", 3, "--seed", 5, "--batch-size", 16]
HARD += ["--grad-accum-steps", 2, "--num-workers", 1, "--no-tensorboard"]
HARD += ["--model", "basic", "--bucket-cap-mb", 0.25]
STOPPING = "stopping after this step; again: at once, unsaved\n"  # at the first Ctrl-C


@pytest.mark.parametrize(
    ("technique", "number"), [("single", signal.SIGINT), ("ddp", signal.SIGTERM)]
)
def test_a_stop_request_saves_and_ends_soon(technique, number, training):
    """One rank alone gets it. Torchrun, which may restart what crashes, takes it for no crash."""
    process = training.start(technique, *LONG, "--num-workers", 1, PET_MAX_RESTARTS="1")
    wait_until(training.is_saved)
    os.kill(ranks()[1] if technique == "ddp" else process.pid, number)
    ended = finish(process, timeout=60)
    told = training.status
    assert (told["state"], told["signal"]) == ("stopped", number.name), ended.text
    if technique == "single":  # torchrun's own status is 0 or 1
        assert (ended.returncode, ended.stderr) == (130, f"train_single.py: {STOPPING}")
    assert ended.stdout.count(f"stopped by {number.name} at step {told['global_step']}") == 1
    assert ended.stdout.count(" at the peak\n") == 1, "it was started again"
    assert "Traceback" not in ended.stdout
    launcher = "torchrun --standalone --nproc_per_node 2" if technique == "ddp" else "python"
    assert told["continue"].startswith(f"{launcher} train_{technique}.py --threads 1 ")
    assert told["continue"].endswith(f"--num-workers 1 --run-dir {training.folder} --resume")
    assert not list(training.folder.rglob("*.tmp"))
    two_more = told["global_step"] + 2
    succeed(training.run(technique, *LONG, "--max-steps", two_more, "--resume"))
    assert training.status["global_step"] == two_more


def test_a_second_ctrl_c_ends_at_once(training, tmp_path):
    """Although the main thread waits in C."""
    interrupted, hang = "interrupted by a second Ctrl-C", tmp_path / "hang"
    fault = {"ALTER": "hang", "ALTER_AT": "1", "ALTER_FLAG": str(hang)}
    process = training.start("single", *LONG, "--num-workers", 1, **fault)
    wait_until(hang.exists)
    while process.poll() is None:  # a person presses it until something happens, too
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    ended = finish(process, timeout=20)
    assert ended.returncode == 130
    line = f"train_single.py: error: {interrupted}\n"
    assert ended.stderr == f"train_single.py: {STOPPING}{line}"
    told = training.status
    assert (told["state"], told["reason"]) == ("failed", f"Interrupted: {interrupted}")


def test_ctrl_c_while_modules_are_imported_is_quiet(training):
    process = training.start("single", *LONG, real=True)
    # Earlier, it is the interpreter that starts, and shows where it was interrupted.
    wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(signal.SIGINT)
    ended = finish(process, timeout=60)
    # On a fast machine the training may have begun, and stops in the orderly way.
    assert ended.returncode in (-signal.SIGINT, 130)
    assert (ended.stderr, "Traceback" in ended.stdout) == ("", False)


NOHUP = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("before", "burst", "heard"),
    [
        ("", ["SIGHUP", "SIGTERM"], signal.SIGHUP),
        (NOHUP, ["SIGHUP", "SIGTERM"], signal.SIGTERM),
        ("", ["SIGINT", "SIGINT"], signal.SIGINT),
    ],
)
def test_the_first_signal_counts_but_no_closed_terminal_under_nohup(before, burst, heard):
    """One Ctrl-C under torchrun may come twice: from the terminal, and passed on."""
    code = f"import os, signal, time\n{before}\n"
    code += "from utils import signals\nsignals.install_handlers()\n"
    for name in burst:
        code += f"os.kill(os.getpid(), signal.{name})\n"
    ended = run(sys.executable, "-c", f"{code}time.sleep(0.3); print(signals.received())")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{heard:d}\n", "")


# Kills


def test_a_killed_run_ends_as_if_undisturbed(short_dir, tmp_path):
    """To the bit: killed within a step, in one rank, and resumed.

    Rank 0 alone finds a checkpoint, since machines may have no disk in common.
    """
    calm, disturbed = (Training(short_dir, tmp_path / name) for name in ("calm", "disturbed"))
    succeed(calm.run("ddp", *HARD))
    how = {"ALTER": "SIGKILL", "ALTER_RANK": "1", "ALTER_AT": "5", "ALTER_DELAY": "0.01"}
    ended = disturbed.run("ddp", *HARD, **how)
    assert disturbed.status["state"] != "complete", f"nothing was killed: {ended}"
    succeed(disturbed.run("ddp", *HARD, "--resume", ALTER="empty"))
    assert disturbed.final_state == calm.final_state


def test_after_an_exception_a_resume_repeats_no_point_of_the_curve(training):
    """The run had trained beyond its last save. Its loader workers do not keep it from ending."""
    extra = [*FEW, "--log-every", 1, "--num-workers", 1]
    ended = training.run("single", *extra, ALTER="raise", ALTER_AT="5")
    assert ended.returncode == 1
    assert "ArithmeticError: wrong on purpose" in ended.stderr
    told = training.status
    assert (told["state"], told["reason"]) == ("failed", "ArithmeticError: wrong on purpose")
    succeed(training.run("single", *extra, "--resume"))
    curve = EventAccumulator(str(training.folder)).Reload().Scalars("step/learning_rate")
    assert [event.step for event in curve] == [96 * step for step in range(1, 7)]


def test_a_run_that_was_killed_before_its_summary_keeps_its_metrics(training):
    """All is evaluated and saved; the epoch, which --max-steps cut short, has not ended."""
    training.run("single", *FEW, ALTER="SIGKILL", ALTER_AT="results")
    assert not (training.folder / "summary.json").exists()
    before = training.metrics
    succeed(training.run("single", *FEW, "--resume"))
    assert training.metrics == before
    assert [row["test_accuracy"] for row in before] == [training.summary["test_accuracy"]]


def test_a_signal_after_the_last_agreement_stops_all(training):
    """One rank alone gets it. Ranks agree one step late, and after the last there is none.

    A resume makes up for the evaluation.
    """
    late = {"ALTER": "SIGTERM", "ALTER_AT": "6", "ALTER_RANK": "1"}
    stopped = training.run("spawn", *FEW, **late)
    assert stopped.returncode == 143, stopped.text
    told = training.status
    assert (told["state"], told["global_step"]) == ("stopped", 6)
    assert not (training.folder / "metrics.jsonl").exists()
    succeed(training.run("spawn", *FEW, "--resume"))
    assert training.summary["test_count"] == 500
    assert len(training.metrics) == 1


# Failures


def test_a_loader_worker_that_is_killed_ends_the_run_with_one_line(training):
    """Out of memory, the kernel kills one of them."""
    extra = ["--model", "linear", "--num-workers", 1, "--epochs", 9999]
    process = training.start("single", *extra)
    wait_until((training.folder / "metrics.jsonl").exists, 150)
    psutil.Process(process.pid).children()[0].kill()
    assert "a loader worker died" in error_line(finish(process, 60), 1)
    assert training.status["state"] == "failed"
    assert "a loader worker died" in training.status["reason"]


@pytest.mark.parametrize("when", ["evaluate", "4"])
def test_what_is_not_finite_is_never_saved(when, training):
    """Neither a loss of training nor one of the evaluation; what was saved before is whole."""
    few = [*FEW, "--save-every-steps", 2]
    ended = training.run("single", *few, ALTER="nan", ALTER_AT=when)
    assert "the loss is nan" in error_line(ended, 1)
    assert training.status["state"] == "failed"
    assert not (training.folder / "summary.json").exists()
    resumed = succeed(training.run("single", *few, "--resume"))
    assert f"resumed at step {4 if when == '4' else 6}" in resumed.stdout
    assert "it has diverged: if the loss stays high, put previous.pt" in resumed.stdout
    assert training.summary["test_count"] == 500


def test_a_reader_of_the_output_that_leaves_ends_no_training(training):
    process = training.start("single", *FEW)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == ("", 0)
    assert training.summary["test_count"] == 500


@pytest.mark.slow
def test_a_disk_that_takes_no_output_ends_no_training(training):
    words = [*training.command("single", *FEW), "> /dev/full"]
    succeed(run("bash", "-c", " ".join(map(str, words))))
    assert training.summary["test_count"] == 500
