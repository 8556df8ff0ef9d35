"""Stop requests and crashes: what was saved is loaded, and the end is that of a calm run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import MARK, finish, run, start
from tests.test_scripts import HARD, command, final_state, flags, succeed
from utils import signals

# Nearly a minute of training, and an evaluation of less than a second.
LONG = ["--model", "convnet", "--max-steps", 2000, "--save-every-steps", 3]
BUCKETS = {"basic": 0.25, "convnet": 0.05}  # MB: several in each


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def status(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "status.json").read_text())


def marked() -> dict[int, tuple[str, dict[str, str]]]:
    """Return command and environment of every process that a test started, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if MARK in variables and line:
            found[int(folder.name)] = (line, dict(v.split("=", 1) for v in variables if "=" in v))
    return found


def ranks() -> dict[int, int]:
    """Return the pid of each rank; loader workers share their rank's environment."""
    found: dict[int, int] = {}
    for pid, (line, variables) in sorted(marked().items()):
        if "train_" in line and "distributed.run" not in line:
            found.setdefault(int(variables.get("RANK", 0)), pid)
    return found


# who gets the signal
TARGETS: dict[str, Callable[[subprocess.Popen[str]], list[int]]] = {
    "launcher": lambda process: [process.pid],
    "rank 1": lambda process: [ranks()[1]],
    "every process": lambda process: sorted(marked()),
}


