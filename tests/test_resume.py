"""A run that was killed or stopped goes on at the same sample, and ends in the same weights."""

import signal

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import data
from tests.processes import LIMIT, distance, recorded, succeed, torchrun

# Dropout, random shifts, momentum and accumulation, in 16 steps of 32 samples on two ranks.
NOISY = ["--model", "tests.user_code:dropout_network", "--dataset", "tests.user_code:dots"]
NOISY += ["--batch-size", 8, "--grad-accum-steps", 2, "--save-every-steps", 3, "--log-every", 1]
# What has the same weights at any number of ranks, but for roundings of float64: 20 steps of 48.
EXACT = ["--model", "tests.user_code:double_network", "--no-augment", "--lr", 0.1]
EXACT += ["--no-tensorboard", "--log-every", 1]


def test_every_micro_step_of_every_rank_draws_numbers_of_its_own(train, tmp_path, monkeypatch):
    monkeypatch.setenv("RECORD", str(tmp_path))
    train("run", *NOISY, script="ddp", ranks=2)
    seen = [each for rank in (0, 1) for each in recorded(tmp_path, rank)]
    assert len({each["mask"] for each in seen}) == len(seen) == 64
    shifts = {place - (14 * 28 + 14) for each in seen for place in each["places"]}
    assert shifts == {-29, -28, -27, -1, 0, 1, 27, 28, 29}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_restart_by_torchrun_repeats_what_was_lost(train, training, tmp_path):
    """Rank 1 is killed in step 8, and the restart begins after step 6."""
    calm = train("calm", *NOISY, script="ddp", ranks=2).summary
    command = torchrun(2, "--max-restarts", 1, *training.arguments("ddp", *NOISY))
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "RECORD": str(tmp_path)}
    succeed(*command, **environment, FAULT="1:16:SIGKILL", timeout=2 * LIMIT)
    killed = training.summary
    assert killed["weights_sha256"] == calm["weights_sha256"]
    assert (calm["resumed_from"], killed["resumed_from"]) == (None, 6)
    assert len(training.rows) == 1
    board = EventAccumulator(str(training.folder)).Reload()
    steps = [event.step for event in board.Scalars("running_mean_rank_0/loss")]
    assert steps == [*range(1, 17)], "one curve"
    assert {*(tmp_path / "saved_by").read_text().split()} == {"0"}, "rank 0 alone writes"
    # Exit handlers run after rank 0's error in the first attempt, and at the end of the second.
    assert sorted((tmp_path / "exit_handlers").read_text().split()) == ["0", "0", "1"]


def test_a_stop_in_an_epoch_changes_no_bit(train, monkeypatch):
    """Nor does a loader worker."""
    flags = [*NOISY, "--no-tensorboard", "--resume"]
    calm = train("calm", *flags).summary
    monkeypatch.setenv("FAULT", "0:26:SIGTERM")
    stopped = train("stopped", *flags, "--num-workers", 1, stop=signal.SIGTERM)
    assert stopped.checkpoint["position"]["seen"] == 13 * 16
    monkeypatch.delenv("FAULT")
    facts = train("stopped", *flags, "--num-workers", 1).summary
    assert facts["resumed_from"] == 13
    assert facts["weights_sha256"] == calm["weights_sha256"]


def test_other_scripts_and_other_numbers_of_ranks_go_on(train):
    """With the same global batch, each time in the middle of an epoch."""
    calm = train("calm", *EXACT, "--batch-size", 48, "--max-steps", 20)
    layouts = [("single", 1), ("ddp", 2), ("dp", 1), ("ddp", 3), ("single", 1)]
    for place, (script, ranks) in enumerate(layouts):
        flags = ["--batch-size", 48 // ranks, "--max-steps", 4 * (place + 1), "--resume"]
        run = train("changing", *EXACT, *flags, script=script, ranks=ranks)
        facts = run.summary
        assert (facts["technique"], facts["world_size"]) == (script, ranks)
        assert (facts["resumed_from"] or 0, facts["global_step"]) == (4 * place, 4 * (place + 1))
    assert distance(calm.checkpoint["model"], run.checkpoint["model"]) < 1e-9
    assert calm.summary["test_correct"] == run.summary["test_correct"]
    assert [row["global_step"] for row in run.rows] == [4, 8, 12, 16, 20]


def unreadable_test_set(data_dir):
    train_set, test_set = data.load("mnist", data_dir)
    return train_set, torch.utils.data.Subset(test_set, [0, 99_999])


def test_an_epoch_is_not_lost_if_its_evaluation_fails(train, tmp_path):
    """An evaluation may need more memory than the training, or a file that is damaged."""
    flags = ["--model", "linear", "--dataset", "tests.test_resume:unreadable_test_set"]
    with pytest.raises(IndexError):
        train("run", *flags, "--no-tensorboard")
    checkpoint = torch.load(tmp_path / "run" / "checkpoints" / "last.pt")
    assert checkpoint["position"]["step"] == 20


def test_an_evaluation_that_is_owed_is_made_up_for(train):
    """Killed between the last save and the summary, a run is not complete."""
    flags = ["--model", "linear", "--no-tensorboard", "--epochs", 2, "--resume"]
    run = train("run", *flags)
    whole = run.summary
    first, _ = (run.folder / "metrics.jsonl").read_text().splitlines()
    (run.folder / "metrics.jsonl").write_text(f"{first}\n")
    (run.folder / "summary.json").unlink()
    for _ in range(2):  # the second time, nothing is left to do
        facts = train("run", *flags).summary
        for key in ("test_correct", "test_count", "global_step", "weights_sha256"):
            assert facts[key] == whole[key]
        assert [row["global_step"] for row in run.rows] == [20, 40]
    previous = torch.load(run.folder / "checkpoints" / "previous.pt")
    assert previous["position"]["step"] == 20, "the checkpoint before, still"
