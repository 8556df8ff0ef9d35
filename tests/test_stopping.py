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
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import (
    ROOT,
    command,
    error_line,
    final_state,
    finish,
    flags,
    marked,
    metrics,
    ranks,
    run,
    script,
    start,
    status,
    succeed,
    summary,
    through_altered,
    wait_until,
)

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
SLOW = pytest.mark.slow


def send(process, target, number):
    for pid in TARGETS[target](process):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def name_of(technique):
    return "ddp" if technique == "spawn" else technique


def is_saved(folder):
    return (folder / "checkpoints" / "last.pt").exists


@pytest.mark.parametrize(
    ("technique", "target", "number"),
    [
        ("single", "launcher", signal.SIGINT),
        ("ddp", "every process", signal.SIGTERM),
        pytest.param("dp", "every process", signal.SIGTERM, marks=SLOW),
        pytest.param("ddp", "launcher", signal.SIGTERM, marks=SLOW),
        pytest.param("ddp", "rank 1", signal.SIGUSR1, marks=SLOW),
        pytest.param("spawn", "every process", signal.SIGINT, marks=SLOW),
    ],
)
def test_a_stop_request_saves_and_ends_soon(technique, target, number, short_dir, tmp_path):
    folder = tmp_path / "run"
    words = command(technique, 2, *flags(short_dir, folder, *LONG, "--num-workers", 1))
    process = start(*words)
    wait_until(is_saved(folder))
    send(process, target, number)
    ended = finish(process, timeout=60)
    told = status(folder)
    assert (told["state"], told["signal"]) == ("stopped", number.name), ended.text
    if technique != "ddp":  # torchrun's own status is 0 or 1
        assert (ended.returncode, ended.stderr) == (128 + number, "")
    assert f"stopped by {number.name} at step {told['global_step']}" in ended.stdout
    assert "Traceback" not in ended.stdout
    launcher = "torchrun --standalone --nproc_per_node 2" if technique == "ddp" else "python"
    assert told["continue"].startswith(f"{launcher} train_{name_of(technique)}.py --threads 1 ")
    assert told["continue"].endswith(f"--num-workers 1 --run-dir {folder} --resume")
    assert not list(folder.rglob("*.tmp"))
    words[words.index(99999)] = told["global_step"] + 2
    succeed(run(*words, "--resume"))
    assert status(folder)["global_step"] == told["global_step"] + 2


@pytest.mark.parametrize(
    ("technique", "target"),
    [("single", "launcher"), pytest.param("spawn", "every process", marks=SLOW)],
)
def test_a_second_ctrl_c_ends_at_once(technique, target, synthetic_dir, tmp_path):
    """Although the main thread waits in C; with several ranks another one does in a collective."""
    interrupted, hang = "interrupted by a second Ctrl-C", tmp_path / "hang"
    words = command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *LONG))
    words = [*through_altered(words), "--num-workers", 1]
    process = start(*words, ALTER="hang", ALTER_AT="1", ALTER_FLAG=str(hang))
    wait_until(hang.exists)
    while process.poll() is None:  # a person presses it until something happens, too
        send(process, target, signal.SIGINT)
        time.sleep(0.5)
    line = f"train_{name_of(technique)}.py: error: {interrupted}\n"
    assert error_line(finish(process, timeout=20), 130) == line
    told = status(tmp_path / "run")
    assert (told["state"], told["reason"]) == ("failed", f"Interrupted: {interrupted}")


