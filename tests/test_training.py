"""What the three scripts train, evaluate and report."""

import json

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.parallel import DistributedDataParallel

import data
import models
import train_ddp
from tests.processes import distance, recorded
from utils.errors import UserError
from utils.optim import warmup_cosine

# Others build on these names in summary.json.
CONTRACT = """
    script technique dataset model world_size num_devices device batch_size global_batch_size epochs
    global_step seed test_correct test_count test_accuracy test_loss train_images_per_second
    train_seconds data_seconds peak_memory_mb weights_sha256 torch_version resumed_from
"""
STEPS = 40  # of 64 samples: an epoch of 30 steps, and a part of the next
PLAIN = ["--lr", 0.3, "--no-augment", "--max-grad-norm", 0.5, "--epochs", 2, "--max-steps", STEPS]
PLAIN += ["--model", "tests.user_code:double_network", "--log-every", 3]
ACCUMULATE = ["--grad-accum-steps", 2]


def score(name, weights, data_dir):
    """Return how many test images a model with these weights gets right, and its loss."""
    dtype = next(iter(weights.values())).dtype
    model = models.MODELS[name]().to(dtype).eval()
    model.load_state_dict({key.removeprefix("inner."): value for key, value in weights.items()})
    images, labels = data.load("mnist", str(data_dir))[1].tensors
    images = ((images / 255 - 0.1307) / 0.3081).unsqueeze(1).to(dtype)
    with torch.no_grad():
        outputs = model(images)
    correct = int((outputs.argmax(1) == labels).sum())
    return correct, pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-4)


def test_the_scripts_agree_and_report_what_they_did(train, digits_dir, tmp_path, monkeypatch):
    """Data parallelism is an identity: the same global batch gives the same weights."""
    runs = {
        "single": train("single", *PLAIN, "--batch-size", 64),
        "dp": train("dp", *PLAIN, "--batch-size", 32, *ACCUMULATE, script="dp"),
    }
    monkeypatch.setenv("RECORD", str(tmp_path))
    flags = [*PLAIN, "--batch-size", 16, *ACCUMULATE]
    runs["ddp"] = train("ddp", *flags, script="ddp", ranks=2)
    for technique, run in runs.items():
        check_report(technique, run, digits_dir)
        # But for the order in which floats are added.
        assert distance(run.checkpoint["model"], runs["single"].checkpoint["model"]) < 1e-9
        for key in ("train_loss", "test_loss"):
            assert run.summary[key] == pytest.approx(runs["single"].summary[key], rel=1e-9)
    check_accumulation_sends_once(tmp_path)
    check_rates(runs["ddp"])


def check_report(technique, run, data_dir):
    """The evaluation is that of the checkpoint, and averages are over all samples of an epoch."""
    facts = run.summary
    ranks = 2 if technique == "ddp" else 1
    assert facts.keys() >= set(CONTRACT.split())
    assert facts["technique"] == technique
    assert (facts["world_size"], facts["num_devices"], facts["device"]) == (ranks, ranks, "cpu")
    assert (facts["global_batch_size"], facts["global_step"], facts["seed"]) == (64, STEPS, 0)
    assert facts["resumed_from"] is None
    found = facts["test_correct"], facts["test_loss"]
    assert found == score("mlp", run.checkpoint["model"], data_dir)
    assert facts["test_count"] == 500
    assert facts["test_accuracy"] == facts["test_correct"] / 500 > 0.5
    assert [row["train_count"] for row in run.rows] == [1920, 640]
    assert facts["train_accuracy"] == facts["train_correct"] / 640 > 0.5
    assert 0 < facts["data_seconds"] < facts["train_seconds"]
    assert json.loads((run.folder / "args.json").read_text())["lr"] == 0.3


def check_accumulation_sends_once(folder):
    """In the second forward of a step, each rank has the gradient of its own batch."""
    ranks = [[seen["gradient"] for seen in recorded(folder, rank)] for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) == 2 * STEPS
    assert {*ranks[0][::2]} == {None}, "each step begins without a gradient"
    assert all(ours != theirs for ours, theirs in zip(*(r[1::2] for r in ranks), strict=True))


