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
# Data parallelism is an identity: the same global batch gives the same weights, but for the order
# in which floats are added.
PLAIN = ["--lr", 0.3, "--no-augment", "--max-grad-norm", 0.5, "--epochs", 2, "--max-steps", 75]
PLAIN += ["--model", "tests.user_code:double_network", "--log-every", 3]
LAYOUTS = {
    "single": ["--batch-size", 32],
    "dp": ["--batch-size", 16, "--grad-accum-steps", 2],
    "ddp": ["--batch-size", 8, "--grad-accum-steps", 2],
}
STEPS = 75


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
    """A run of each on 32 samples a step, examined from four sides."""
    monkeypatch.setenv("RECORD", str(tmp_path))
    runs = {}
    for technique, flags in LAYOUTS.items():
        ranks = 2 if technique == "ddp" else 1
        for old in tmp_path.glob("?-0"):
            old.unlink()
        runs[technique] = train(technique, *PLAIN, *flags, script=technique, ranks=ranks)
        check_report(technique, runs[technique], ranks, digits_dir)
    check_same_weights(runs)
    check_accumulation_sends_once(tmp_path)
    check_tensorboard(runs["ddp"])


def check_report(technique, run, ranks, digits_dir):
    """The evaluation is that of the checkpoint."""
    facts = run.summary
    last = run.rows[-1]
    assert facts.keys() >= set(CONTRACT.split())
    assert facts["technique"] == technique
    assert (facts["world_size"], facts["num_devices"], facts["device"]) == (ranks, ranks, "cpu")
    assert (facts["global_batch_size"], facts["global_step"], facts["seed"]) == (32, STEPS, 0)
    assert facts["resumed_from"] is None
    found = facts["test_correct"], facts["test_loss"]
    assert found == score("mlp", run.checkpoint["model"], digits_dir)
    assert facts["test_count"] == 500
    assert facts["test_accuracy"] == facts["test_correct"] / 500 > 0.5
    # The averages of an epoch are over its own samples, on all ranks.
    assert [row["train_count"] for row in run.rows] == [1920, 480]
    assert last["train_accuracy"] == last["train_correct"] / 480 > 0.5
    assert 0 < facts["data_seconds"] < facts["train_seconds"]
    assert json.loads((run.folder / "args.json").read_text())["lr"] == 0.3


def check_same_weights(runs):
    """With another share for each process, accumulation, and a gradient that is clipped."""
    weights = {name: run.checkpoint["model"] for name, run in runs.items()}
    for technique in ("dp", "ddp"):
        assert distance(weights["single"], weights[technique]) < 1e-9
        for key in ("train_loss", "train_correct", "test_loss", "test_correct"):
            facts = {name: run.summary[key] for name, run in runs.items()}
            assert facts["single"] == pytest.approx(facts[technique], rel=1e-9), key


def check_accumulation_sends_once(folder):
    """In the second forward of a step, each rank has the gradient of its own batch."""
    ranks = [[seen["gradient"] for seen in recorded(folder, rank)] for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1]) == 2 * STEPS
    assert {*ranks[0][::2]} == {None}, "each step begins without a gradient"
    assert all(ours != theirs for ours, theirs in zip(*(r[1::2] for r in ranks), strict=True))


def check_tensorboard(run):
    """The rate follows the global batch of 32 samples, and the schedule."""
    board = EventAccumulator(str(run.folder)).Reload()
    running = [f"running_mean_rank_0/{name}" for name in ("loss", "accuracy", "learning_rate")]
    ends = [f"{part}/{name}" for part in ("train", "test") for name in ("loss", "accuracy")]
    assert sorted(board.Tags()["scalars"]) == sorted(running + ends)
    for tag in ends:
        found = [(event.step, event.value) for event in board.Scalars(tag)]
        rows = [(row["global_step"], row[tag.replace("/", "_")]) for row in run.rows]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in rows]
    rates = {event.step: event.value for event in board.Scalars(running[2])}
    assert [*rates] == [*range(3, STEPS + 1, 3)]
    for step, rate in rates.items():
        shape = warmup_cosine((step - 1) * 32 / 1920, 2, 0.3)
        assert rate == pytest.approx(0.3 * 32 / 96 * shape, rel=1e-5)


@pytest.mark.parametrize(("amp", "norm"), [("fp16", 0.01), ("bf16", 0)])
def test_clipping_bounds_the_true_gradient(amp, norm, train):
    """With fp16 the gradient is 65,536 times too long until it is unscaled. A norm of 0 is none."""
    flags = ["--model", "linear", "--amp", amp, "--max-grad-norm", norm, "--max-steps", 1]
    run = train("run", *flags, "--warmup-epochs", 0)
    torch.manual_seed(0)
    before = models.linear().state_dict()
    after = run.checkpoint["model"]
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm()
    if norm:  # Nesterov's first step is 1.9 gradients long
        assert float(moved) == pytest.approx(0.1 * 1.9 * norm, rel=1e-2)
    else:
        assert float(moved) > 0.1
    assert all(value.dtype == torch.float32 for value in after.values())


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
    short = ["--model=mlp", "--max-steps=12", "--batch-size=32", "--warmup-epochs=0.1"]
    short += ["--no-tensorboard"]
    plain = train("plain", *short)
    torch.manual_seed(0)
    torch.save(models.mlp().state_dict(), tmp_path / "weights.pt")
    changing = """
        --lr=0.05  --warmup-epochs=0.05  --max-grad-norm=0.1  --grad-accum-steps=2  --no-augment
        --seed=1  --amp=bf16  --epochs=2  --max-steps=5  --batch-size=16  --model=linear
    """
    neutral = f"""
        --num-workers=1  --eval-batch-size=7  --save-every-steps=2  --log-every=1  --no-progress
        --deterministic  --device=cpu  --init-weights={tmp_path}/weights.pt
    """
    hashes = {
        flag: train(flag.partition("=")[0], *short, flag).summary["weights_sha256"]
        for flag in (changing + neutral).split()
    }
    same = [flag for flag, value in hashes.items() if value == plain.summary["weights_sha256"]]
    assert same == neutral.split()
    assert plain.summary["global_step"] == 12
    assert not [*plain.folder.glob("events*")]
    assert train("threads", *short, "--threads", 2).summary["threads"] == 2


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


@pytest.mark.parametrize("log_every", [1, 50])
def test_what_is_not_finite_is_not_saved(log_every, train):
    """The loss is looked at when it is logged, and the weights before they are saved."""
    flags = ["--model", "mlp", "--no-tensorboard", "--save-every-steps", 2]
    run = train("run", *flags, "--max-steps", 4)
    more = ["--resume", "--lr", 1e9, "--max-grad-norm", 0, "--log-every", log_every]
    with pytest.raises(UserError, match=r"(is not|nothing of this is) saved: choose a lower --lr"):
        train("run", *flags, *more)
    assert run.checkpoint["position"]["step"] >= 4
    assert all(value.isfinite().all() for value in run.checkpoint["model"].values())
    assert not (run.folder / "summary.json").exists()