def torch_is_being_loaded(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("seconds", [pytest.param(0.0, marks=SLOW), 0.5])
def test_ctrl_c_while_modules_are_imported_is_quiet(seconds, synthetic_dir, tmp_path):
    words = command("single", 1, *flags(synthetic_dir, tmp_path / "run", *LONG))
    process = start(*words, real=True)
    wait_until(lambda: torch_is_being_loaded(process.pid))
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    ended = finish(process, timeout=60)
    # On a fast machine the training may have begun, and stops in the orderly way.
    assert ended.returncode in (-signal.SIGINT, 130)
    assert ended.stderr == ""


@SLOW
def test_ctrl_c_while_spawned_ranks_import_is_quiet(synthetic_dir, tmp_path):
    words = command("spawn", 2, *flags(synthetic_dir, tmp_path / "run", *LONG))
    process = start(*words, real=True)
    # Earlier, it is the interpreter that starts, and shows where it was interrupted.
    spawned = lambda: [pid for pid, (line, _) in marked().items() if "spawn_main" in line]  # noqa: E731
    wait_until(lambda: [torch_is_being_loaded(pid) for pid in spawned()] == [True, True])
    send(process, "every process", signal.SIGINT)
    ended = finish(process, timeout=60)
    assert ended.returncode == 130
    assert "Traceback" not in ended.text


INSTALL = "import os, signal, time; from utils import signals; signals.install_handlers()\n"
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
    code = f"{INSTALL}signals.before_end({last_words})\n"
    code += "kill('SIGINT'); kill('SIGINT'); time.sleep(0.3); os.write(1, b'lives ')\n"
    code += "while True: kill('SIGINT'); time.sleep(0.3)"
    ended = run(sys.executable, "-c", code)
    assert error_line(ended, 130) == "-c: error: interrupted by a second Ctrl-C\n"
    assert ended.stdout == f"lives {said}", "the first Ctrl-C may come twice"


# Kills


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("technique", "processes", "number"),
    [
        ("single", 1, signal.SIGTERM),
        ("ddp", 2, signal.SIGKILL),
        pytest.param("dp", 2, signal.SIGKILL, marks=SLOW),
        pytest.param("ddp", 3, signal.SIGKILL, marks=SLOW),
    ],
)
def test_a_killed_run_ends_as_if_undisturbed(technique, processes, number, short_dir, tmp_path):
    """To the bit: stopped or killed at a moment that is drawn, in one rank, and resumed."""
    # With dropout DataParallel does not repeat itself: its replicas share a generator.
    model = ["--model", "convnet" if technique == "dp" else "basic"]
    model += ["--bucket-cap-mb", 0.25] if technique == "ddp" else []
    calm, disturbed = (
        command(technique, processes, *flags(short_dir, tmp_path / name, *HARD, *model))
        for name in ("calm", "disturbed")
    )
    succeed(run(*calm, timeout=200))
    draw, ranks = random.Random(f"{technique} {processes}"), processes if technique == "ddp" else 1
    how = {"ALTER": number.name, "ALTER_RANK": str(draw.randrange(ranks))}
    how |= {"ALTER_AT": str(draw.randint(3, 8)), "ALTER_DELAY": str(draw.uniform(0.001, 0.02))}
    ended = run(*through_altered(disturbed), timeout=150, **how)
    assert status(tmp_path / "disturbed")["state"] != "complete", f"nothing was killed: {ended}"
    succeed(run(*disturbed, "--resume", timeout=200))
    assert final_state(tmp_path / "disturbed") == final_state(tmp_path / "calm")


def test_ranks_without_a_shared_disk_resume_what_rank_0_reads(short_dir, tmp_path):
    """No other rank finds a checkpoint, and the run ends as one that was not stopped."""
    for name, steps in (("calm", 8), ("stopped", 4)):
        words = flags(short_dir, tmp_path / name, "--model", "mlp", "--timeout", 20, "--max-steps")
        words = command("spawn", 2, *words)
        succeed(run(*words, steps))
    succeed(run(*through_altered(words), 8, "--resume", ALTER="empty"))
    assert final_state(tmp_path / "stopped") == final_state(tmp_path / "calm")


def test_a_curve_that_failed_beyond_a_save_has_each_step_once(synthetic_dir, tmp_path):
    words = script("train_single.py", *flags(synthetic_dir, tmp_path, *FEW, "--log-every", 1))
    assert run(*through_altered(words), ALTER="raise", ALTER_AT="5").returncode == 1
    succeed(run(*words, "--resume"))
    curve = EventAccumulator(str(tmp_path)).Reload().Scalars("step/learning_rate")
    assert [event.step for event in curve] == [96 * step for step in range(1, 7)]