@pytest.mark.parametrize(
    ("technique", "target", "number"),
    [
        ("single", "launcher", signal.SIGINT),
        pytest.param("ddp", "launcher", signal.SIGTERM, marks=pytest.mark.slow),
        ("ddp", "every process", signal.SIGTERM),
        pytest.param("single", "launcher", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("dp", "every process", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("ddp", "launcher", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("ddp", "rank 1", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("ddp", "rank 1", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("ddp", "every process", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_stop_request_saves_and_ends_soon(
    technique: str, target: str, number: signal.Signals, synthetic_dir: Path, tmp_path: Path
) -> None:
    extra = [*LONG, "--num-workers", 2]
    process = start(*command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *extra)))
    wait_until((tmp_path / "run" / "checkpoints" / "last.pt").exists)
    begin = time.monotonic()
    for pid in TARGETS[target](process):
        os.kill(pid, number)
    result = finish(process, timeout=30, since=begin)
    assert result.seconds < 10
    told = status(tmp_path / "run")
    assert (told["state"], told["signal"]) == ("stopped", number.name), result.text
    if technique != "ddp":
        assert result.returncode == 128 + number
        assert result.stderr == ""
    assert "Traceback" not in result.stdout
    names = [path.name for path in (tmp_path / "run").rglob("*")]
    assert not any(name.endswith(".tmp") for name in names), names

    again = [*LONG[:3], told["global_step"] + 2, *LONG[4:], "--resume"]
    succeed(run(*command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *again))))
    assert status(tmp_path / "run")["global_step"] == told["global_step"] + 2


@pytest.mark.parametrize(
    ("technique", "target"),
    [
        ("single", "launcher"),
        pytest.param("spawn", "launcher", marks=pytest.mark.slow),
        pytest.param("dp", "launcher", marks=pytest.mark.slow),
        pytest.param("spawn", "every process", marks=pytest.mark.slow),
    ],
)
def test_a_second_ctrl_c_ends_at_once(
    technique: str, target: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    """A launcher alone gets it from a batch system, every process from a terminal."""
    # The first step takes many seconds, most of it in one call. DDP's warm-up, before
    # there is a run directory, takes as long as a step.
    size = {"single": 20000, "dp": 10000, "spawn": 5000}[technique]
    extra = [*LONG, "--model", "basic", "--num-workers", 1, "--batch-size", size]
    process = start(*command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *extra)))
    wait_until((tmp_path / "run" / "status.json").exists, 150)
    time.sleep(1.0)
    for pid in TARGETS[target](process):
        os.kill(pid, signal.SIGINT)
    time.sleep(1.5)
    begin = time.monotonic()
    for pid in TARGETS[target](process):
        os.kill(pid, signal.SIGINT)
    result = finish(process, timeout=10, since=begin)
    assert result.returncode == 130
    script_name = "train_ddp.py" if technique == "spawn" else f"train_{technique}.py"
    assert result.stderr == f"{script_name}: interrupted\n"
    told = status(tmp_path / "run")
    assert told["state"] == "failed"
    assert told["reason"] == "interrupted by a second Ctrl-C"


@pytest.mark.parametrize("technique", ["single", pytest.param("spawn", marks=pytest.mark.slow)])
def test_of_a_burst_of_signals_one_is_reported(
    technique: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    process = start(*command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *LONG)))
    wait_until((tmp_path / "run" / "checkpoints" / "last.pt").exists)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        for pid in TARGETS["launcher" if technique == "single" else "every process"](process):
            os.kill(pid, number)
    result = finish(process, timeout=30)
    told = status(tmp_path / "run")
    assert told["state"] == "stopped"
    assert result.returncode == 128 + signal.Signals[told["signal"]]
    assert f"stopped by {told['signal']} at step" in result.stdout
    assert result.stderr == ""


def torch_is_being_loaded(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def spawned_ranks() -> list[int]:
    return [pid for pid, (line, _) in marked().items() if "spawn_main" in line]


@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.7])
def test_ctrl_c_while_modules_are_imported_is_quiet(
    seconds: float, synthetic_dir: Path, tmp_path: Path
) -> None:
    arguments = flags(synthetic_dir, tmp_path / "run", *LONG)
    process = start(*command("single", 1, *arguments), real=True)
    wait_until(lambda: torch_is_being_loaded(process.pid))
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    result = finish(process, timeout=30)
    # On a fast machine the training may have begun, and stops in the orderly way.
    assert result.returncode in (-signal.SIGINT, 130)
    assert result.stderr == ""


def test_ctrl_c_while_spawned_ranks_import_is_quiet(synthetic_dir: Path, tmp_path: Path) -> None:
    process = start(*command("spawn", 2, *flags(synthetic_dir, tmp_path / "run", *LONG)), real=True)
    # Earlier, it is the interpreter that starts, and shows where it was interrupted.
    wait_until(lambda: [torch_is_being_loaded(rank) for rank in spawned_ranks()] == [True, True])
    for pid in TARGETS["every process"](process):
        os.kill(pid, signal.SIGINT)
    result = finish(process, timeout=30)
    assert result.returncode == 130
    assert "Traceback" not in result.text


INSTALL = "import os, signal, time; from utils import signals; signals.install_handlers()\n"
INSTALL += "def kill(name): os.kill(os.getpid(), getattr(signal, name)); time.sleep(0.1)\n"


def test_the_first_signal_counts() -> None:
    burst = "kill('SIGTERM'); kill('SIGUSR1'); kill('SIGINT'); print(signals.received())"
    assert run(sys.executable, "-c", INSTALL + burst).stdout == f"{signal.SIGTERM}\n"


@pytest.mark.parametrize(
    ("last_words", "said"),
    [
        ("lambda: os.write(1, b'last words')", "last words"),
        ("lambda: time.sleep(600)", ""),
        ("lambda: 1 / 0", ""),
        ("None", ""),
    ],
)
def test_last_words_end_in_time(last_words: str, said: str) -> None:
    """The main thread waits for something that never comes, as in a collective."""
    code = f"{INSTALL}signals.before_interrupt({last_words})\n"
    code += "kill('SIGINT'); kill('SIGINT'); time.sleep(1.2); kill('SIGINT'); time.sleep(600)"
    result = run(sys.executable, "-c", code, timeout=30)
    assert (result.returncode, result.stdout) == (130, said)
    assert result.stderr == "-c: interrupted\n"


class Delayed:
    """Agree as DDP does: what is asked in one call is answered in the next."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.asked, self.answers = ranks, 0, [0]
        self.numbers: list[int] = []

    def __call__(self, number: int) -> int:
        self.numbers.append(number)
        if len(self.numbers) == self.ranks:  # the last rank of this call
            self.answers.append(max(self.numbers))
            self.numbers = []
        self.asked += 1
        return self.answers[(self.asked - 1) // self.ranks]


def test_all_ranks_stop_at_one_step_with_one_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    agree = Delayed(ranks=3)
    requests = [signals.StopRequest(agree) for _ in range(3)]
    got = {(2, 0): signal.SIGTERM, (3, 0): signal.SIGTERM, (3, 2): signal.SIGINT}
    told = []
    for step in range(1, 5):
        answers = []
        for rank, request in enumerate(requests):
            monkeypatch.setattr(signals, "_received", int(got.get((step, rank), 0)))
            answers.append(request.poll())
        told.append(answers)
        if any(answers):
            break
    assert told == [[False] * 3, [False] * 3, [True] * 3]
    assert {request.name for request in requests} == {"SIGTERM"}
    asked = agree.asked
    assert all(request.poll() for request in requests), "once agreed on, it stays"
    assert agree.asked == asked, "and nobody is asked again"


@pytest.mark.parametrize(
    ("technique", "processes", "victim", "model"),
    [
        pytest.param("ddp", 2, 0, "convnet", marks=pytest.mark.long),
        pytest.param("ddp", 2, 0, "basic", marks=pytest.mark.slow),
        pytest.param("single", 1, 0, "basic", marks=pytest.mark.slow),
        pytest.param("dp", 2, 0, "convnet", marks=pytest.mark.slow),
        pytest.param("ddp", 3, 2, "basic", marks=pytest.mark.slow),
        pytest.param("ddp", 4, 1, "basic", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_leaves_a_run_that_ends_as_if_undisturbed(
    technique: str, processes: int, victim: int, model: str, short_dir: Path, tmp_path: Path
) -> None:
    """Dropout (but for DP, where it cannot repeat), several buckets, momentum, accumulation,
    augmentation and loader workers at once; without the dropout in the quick run."""
    hard = ["--model", model, *HARD]
    hard += ["--grad-accum-steps", 2, "--num-workers", 1, "--batch-size", 16]
    if technique == "ddp":
        hard += ["--bucket-cap-mb", BUCKETS[model]]
    succeed(run(*command(technique, processes, *flags(short_dir, tmp_path / "a", *hard))))

    process = start(*command(technique, processes, *flags(short_dir, tmp_path / "b", *hard)))
    wait_until((tmp_path / "b" / "checkpoints" / "last.pt").exists)
    os.kill(ranks()[victim], signal.SIGKILL)
    killed = finish(process, timeout=60)
    if killed.returncode != 0:  # it may have been through already
        assert status(tmp_path / "b")["state"] in ("running", "failed")
        again = [*flags(short_dir, tmp_path / "b", *hard), "--resume"]
        succeed(run(*command(technique, processes, *again)))
    assert final_state(tmp_path / "b") == final_state(tmp_path / "a")


def test_tensorboard_forgets_what_is_trained_again(synthetic_dir: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    extra = ["--model", "linear", "--log-every", 1]
    for end, more in ((20, ["--save-every-steps", 7]), (25, ["--resume"])):
        arguments = flags(synthetic_dir, tmp_path / "run", *extra, "--max-steps", end, *more)
        succeed(run(*command("single", 1, *arguments)))
        if end == 20:  # as if it had been killed at step 20, after the checkpoint of step 14
            folder = tmp_path / "run" / "checkpoints"
            os.replace(folder / "step-00000014.pt", folder / "last.pt")
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    steps = [event.step // 96 for event in events.Scalars("step/loss")]
    assert steps == list(range(1, 26))


def test_a_second_run_in_the_same_folder_is_refused(synthetic_dir: Path, tmp_path: Path) -> None:
    arguments = command("single", 1, *flags(synthetic_dir, tmp_path / "run", *LONG))
    first = start(*arguments)
    wait_until((tmp_path / "run" / "status.json").exists)
    second = run(*arguments, "--resume", timeout=30)
    assert second.returncode == 2
    assert f"in use by process {first.pid} on" in second.stderr
    os.kill(first.pid, signal.SIGKILL)
    finish(first, timeout=10)
    third = run(*arguments[:-1], 3, "--max-steps", 1, timeout=30)
    assert "holds a run (killed): continue it with --resume" in third.stderr, "the lock is free"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_is_one_line_and_costs_no_checkpoint(short_dir: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = run("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk)
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        # 1.2 million weights and as many of momentum: 9.6 MB a checkpoint, and three do not fit.
        extra = ["--model", "basic", "--max-steps", 9, "--save-every-steps", 3, "--batch-size", 16]
        result = run(*command("single", 1, *flags(short_dir, disk / "run", *extra)))
        assert result.returncode == 1
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert "No space left on device" in result.stderr
        assert status(disk / "run")["state"] == "failed"
        arguments = flags(short_dir, disk / "run", *extra, "--resume", "--keep", 1)
        (disk / "run" / "checkpoints" / "step-00000003.pt").unlink(missing_ok=True)
        succeed(run(*command("single", 1, *arguments)))
    finally:
        run("umount", disk)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a folder read-only for itself")
def test_a_folder_that_becomes_read_only(synthetic_dir: Path, tmp_path: Path) -> None:
    """At the start nothing begins; later the last checkpoint stays, and the run fails."""
    run_dir = tmp_path / "run"
    arguments = command("single", 1, *flags(synthetic_dir, run_dir, *LONG))
    process = start(*arguments)
    wait_until((run_dir / "checkpoints" / "last.pt").exists)
    folder = run_dir / "checkpoints"
    try:
        for options in ("bind", "remount,ro,bind"):
            mounted = run("mount", "-o", options, folder, folder)
            if mounted.returncode != 0:
                os.kill(process.pid, signal.SIGKILL)
                finish(process, timeout=10)
                pytest.skip(f"needs to mount a folder: {mounted.stderr.strip()}")
        ended = finish(process, timeout=30)
    finally:
        run("umount", folder)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "Read-only file system; the one before is whole" in ended.stderr
    assert status(run_dir)["state"] == "failed"
    more = ["--max-steps", status(run_dir)["global_step"] + 9, "--resume"]
    succeed(run(*arguments, *more))

    run("mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder)
    try:
        refused = run(*command("single", 1, *flags(synthetic_dir, folder / "new", *LONG)))
    finally:
        run("umount", folder)
    assert refused.returncode == 2
    assert "cannot be written (Read-only file system)" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