def check_rates(run):
    """The rate follows the global batch of 64 samples, and the schedule."""
    board = EventAccumulator(str(run.folder)).Reload()
    events = board.Scalars("running_mean_rank_0/learning_rate")
    assert [event.step for event in events] == [*range(3, STEPS + 1, 3)]
    for event in events:
        shape = warmup_cosine((event.step - 1) * 64 / 1920, 2, 0.3)
        assert event.value == pytest.approx(0.3 * 64 / 96 * shape, rel=1e-5)


def test_clipping_bounds_the_true_gradient(train):
    """With fp16 the gradient is 65,536 times too long until it is unscaled."""
    flags = ["--model", "linear", "--amp", "fp16", "--max-grad-norm", 0.01, "--max-steps", 1]
    run = train("run", *flags, "--warmup-epochs", 0)
    torch.manual_seed(0)
    before = models.linear().state_dict()
    after = run.checkpoint["model"]
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm()
    # The rate is 0.1, and Nesterov's first step 1.9 times as long as the gradient.
    assert float(moved) == pytest.approx(0.1 * 1.9 * 0.01, rel=1e-2)


def test_an_evaluation_is_exact_on_a_number_of_ranks_that_does_not_divide(train, digits_dir):
    """500 images on three ranks, of which each has batch statistics of its own."""
    flags = ["--model", "convnet", "--batch-size", 16, "--max-steps", 8]
    run = train("run", *flags, script="ddp", ranks=3)
    found = run.summary["test_correct"], run.summary["test_loss"]
    assert found == score("convnet", run.checkpoint["model"], digits_dir)
    assert run.summary["test_count"] == 500


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_defaults_reach_99_percent(mnist_dir, training):
    training.data_dir = mnist_dir
    training.succeed("single", timeout=600)
    assert training.summary["test_accuracy"] >= 0.99


def test_flags_change_the_training(train, tmp_path):
    """Each of the first flags gives other weights than the defaults. The others change nothing."""
    changing = """
        --lr=0.05  --warmup-epochs=0.05  --max-grad-norm=0.1  --grad-accum-steps=2  --no-augment
        --seed=1  --amp=bf16
    """
    neutral = f"""
        --num-workers=1  --eval-batch-size=7  --save-every-steps=2  --log-every=1  --no-progress
        --deterministic  --device=cpu  --init-weights={tmp_path}/weights.pt
    """
    short = ["--model=mlp", "--max-steps=12", "--batch-size=32", "--warmup-epochs=0.1"]
    short += ["--no-tensorboard"]
    plain = train("plain", *short)
    assert plain.summary["global_step"] == 12
    assert not [*plain.folder.glob("events*")]
    hashes = {plain.summary["weights_sha256"]}
    for flag in changing.split():
        hashes.add(train(flag.partition("=")[0], *short, flag).summary["weights_sha256"])
    assert len(hashes) == 1 + len(changing.split())
    torch.manual_seed(0)
    torch.save(models.mlp().state_dict(), tmp_path / "weights.pt")
    same = train("neutral", *short, *neutral.split())
    assert same.summary["weights_sha256"] == plain.summary["weights_sha256"]


def test_flags_of_ddp_reach_pytorch(train, monkeypatch):
    flags = ["--model", "tests.user_code:Partial", "--max-steps", 3, "--backend", "gloo"]
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        train("first", *flags, "--local_rank=0", script="ddp")

    def wrap(*arguments, **options):
        model = DistributedDataParallel(*arguments, **options)
        assert model.bucket_bytes_cap == 2**19
        return model

    monkeypatch.setattr(train_ddp, "DistributedDataParallel", wrap)
    flags += ["--bucket-cap-mb", 0.5, "--find-unused-parameters", "--local-rank", 0]
    train("second", *flags, "--timeout", 30, script="ddp")


def test_a_run_that_diverges_ends_and_keeps_what_was_finite(train):
    """test_checkpoint.py has weights that are not finite."""
    flags = ["--model", "mlp", "--no-tensorboard", "--save-every-steps", 2, "--log-every", 1]
    run = train("run", *flags, "--max-steps", 4)
    with pytest.raises(UserError, match=r"and nothing of this is saved: choose a lower --lr"):
        train("run", *flags, "--resume", "--lr", 1e9, "--max-grad-norm", 0)
    assert all(value.isfinite().all() for value in run.checkpoint["model"].values())
    assert not (run.folder / "summary.json").exists()
