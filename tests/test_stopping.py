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
LONG = ["--model", "convnet", "--epochs", 9999, "--max-steps", 99999, "--save-every-steps", 3]
FEW = ["--model", "linear", "--max-steps", 6, "--save-every-steps", 3]
# Dropout, several gradient buckets, momentum, augmentation, accumulation and loader workers.
HARD = ["--max-steps", 14, "--save-every-steps", 3, "--seed", 5, "--batch-size", 16]
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
        ("ddp", "every process", signal.SIGTERM),
        pytest.param("ddp", "launcher", signal.SIGTERM, marks=SLOW),
        pytest.param("ddp", "rank 1", signal.SIGUSR1, marks=SLOW),
        pytest.param("spawn", "every process", signal.SIGINT, marks=SLOW),
    ],
)
def test_a_stop_request_saves_and_ends_soon(technique, target, number, training):
    process = training.start(technique, *LONG, "--num-workers", 1)
    wait_until(training.is_saved)
    send(process, target, number)
    ended = finish(process, timeout=60)
    told = training.status
    assert (told["state"], told["signal"]) == ("stopped", number.name), ended.text
    if technique != "ddp":  # torchrun's own status is 0 or 1
        told_at_once = f"train_{name_of(technique)}.py: {STOPPING}" * (number == signal.SIGINT)
        assert (ended.returncode, ended.stderr) == (128 + number, told_at_once)
    assert f"stopped by {number.name} at step {told['global_step']}" in ended.stdout
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


