"""Stop requests, kills and failures: a resumed run ends as a calm one, and no end takes long."""

import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import Training, error_line, finish, marked, ranks, run, succeed, wait_until

# Far more training than any test waits for.
LONG = ["--model", "mlp", "--epochs", 9999, "--max-steps", 99999, "--save-every-steps", 3]
FEW = ["--model", "linear", "--max-steps", 6, "--save-every-steps", 3]
# Dropout, several gradient buckets, momentum, augmentation, accumulation and loader workers.
HARD = ["--max-steps", 10, "--save-every-steps", 3, "--seed", 5, "--batch-size", 16]
HARD += ["--grad-accum-steps", 2, "--num-workers", 1, "--no-tensorboard"]
TARGETS = {  # who gets a signal
    "launcher": lambda process: [process.pid],
    "rank 1": lambda process: [ranks()[1]],
    "every process": lambda process: sorted(marked()),
}
STOPPING = "stopping after this step; again: at once, unsaved\n"  # at the first Ctrl-C
SLOW = pytest.mark.slow


def send(process, target, number):
    for pid in TARGETS[target](process):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def name_of(technique):
    return "ddp" if technique == "spawn" else technique


@pytest.mark.parametrize(
    ("technique", "target", "number"),
    [
        ("single", "launcher", signal.SIGINT),
        ("ddp", "rank 1", signal.SIGTERM),
        pytest.param("ddp", "launcher", signal.SIGTERM, marks=SLOW),
        pytest.param("ddp", "every process", signal.SIGTERM, marks=SLOW),
        pytest.param("spawn", "every process", signal.SIGINT, marks=SLOW),
    ],
)
def test_a_stop_request_saves_and_ends_soon(technique, target, number, training):
    """Torchrun, which may start again what crashes, takes it for no crash."""
    process = training.start(technique, *LONG, "--num-workers", 1, PET_MAX_RESTARTS="1")
    wait_until(training.is_saved)
    send(process, target, number)
    ended = finish(process, timeout=60)
    told = training.status
    assert (told["state"], told["signal"]) == ("stopped", number.name), ended.text
    if technique != "ddp":  # torchrun's own status is 0 or 1
        told_at_once = f"train_{name_of(technique)}.py: {STOPPING}" * (number == signal.SIGINT)
        assert (ended.returncode, ended.stderr) == (128 + number, told_at_once)
    assert ended.stdout.count(f"stopped by {number.name} at step {told['global_step']}") == 1
    assert ended.stdout.count(" at the peak\n") == 1, "it was started again"
    assert "Traceback" not in ended.stdout
    launcher = "torchrun --standalone --nproc_per_node 2" if technique == "ddp" else "python"
    assert told["continue"].startswith(f"{launcher} train_{name_of(technique)}.py --threads 1 ")
    assert told["continue"].endswith(f"--num-workers 1 --run-dir {training.folder} --resume")
    assert not list(training.folder.rglob("*.tmp"))
    two_more = told["global_step"] + 2
    succeed(training.run(technique, *LONG, "--max-steps", two_more, "--resume"))
    assert training.status["global_step"] == two_more


@pytest.mark.parametrize(
    ("technique", "target"),
    [("single", "launcher"), pytest.param("spawn", "every process", marks=SLOW)],
)
def test_a_second_ctrl_c_ends_at_once(technique, target, training, tmp_path):
    """Although the main thread waits in C; with several ranks another one does in a collective."""
    interrupted, hang = "interrupted by a second Ctrl-C", tmp_path / "hang"
    fault = {"ALTER": "hang", "ALTER_AT": "1", "ALTER_FLAG": str(hang)}
    process = training.start(technique, *LONG, "--num-workers", 1, **fault)
    wait_until(hang.exists)
    while process.poll() is None:  # a person presses it until something happens, too
        send(process, target, signal.SIGINT)
        time.sleep(0.5)
    ended, name = finish(process, timeout=20), f"train_{name_of(technique)}.py"
    assert ended.returncode == 130
    assert ended.stderr == f"{name}: {STOPPING}{name}: error: {interrupted}\n"
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


INSTALL = "import os, signal, time; from utils import errors, signals; signals.install_handlers()\n"
INSTALL += "def kill(name): os.kill(os.getpid(), getattr(signal, name))\n"

NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"


@pytest.mark.parametrize(
    ("before", "burst", "heard"),
    [
        ("", ["SIGHUP"], int(signal.SIGHUP)),
        (NOHUP, ["SIGHUP"], 0),
        ("", ["SIGTERM", "SIGUSR1", "SIGINT"], int(signal.SIGTERM)),
    ],
)
def test_the_first_signal_counts_but_no_closed_terminal_under_nohup(before, burst, heard):
    sent = "".join(f"kill({name!r}); " for name in burst)
    ended = run(sys.executable, "-c", f"{before}{INSTALL}{sent}print(signals.received())")
    assert (ended.returncode, ended.stdout) == (0, f"{heard}\n")


@pytest.mark.parametrize(
    ("last_words", "said"),
    [("lambda error: os.write(1, b'said')", "said"), ("lambda error: time.sleep(600)", "")],
)
def test_last_words_end_in_time(last_words, said):
    """The main thread waits for something that never comes, as in a collective."""
    code = f"{INSTALL}errors.before_end({last_words})\n"
    code += "kill('SIGINT'); kill('SIGINT'); time.sleep(0.3); os.write(1, b'lives ')\n"
    code += "while True: kill('SIGINT'); time.sleep(0.3)"
    ended = run(sys.executable, "-c", code)
    assert ended.returncode == 130
    assert ended.stderr.endswith("-c: error: interrupted by a second Ctrl-C\n")
    assert ended.stdout == f"lives {said}", "the first Ctrl-C may come twice"


