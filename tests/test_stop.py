"""Stop requests and crashes: what was saved is loaded, and the end is that of a calm run."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import MARK, finish, run, start
from tests.test_scripts import HARD, command, final_state, flags, succeed

LONG = ["--model", "basic", "--max-steps", 2000, "--batch-size", 16, "--save-every-steps", 3]
BUCKETS = ["--bucket-cap-mb", 0.25]


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
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
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


def test_a_second_ctrl_c_ends_at_once(synthetic_dir: Path, tmp_path: Path) -> None:
    process = start(
        *command("single", 1, *flags(synthetic_dir, tmp_path / "run", *LONG, "--batch-size", 20000))
    )
    wait_until((tmp_path / "run" / "status.json").exists)
    time.sleep(0.5)  # into the first step, which takes half a minute, most of it one call
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    result = finish(process, timeout=10, since=begin)
    assert result.returncode == 130
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.text


@pytest.mark.parametrize(
    ("technique", "processes", "victim"),
    [
        ("ddp", 2, 0),
        pytest.param("single", 1, 0, marks=pytest.mark.slow),
        pytest.param("dp", 2, 0, marks=pytest.mark.slow),
        pytest.param("ddp", 3, 2, marks=pytest.mark.slow),
        pytest.param("ddp", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_leaves_a_run_that_ends_as_if_undisturbed(
    technique: str, processes: int, victim: int, synthetic_dir: Path, tmp_path: Path
) -> None:
    """Dropout (but for DP, where it cannot repeat), several buckets, momentum, accumulation,
    augmentation and loader workers at once."""
    hard = [*HARD, "--grad-accum-steps", 2, "--num-workers", 1, "--batch-size", 16]
    if technique == "dp":
        hard[1] = "convnet"
    if technique == "ddp":
        hard += BUCKETS
    succeed(run(*command(technique, processes, *flags(synthetic_dir, tmp_path / "a", *hard))))

    process = start(*command(technique, processes, *flags(synthetic_dir, tmp_path / "b", *hard)))
    wait_until((tmp_path / "b" / "checkpoints" / "last.pt").exists)
    os.kill(ranks()[victim], signal.SIGKILL)
    killed = finish(process, timeout=60)
    if killed.returncode != 0:  # it may have been through already
        assert status(tmp_path / "b")["state"] in ("running", "failed")
        again = [*flags(synthetic_dir, tmp_path / "b", *hard), "--resume"]
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
def test_a_full_disk_is_one_line_and_costs_no_checkpoint(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = run("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk)
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        # 1.2 million weights and as many of momentum: 9.6 MB a checkpoint, and three do not fit.
        extra = ["--model", "basic", "--max-steps", 9, "--save-every-steps", 3, "--batch-size", 16]
        result = run(*command("single", 1, *flags(synthetic_dir, disk / "run", *extra)))
        assert result.returncode == 1
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert "No space left on device" in result.stderr
        assert status(disk / "run")["state"] == "failed"
        arguments = flags(synthetic_dir, disk / "run", *extra, "--resume", "--keep", 1)
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