def test_a_rank_that_is_asked_to_stop_starts_no_other_attempt(short_dir, tmp_path):
    """Slurm, or a spot machine, sends SIGTERM; torchrun would take another status for a crash."""
    words = through_altered(command("ddp", 2, *flags(short_dir, tmp_path / "run", *FEW)))
    at = words.index("--standalone")
    words[at:at] = ["--max-restarts", 1]
    ended = succeed(run(*words, ALTER="SIGTERM", ALTER_RANK="1", ALTER_AT="4"))
    assert ended.stdout.count("stopped by SIGTERM at step ") == 1
    assert (ended.stdout.count("epoch   loss"), status(tmp_path / "run")["state"]) == (1, "stopped")


@pytest.mark.parametrize("technique", ["single", pytest.param("ddp", marks=SLOW)])
def test_a_run_that_was_killed_before_its_summary_keeps_its_metrics(
    technique, synthetic_dir, tmp_path
):
    """All is evaluated and saved; the epoch, which --max-steps cut short, has not ended."""
    words = script(f"train_{technique}.py", *flags(synthetic_dir, tmp_path / "run", *FEW))
    killed = run(*through_altered(words), ALTER="SIGKILL", ALTER_AT="results")
    assert killed.returncode == -signal.SIGKILL
    before = metrics(tmp_path / "run")
    succeed(run(*words, "--resume"))
    assert metrics(tmp_path / "run") == before
    assert [row["test_accuracy"] for row in before] == [summary(tmp_path / "run")["test_accuracy"]]


@pytest.mark.parametrize(("technique", "step"), [("single", "6"), ("spawn", "5"), ("spawn", "6")])
def test_a_signal_in_the_last_steps_stops_before_the_evaluation(
    technique, step, synthetic_dir, tmp_path
):
    """Ranks agree one step late, and after the last step there is none to agree in."""
    words = command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *FEW))
    stopped = run(*through_altered(words), ALTER="SIGTERM", ALTER_AT=step)
    assert stopped.returncode == 143, stopped.text
    told = status(tmp_path / "run")
    assert (told["state"], told["global_step"]) == ("stopped", 6)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    succeed(run(*words, "--resume"))
    assert summary(tmp_path / "run")["test_count"] == 10_000
    assert len(metrics(tmp_path / "run")) == 1


def test_a_stop_while_the_loader_is_stuck_keeps_the_steps(synthetic_dir, tmp_path):
    flag, extra = tmp_path / "flag", ["--model", "linear", "--num-workers", 1]
    words = script("train_single.py", *flags(synthetic_dir, tmp_path / "run", *extra))
    words = through_altered(words)
    process = start(*words, ALTER="stuck", ALTER_AT="5", ALTER_FLAG=str(flag))
    wait_until(flag.exists)
    process.terminate()
    assert finish(process, 60).returncode == 143
    found = status(tmp_path / "run")
    assert (found["state"], found["global_step"]) == ("stopped", 5)


# Failures


@pytest.mark.parametrize("technique", ["single", pytest.param("ddp", marks=SLOW)])
def test_an_exception_ends_the_run_although_loader_workers_live(technique, synthetic_dir, tmp_path):
    extra = ["--model", "linear", "--num-workers", 2]
    words = script(f"train_{technique}.py", *flags(synthetic_dir, tmp_path / "run", *extra))
    ended = run(*through_altered(words), ALTER="raise", ALTER_AT="4")
    assert ended.returncode == 1
    assert "ArithmeticError: wrong on purpose" in ended.stderr
    told = status(tmp_path / "run")
    assert (told["state"], told["reason"]) == ("failed", "ArithmeticError: wrong on purpose")