# Kills


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("technique", "processes", "number"),
    [
        ("ddp", 2, signal.SIGKILL),
        pytest.param("single", 1, signal.SIGTERM, marks=SLOW),
        pytest.param("ddp", 3, signal.SIGKILL, marks=SLOW),
    ],
)
def test_a_killed_run_ends_as_if_undisturbed(technique, processes, number, short_dir, tmp_path):
    """To the bit: stopped or killed at a moment that is drawn, in one rank, and resumed.

    Of several ranks rank 0 alone finds a checkpoint, since machines may have no disk in common.
    """
    hard = [*HARD, "--model", "basic"]
    hard += ["--bucket-cap-mb", 0.25] if technique == "ddp" else []
    calm, disturbed = (Training(short_dir, tmp_path / name) for name in ("calm", "disturbed"))
    more = {"processes": processes, "timeout": 200}
    succeed(calm.run(technique, *hard, **more))
    draw, ranks = random.Random(f"{technique} {processes}"), processes if technique == "ddp" else 1
    how = {"ALTER": number.name, "ALTER_RANK": str(draw.randrange(ranks))}
    how |= {"ALTER_AT": str(draw.randint(3, 6)), "ALTER_DELAY": str(draw.uniform(0.001, 0.02))}
    ended = disturbed.run(technique, *hard, **more, **how)
    assert disturbed.status["state"] != "complete", f"nothing was killed: {ended}"
    where = {"ALTER": "empty"} if technique == "ddp" else {}
    succeed(disturbed.run(technique, *hard, "--resume", **more, **where))
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


@pytest.mark.parametrize(
    ("technique", "when"),
    [
        ("spawn", "6"),
        ("single", "evaluate"),
        pytest.param("spawn", "evaluate", marks=SLOW),
        pytest.param("spawn", "5", marks=SLOW),
    ],
)
def test_a_signal_after_the_last_agreement_stops_all(technique, when, training):
    """One rank alone gets it in the last steps or in the evaluation, which a resume makes up for.

    Ranks agree one step late, and after the last step there is none to agree in.
    """
    rank = "1" if technique == "spawn" else "0"
    stopped = training.run(technique, *FEW, ALTER="SIGTERM", ALTER_AT=when, ALTER_RANK=rank)
    assert stopped.returncode == 143, stopped.text
    told = training.status
    assert (told["state"], told["global_step"]) == ("stopped", 6)
    assert not (training.folder / "metrics.jsonl").exists()
    succeed(training.run(technique, *FEW, "--resume"))
    assert training.summary["test_count"] == 500
    assert len(training.metrics) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_while_the_loader_is_stuck_a_stop_keeps_the_steps_and_a_kill_leaves_nobody(
    number, training, tmp_path
):
    """The loader gives five batches. The last one begins a third step, which is not counted."""
    flag, extra = tmp_path / "flag", ["--model", "linear", "--num-workers", 1]
    extra += ["--grad-accum-steps", 2, "--batch-size", 96]
    process = training.start("single", *extra, ALTER="stuck", ALTER_AT="2", ALTER_FLAG=str(flag))
    wait_until(flag.exists)
    time.sleep(1.0)  # the fifth batch is trained meanwhile
    process.send_signal(number)
    ended = finish(process, 60)  # the worker holds its output, too
    if number == signal.SIGTERM:
        assert ended.returncode == 143
        assert training.status["state"] == "stopped"
        saved = torch.load(training.folder / "checkpoints/last.pt", weights_only=True)["progress"]
        assert (saved["global_step"], saved["train_sums"]["count"]) == (2, 2 * 2 * 96)


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


@pytest.mark.parametrize(
    ("when", "technique", "count"),
    [
        ("evaluate", "single", 1),
        ("4", "single", 1),
        pytest.param("4", "dp", 2, marks=SLOW),
    ],
)
def test_what_is_not_finite_is_never_saved(when, technique, count, training):
    """Neither a loss of training nor one of the evaluation; what was saved before is whole."""
    few = [*FEW, "--save-every-steps", 2]
    ended = training.run(technique, *few, processes=count, ALTER="nan", ALTER_AT=when)
    assert "the loss is nan" in error_line(ended, 1)
    assert training.status["state"] == "failed"
    assert not (training.folder / "summary.json").exists()
    resumed = succeed(training.run(technique, *few, "--resume", processes=count))
    assert f"resumed at step {4 if when == '4' else 6}" in resumed.stdout
    assert "it has diverged: if the loss stays high, put previous.pt" in resumed.stdout
    assert training.summary["test_count"] == 500


def test_a_reader_of_the_output_that_leaves_ends_no_training(training):
    process = training.start("single", *FEW)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == ("", 0)
    assert training.summary["test_count"] == 500


@SLOW
@pytest.mark.parametrize("redirection", ["", "> /dev/full", ">&- 2>&- <&-"])
def test_output_that_nobody_takes_ends_no_training(redirection, short_dir, tmp_path):
    """Nor does a name that no terminal can show."""
    training = Training(short_dir, tmp_path / "r\u00fcn")
    words = training.command("single", *FEW)
    shell = ["bash", "-c", f"{' '.join(map(str, words))} {redirection}"]
    succeed(run(*shell, PYTHONIOENCODING="ascii"))
    assert training.summary["test_count"] == 500