def torch_is_being_loaded(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize(
    ("technique", "program", "count", "seconds"),
    [
        ("single", "train_single.py", 1, 0.5),
        pytest.param("single", "train_single.py", 1, 0.0, marks=SLOW),
        pytest.param("spawn", "spawn_main", 2, 0.0, marks=SLOW),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_quiet(technique, program, count, seconds, training):
    process = training.start(technique, *LONG, real=True)
    # Earlier, it is the interpreter that starts, and shows where it was interrupted.
    begun = lambda: [pid for pid, (line, _) in marked().items() if program in line]  # noqa: E731
    wait_until(lambda: [torch_is_being_loaded(pid) for pid in begun()] == [True] * count)
    time.sleep(seconds)
    send(process, "every process", signal.SIGINT)
    ended = finish(process, timeout=60)
    # On a fast machine the training may have begun, and stops in the orderly way.
    assert ended.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in ended.text
    assert ended.stderr == "" or technique == "spawn"


INSTALL = "import os, signal, time; from utils import errors, signals; signals.install_handlers()\n"
INSTALL += "def kill(name): os.kill(os.getpid(), getattr(signal, name))\n"

NOHUP = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"


@pytest.mark.parametrize(("before", "heard"), [("", int(signal.SIGHUP)), (NOHUP, 0)])
def test_a_terminal_that_closes_stops_a_run_unless_nohup_started_it(before, heard):
    code = f"{before}{INSTALL}kill('SIGHUP'); print(signals.received())"
    hung_up = run(sys.executable, "-c", code)
    assert (hung_up.returncode, hung_up.stdout) == (0, f"{heard}\n")


def test_of_a_burst_the_first_signal_counts():
    burst = "kill('SIGTERM'); kill('SIGUSR1'); kill('SIGINT'); print(signals.received())"
    assert run(sys.executable, "-c", INSTALL + burst).stdout == f"{signal.SIGTERM}\n"


@pytest.mark.parametrize(
    ("last_words", "said"),
    [
        ("lambda error: os.write(1, b'said')", "said"),
        ("lambda error: time.sleep(600)", ""),
        ("lambda error: 1 / 0", ""),
    ],
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
        ("single", 1, signal.SIGTERM),
        ("ddp", 2, signal.SIGKILL),
        pytest.param("ddp", 3, signal.SIGKILL, marks=SLOW),
    ],
)
def test_a_killed_run_ends_as_if_undisturbed(technique, processes, number, short_dir, tmp_path):
    """To the bit: stopped or killed at a moment that is drawn, in one rank, and resumed."""
    hard = [*HARD, "--model", "basic"]
    hard += ["--bucket-cap-mb", 0.25] if technique == "ddp" else []
    calm, disturbed = (Training(short_dir, tmp_path / name) for name in ("calm", "disturbed"))
    more = {"processes": processes, "timeout": 200}
    succeed(calm.run(technique, *hard, **more))
    draw, ranks = random.Random(f"{technique} {processes}"), processes if technique == "ddp" else 1
    how = {"ALTER": number.name, "ALTER_RANK": str(draw.randrange(ranks))}
    how |= {"ALTER_AT": str(draw.randint(3, 8)), "ALTER_DELAY": str(draw.uniform(0.001, 0.02))}
    ended = disturbed.run(technique, *hard, **more, **how)
    assert disturbed.status["state"] != "complete", f"nothing was killed: {ended}"
    succeed(disturbed.run(technique, *hard, "--resume", **more))
    assert disturbed.final_state == calm.final_state


def test_ranks_without_a_shared_disk_resume_what_rank_0_reads(short_dir, tmp_path):
    """No other rank finds a checkpoint, and the run ends as one that was not stopped."""
    calm, stopped = (Training(short_dir, tmp_path / name) for name in ("calm", "stopped"))
    extra = ["--model", "mlp", "--timeout", 20, "--max-steps"]
    succeed(calm.run("spawn", *extra, 8))
    succeed(stopped.run("spawn", *extra, 4))
    succeed(stopped.run("spawn", *extra, 8, "--resume", ALTER="empty"))
    assert stopped.final_state == calm.final_state


def test_a_curve_that_failed_beyond_a_save_has_each_step_once(training):
    extra = [*FEW, "--log-every", 1]
    assert training.run("single", *extra, ALTER="raise", ALTER_AT="5").returncode == 1
    succeed(training.run("single", *extra, "--resume"))
    curve = EventAccumulator(str(training.folder)).Reload().Scalars("step/learning_rate")
    assert [event.step for event in curve] == [96 * step for step in range(1, 7)]


def test_a_rank_that_is_asked_to_stop_starts_no_other_attempt(training):
    """Slurm, or a spot machine, sends SIGTERM; torchrun would take another status for a crash."""
    request = {"ALTER": "SIGTERM", "ALTER_RANK": "1", "ALTER_AT": "4"}
    ended = succeed(training.run("ddp", *FEW, **request, PET_MAX_RESTARTS="1"))
    assert ended.stdout.count("stopped by SIGTERM at step ") == 1
    assert (ended.stdout.count(" at the peak\n"), training.status["state"]) == (1, "stopped")


@pytest.mark.parametrize("technique", ["single", pytest.param("ddp", marks=SLOW)])
def test_a_run_that_was_killed_before_its_summary_keeps_its_metrics(technique, training):
    """All is evaluated and saved; the epoch, which --max-steps cut short, has not ended."""
    training.run(technique, *FEW, ALTER="SIGKILL", ALTER_AT="results")
    assert not (training.folder / "summary.json").exists()
    before = training.metrics
    succeed(training.run(technique, *FEW, "--resume"))
    assert training.metrics == before
    assert [row["test_accuracy"] for row in before] == [training.summary["test_accuracy"]]


@pytest.mark.parametrize(("technique", "step"), [("single", "6"), ("spawn", "5"), ("spawn", "6")])
def test_a_signal_in_the_last_steps_stops_before_the_evaluation(technique, step, training):
    """Ranks agree one step late, and after the last step there is none to agree in."""
    stopped = training.run(technique, *FEW, ALTER="SIGTERM", ALTER_AT=step)
    assert stopped.returncode == 143, stopped.text
    told = training.status
    assert (told["state"], told["global_step"]) == ("stopped", 6)
    assert not (training.folder / "metrics.jsonl").exists()
    succeed(training.run(technique, *FEW, "--resume"))
    assert training.summary["test_count"] == 500
    assert len(training.metrics) == 1


@pytest.mark.parametrize("technique", ["single", "spawn"])
def test_a_signal_in_an_evaluation_ends_it(technique, training):
    """On all ranks, although one alone got the signal. A resume makes up for it."""
    where = {"ALTER_AT": "evaluate", "ALTER_RANK": "1" if technique == "spawn" else "0"}
    stopped = training.run(technique, *FEW, ALTER="SIGTERM", **where)
    assert stopped.returncode == 143, stopped.text
    assert (training.status["state"], training.status["global_step"]) == ("stopped", 6)
    assert not (training.folder / "metrics.jsonl").exists()
    succeed(training.run(technique, *FEW, "--resume"))
    assert training.summary["test_count"] == 500
    assert len(training.metrics) == 1


def test_a_step_that_a_stop_cuts_in_two_is_counted_once(training, tmp_path):
    """The loader gives five batches, of which the fifth begins a third step."""
    flag, extra = tmp_path / "flag", ["--model", "linear", "--num-workers", 1]
    extra += ["--grad-accum-steps", 2, "--batch-size", 96]
    process = training.start("single", *extra, ALTER="stuck", ALTER_AT="2", ALTER_FLAG=str(flag))
    wait_until(flag.exists)
    time.sleep(1.0)  # the fifth batch is trained meanwhile
    process.send_signal(signal.SIGTERM)
    assert finish(process, 60).returncode == 143
    saved = torch.load(training.folder / "checkpoints/last.pt", weights_only=True)["progress"]
    assert (saved["global_step"], saved["train_sums"]["count"]) == (2, 2 * 2 * 96)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_while_the_loader_is_stuck_a_stop_keeps_the_steps_and_a_kill_leaves_nobody(
    number, training, tmp_path
):
    flag, extra = tmp_path / "flag", ["--model", "linear", "--num-workers", 1]
    process = training.start("single", *extra, ALTER="stuck", ALTER_AT="5", ALTER_FLAG=str(flag))
    wait_until(flag.exists)
    process.send_signal(number)
    ended = finish(process, 60)  # the worker holds its output, too
    if number == signal.SIGTERM:
        assert ended.returncode == 143
        told = training.status
        assert (told["state"], told["global_step"]) == ("stopped", 5)


# Failures


@pytest.mark.parametrize("technique", ["single", pytest.param("ddp", marks=SLOW)])
def test_an_exception_ends_the_run_although_loader_workers_live(technique, training):
    extra = ["--model", "linear", "--num-workers", 2]
    ended = training.run(technique, *extra, ALTER="raise", ALTER_AT="4")
    assert ended.returncode == 1
    assert "ArithmeticError: wrong on purpose" in ended.stderr
    told = training.status
    assert (told["state"], told["reason"]) == ("failed", "ArithmeticError: wrong on purpose")


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
    [("evaluate", "single", 1), ("4", "spawn", 1), pytest.param("4", "dp", 2, marks=SLOW)],
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


@SLOW
def test_too_few_open_files_is_one_line(training):
    words = training.command("single", *FEW, "--num-workers", 2)
    ended = run("bash", "-c", f"ulimit -n 24; {' '.join(map(str, words))}")
    assert ended.returncode == 2, ended.text
    # A loader worker may report the same of itself before.
    assert ended.stderr.count("train_single.py: error: ") == 1, ended.stderr
    assert "ulimit -n" in ended.stderr.splitlines()[-1]