def test_a_loader_worker_that_is_killed_ends_the_run_with_one_line(synthetic_dir, tmp_path):
    """Out of memory, the kernel kills one of them."""
    extra = ["--model", "linear", "--num-workers", 1, "--epochs", 999]
    words = script("train_single.py", *flags(synthetic_dir, tmp_path / "run", *extra))
    process = start(*words)
    wait_until((tmp_path / "run" / "metrics.jsonl").exists, 150)
    psutil.Process(process.pid).children()[1].kill()  # 0 is a fork server
    assert "a loader worker died" in error_line(finish(process, 60), 1)
    assert status(tmp_path / "run")["state"] == "failed"
    assert "a loader worker died" in status(tmp_path / "run")["reason"]


ORPHANS = """
import os, signal, sys, time
from torch.utils.data import DataLoader
import data
class Slow(list):
    def __getitem__(self, index):
        os.write(1, b"x")
        time.sleep(600)
if __name__ == "__main__":
    options = {"worker_init_fn": data.tie_to_parent, "multiprocessing_context": sys.argv[1]}
    workers = iter(DataLoader(Slow([1, 2]), num_workers=2, **options))
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=SLOW)])
def test_loader_workers_die_with_their_training_process(method, tmp_path):
    """Also where it is killed while they load, and ignore all that would stop them."""
    (tmp_path / "orphans.py").write_text(ORPHANS)
    process = start(sys.executable, tmp_path / "orphans.py", method, PYTHONPATH=str(ROOT))
    assert process.stdout.read(2) == "xx"
    process.kill()
    process.communicate(timeout=60)  # the workers hold its output, too


@pytest.mark.parametrize(
    ("when", "technique"),
    [("evaluate", "single"), ("4", "ddp"), pytest.param("4", "dp", marks=SLOW)],
)
def test_what_is_not_finite_is_never_saved(when, technique, synthetic_dir, tmp_path):
    """Neither a loss of training nor one of the evaluation; what was saved before is whole."""
    folder = tmp_path / "run"
    words = script(f"train_{technique}.py", *flags(synthetic_dir, folder, *FEW))
    words[words.index(3)] = 2
    ended = run(*through_altered(words), ALTER="nan", ALTER_AT=when)
    assert "the loss is nan" in error_line(ended, 1)
    assert status(folder)["state"] == "failed"
    assert not (folder / "summary.json").exists()
    resumed = succeed(run(*words, "--resume"))
    assert f"resumed at step {4 if when == '4' else 6}" in resumed.stdout
    assert "it has diverged: if the loss stays high, put previous.pt" in resumed.stdout
    assert summary(folder)["test_count"] == 10_000


def test_a_reader_of_the_output_that_leaves_ends_no_training(synthetic_dir, tmp_path):
    process = start(*script("train_single.py", *flags(synthetic_dir, tmp_path / "run", *FEW)))
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == ("", 0)
    assert summary(tmp_path / "run")["test_count"] == 10_000


@SLOW
@pytest.mark.parametrize("redirection", ["", "> /dev/full", ">&- 2>&- <&-"])
def test_output_that_nobody_takes_ends_no_training(redirection, synthetic_dir, tmp_path):
    """Nor does a name that no terminal can show."""
    folder = tmp_path / "r\u00fcn"
    words = script("train_single.py", *flags(synthetic_dir, folder, *FEW))
    shell = ["bash", "-c", f"{' '.join(map(str, words))} {redirection}"]
    succeed(run(*shell, PYTHONIOENCODING="ascii"))
    assert summary(folder)["test_count"] == 10_000


@SLOW
def test_too_few_open_files_is_one_line(synthetic_dir, tmp_path):
    extra = [*FEW, "--num-workers", 2]
    words = script("train_single.py", *flags(synthetic_dir, tmp_path / "run", *extra))
    ended = run("bash", "-c", f"ulimit -n 24; {' '.join(map(str, words))}")
    assert ended.returncode == 2, ended.text
    # A loader worker may report the same of itself before.
    assert ended.stderr.count("train_single.py: error: ") == 1, ended.stderr
    assert "ulimit -n" in ended.stderr.splitlines()[-1]
