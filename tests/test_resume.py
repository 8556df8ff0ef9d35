"""A run that was killed goes on at the same sample, and ends in the same weights."""

import json
import shutil
import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.processes import Training, distance, finish, kill_strays, said_by_ranks, wait_until
from utils.errors import UserError

# Dropout, random shifts, momentum and accumulation, in 16 steps of 32 samples.
NOISY = ["--model", "tests.user_code:dropout_network", "--dataset", "tests.user_code:dots"]
NOISY += ["--batch-size", 8, "--grad-accum-steps", 2, "--save-every-steps", 3, "--log-every", 1]
# What has the same weights at any number of ranks, but for roundings of float64.
EXACT = ["--model", "tests.user_code:double_network", "--no-augment", "--lr", 0.3, "--momentum", 0]
EXACT += ["--epochs", 0.5, "--log-every", 1]
GLOBAL_BATCH = 48
SHARES = {"single": ("single", 48, 1), "dp": ("dp", 48, 1), "ddp": ("ddp", 24, 2)}
RESTARTS = {"launcher": ["--max-restarts", 1], "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_a_restart_by_torchrun_repeats_what_was_lost(digits_dir, tmp_path):
    """Rank 1 is killed in step 8, and the restart begins after step 6."""
    runs = {name: Training(digits_dir, tmp_path / name / "run") for name in ("calm", "killed")}
    for name, run in runs.items():
        run.folder.parent.mkdir()
        how = {"RECORD": str(run.folder.parent), "timeout": 200}
        if name == "killed":
            how |= RESTARTS | {"FAULT": "1:16:SIGKILL"}
        ended = run.succeed("ddp", *NOISY, **how)
    calm, killed = (run.summary for run in runs.values())
    assert killed["weights_sha256"] == calm["weights_sha256"]
    assert (calm["resumed_from"], killed["resumed_from"]) == (None, 6)
    assert killed["test_loss"] == calm["test_loss"]
    assert len(runs["killed"].rows) == 1
    board = EventAccumulator(str(runs["killed"].folder)).Reload()
    steps = [event.step for event in board.Scalars("running_mean_rank_0/loss")]
    assert steps == [*range(1, 17)], "one curve"
    assert "failed (exitcode: -9) local_rank: 1" in ended.stderr, "torchrun's report"

    def seen(name, rank, attempt):
        lines = (tmp_path / name / f"{rank}-{attempt}").read_text().splitlines()
        return [(x["places"], x["random"]) for x in map(json.loads, lines)]

    whole = [seen("calm", rank, 0) for rank in (0, 1)]
    assert len(whole[0]) == 32
    for rank in (0, 1):
        assert seen("killed", rank, 0)[:15] == whole[rank][:15]
        assert seen("killed", rank, 1) == whole[rank][12:], "shifts and dropout are the same again"
    # Every micro-step of every rank draws numbers of its own.
    assert len({tuple(random) for rank in whole for _, random in rank}) == 64
    shifts = {place - (14 * 28 + 14) for rank in whole for places, _ in rank for place in places}
    assert shifts == {-29, -28, -27, -1, 0, 1, 27, 28, 29}


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_a_kill_changes_no_bit(technique, digits_dir, tmp_path):
    """SIGKILL to all processes at any moment in an epoch, twice. The workers load the data."""
    flags = ["--model", "basic", "--epochs", 1.5, "--batch-size", 8, "--grad-accum-steps", 2]
    flags += ["--save-every-steps", 4, "--num-workers", 1, "--no-tensorboard"]
    calm, killed = (Training(digits_dir, tmp_path / name) for name in ("calm", "killed"))
    calm.succeed(technique, *flags)
    last = killed.folder / "checkpoints" / "last.pt"
    for resume in ([], ["--resume"]):
        before = killed.checkpoint["position"]["step"] if resume else 0
        process = killed.start(technique, *flags, *resume)
        wait_until(
            lambda: last.exists() and killed.checkpoint["position"]["step"] > before + 4,  # noqa: B023
            process,
        )
        kill_strays()
        finish(process)
        position = killed.checkpoint["position"]
        assert position["seen"] % 16 == 0 < position["seen"] < 1920
    killed.succeed(technique, *flags, "--resume")
    assert killed.summary["resumed_from"] == position["step"]
    assert killed.summary["weights_sha256"] == calm.summary["weights_sha256"]


def share(technique, ranks):
    return [technique, *EXACT, "--batch-size", GLOBAL_BATCH // ranks]


@pytest.mark.slow
def test_another_number_of_ranks_goes_on(digits_dir, tmp_path):
    """With the same global batch, in the middle of an epoch."""
    calm, changed = (Training(digits_dir, tmp_path / name) for name in ("calm", "changed"))
    calm.succeed(*share("single", 1))
    for step, ranks in ((6, 2), (12, 3), (20, 1)):
        more = ["--max-steps", step, *(["--resume"] if step > 6 else [])]
        changed.succeed(*share("ddp", ranks), *more, ranks=ranks)
        assert changed.summary["global_step"] == step
    assert distance(calm.checkpoint["model"], changed.checkpoint["model"]) < 1e-10
    assert calm.summary["test_correct"] == changed.summary["test_correct"]
    assert [row["global_step"] for row in changed.rows] == [6, 12, 20]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_script_resumes_any_other(digits_dir, tmp_path):
    """Nine pairs, each stopped in the middle of an epoch."""
    calm = Training(digits_dir, tmp_path / "calm")
    calm.succeed(*share("single", 1))
    for first, devices in (("single", 1), ("dp", 1), ("ddp", 2)):
        begun = Training(digits_dir, tmp_path / first)
        begun.succeed(*share(first, devices), "--max-steps", 9)
        for then, devices in (("single", 1), ("dp", 1), ("ddp", 2)):
            resumed = Training(digits_dir, tmp_path / f"{first}-{then}")
            shutil.copytree(begun.folder, resumed.folder)
            resumed.succeed(*share(then, devices), "--resume")
            facts = resumed.summary
            assert (facts["technique"], facts["resumed_from"]) == (then, 9)
            assert distance(calm.checkpoint["model"], resumed.checkpoint["model"]) < 1e-10
            assert facts["test_correct"] == calm.summary["test_correct"]


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(training):
    flags = ["--model", "linear", "--save-every-steps", 6, "--no-tensorboard"]
    training.succeed("single", *flags)
    whole = training.summary
    last = training.folder / "checkpoints" / "last.pt"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    ended = training.succeed("ddp", *flags, "--resume", "--batch-size", 48)
    assert ended.stderr.count("last.pt is damaged") == 1
    assert training.summary["resumed_from"] == 18
    assert training.summary["test_correct"] == pytest.approx(whole["test_correct"], abs=3)
    for path in last.parent.glob("*.pt"):
        path.write_bytes(b"nothing")
    ended = training.run("ddp", *flags, "--resume", "--batch-size", 48)
    *warnings, line = said_by_ranks(ended)
    assert "no checkpoint in" in line
    assert [warning.split()[0] for warning in warnings] == ["warning:"] * 2


def test_an_evaluation_that_is_owed_is_made_up_for(in_process):
    """Killed between the last save and the summary, a run is not complete."""
    flags = ["--model", "linear", "--no-tensorboard", "--epochs", 2, "--resume"]
    training = in_process("run", *flags)
    whole, rows = training.summary, training.rows
    (training.folder / "summary.json").unlink()
    beyond = rows[1] | {"global_step": 99}  # of an attempt whose checkpoint is damaged
    lines = [json.dumps(row) + "\n" for row in (rows[0], beyond)]
    (training.folder / "metrics.jsonl").write_text("".join(lines))
    in_process("run", *flags)
    facts = training.summary
    for key in ("test_correct", "test_count", "global_step", "weights_sha256"):
        assert facts[key] == whole[key]
    assert [row["global_step"] for row in training.rows] == [20, 40]
    in_process("run", *flags)
    assert training.summary == facts, "nothing was left to do"


def test_what_may_not_be_resumed_is_refused(in_process, tmp_path):
    flags = ["--model", "linear", "--no-tensorboard"]
    training = in_process("run", *flags, "--max-steps", 5)
    before = training.checkpoint["position"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    for name, more, words in (
        ("run", [], "holds a run: continue it with --resume"),
        ("run", ["--resume", "--seed", 1], "was trained with --seed 0, this command says 1"),
        ("run", ["--resume", "--model", "mlp"], "was trained with --model linear, this command"),
        ("other", ["--resume"], "holds other files, and no run"),
    ):
        with pytest.raises(UserError, match=words):
            in_process(name, *flags, *more)
    assert training.checkpoint["position"] == before
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]


def test_a_run_that_is_longer_than_its_epochs_is_not_complete(in_process, monkeypatch):
    """Who forgets --epochs 2 after a stop in the second epoch."""
    flags = ["--model", "tests.user_code:network", "--no-tensorboard", "--resume"]
    monkeypatch.setenv("FAULT", "0:30:SIGTERM")
    training = in_process("run", *flags, "--epochs", 2, stop=signal.SIGTERM)
    assert training.checkpoint["position"]["step"] == 30
    with pytest.raises(UserError, match="is longer than --epochs 1"):
        in_process("run", *flags)
    assert not (training.folder / "summary.json").exists()


def test_resume_without_a_folder_continues_the_latest_run(
    in_process, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    flags = ["--model", "linear", "--no-tensorboard", "--run-dir=", "--max-steps"]
    in_process("", *flags, 3)
    in_process("", *flags, 6, "--resume")
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"the latest run of this script is runs/{folder.name}" in capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["resumed_from"], summary["global_step"]) == (3, 6)


@pytest.mark.slow
def test_two_runs_cannot_share_a_folder(training):
    """The first one goes on. Loader workers, which outlive a kill for a while, hold no folder."""
    flags = ["--dataset", "tests.user_code:slow", "--model", "linear", "--no-tensorboard"]
    flags += ["--batch-size", 4, "--num-workers", 1]
    first = training.start("single", *flags, SLOW="0.5")
    wait_until((training.folder / "args.json").exists, first)
    ended = training.run("single", *flags, SLOW="0")
    assert (ended.status, len(ended.stderr.splitlines())) == (2, 1)
    assert "is in use by another run" in ended.stderr
    assert first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    ended = training.run("single", *flags, "--max-steps", 1, SLOW="0", timeout=60)
    assert ended.status == 0, ended.text
    kill_strays()
    finish(first)
