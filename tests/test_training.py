"""The three scripts as a user starts them: what they train, evaluate and report."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.parallel import DistributedDataParallel

import data
import models
import train_ddp
from tests.processes import Training, distance, free_port
from utils.optim import warmup_cosine

# Others build on these names in summary.json.
CONTRACT = """
    script technique dataset model world_size num_devices device batch_size global_batch_size epochs
    global_step seed test_correct test_count test_accuracy test_loss train_images_per_second
    train_seconds weights_sha256 torch_version resumed_from
"""
# Data parallelism is an identity: the same global batch gives the same weights, but for the order
# in which floats are added. Momentum and large steps would make that visible.
PLAIN = ["--lr", 0.9, "--momentum", 0, "--no-augment", "--max-grad-norm", 0.5, "--epochs", 1.25]
PLAIN += ["--model", "tests.user_code:double_network", "--log-every", 3]
LAYOUTS = {
    "single": ["--batch-size", 32],
    "dp": ["--batch-size", 16, "--grad-accum-steps", 2],
    "ddp": ["--batch-size", 8, "--grad-accum-steps", 2],
}
STEPS = 75


def score(name, weights, data_dir):
    """Return how many test images a model with these weights gets right, and its loss."""
    model = models.MODELS[name]().to(next(iter(weights.values())).dtype).eval()
    model.load_state_dict({key.removeprefix("inner."): value for key, value in weights.items()})
    images, labels = data.load("mnist", str(data_dir))[1].tensors
    images = ((images / 255 - 0.1307) / 0.3081).unsqueeze(1)
    with torch.no_grad():
        outputs = model(images.to(next(model.parameters()).dtype))
    correct = int((outputs.argmax(1) == labels).sum())
    return correct, pytest.approx(F.cross_entropy(outputs, labels).item(), rel=1e-4)


def test_the_scripts_agree_and_report_what_they_did(digits_dir, tmp_path):
    """A run of each on 32 samples a step, examined from four sides."""
    runs = {}
    for technique, flags in LAYOUTS.items():
        training = Training(digits_dir, tmp_path / technique / "run")
        (tmp_path / technique).mkdir()
        record = {"RECORD": str(tmp_path / technique)}
        ended = training.succeed(technique, *PLAIN, *flags, **record)
        check_report(technique, training, ended, digits_dir)
        runs[technique] = training
    check_same_weights(runs)
    check_accumulation_sends_once(tmp_path / "ddp")
    check_tensorboard(runs["ddp"])


def check_report(technique, training, ended, digits_dir):
    """The evaluation is that of the checkpoint, and one process reports."""
    facts, last = training.summary, training.rows[-1]
    assert facts.keys() >= set(CONTRACT.split())
    ranks = 2 if technique == "ddp" else 1
    assert (facts["script"], facts["technique"]) == (f"train_{technique}.py", technique)
    assert (facts["world_size"], facts["num_devices"], facts["device"]) == (ranks, ranks, "cpu")
    assert (facts["global_batch_size"], facts["global_step"], facts["seed"]) == (32, STEPS, 0)
    assert facts["resumed_from"] is None
    assert (facts["test_correct"], facts["test_loss"]) == score(
        "mlp", training.checkpoint["model"], digits_dir
    )
    assert facts["test_count"] == 500
    assert facts["test_accuracy"] == facts["test_correct"] / 500 > 0.5
    # The averages of an epoch are over its own samples, on all ranks.
    assert [row["train_count"] for row in training.rows] == [1920, 480]
    assert last["train_accuracy"] == last["train_correct"] / 480 > 0.5
    assert {key: facts[key] for key in last} == last
    assert json.loads((training.folder / "args.json").read_text())["lr"] == 0.9
    assert ended.stdout.count("complete: ") == ended.stdout.count("epoch   2 |") == 1
    assert ended.stderr.count("\n") <= 4, "warnings of torchrun at most"


def check_same_weights(runs):
    """With another share for each process, accumulation, and a gradient that is clipped."""
    weights = {name: run.checkpoint["model"] for name, run in runs.items()}
    for technique in ("dp", "ddp"):
        assert distance(weights["single"], weights[technique]) < 1e-10
        for key in ("train_loss", "train_correct", "test_loss", "test_correct"):
            facts = {name: run.summary[key] for name, run in runs.items()}
            assert facts["single"] == pytest.approx(facts[technique], rel=1e-9), key


def check_accumulation_sends_once(folder):
    """In the second forward of a step, each rank has the gradient of its own batch."""
    ranks = [[*map(json.loads, (folder / f"{rank}-0").open())] for rank in (0, 1)]
    gradients = [[seen["gradient"] for seen in rank] for rank in ranks]
    assert len(gradients[0]) == len(gradients[1]) == 2 * STEPS
    assert {*gradients[0][::2]} == {None}, "each step begins without a gradient"
    assert all(ours != theirs for ours, theirs in zip(*(g[1::2] for g in gradients), strict=True))


def check_tensorboard(training):
    """The rate follows the global batch of 32 samples, and the schedule."""
    board = EventAccumulator(str(training.folder)).Reload()
    running = [f"running_mean_rank_0/{name}" for name in ("loss", "accuracy", "learning_rate")]
    ends = [f"{part}/{name}" for part in ("train", "test") for name in ("loss", "accuracy")]
    assert sorted(board.Tags()["scalars"]) == sorted(running + ends)
    for tag in ends:
        found = [(event.step, event.value) for event in board.Scalars(tag)]
        rows = [(row["global_step"], row[tag.replace("/", "_")]) for row in training.rows]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in rows]
    rates = {event.step: event.value for event in board.Scalars(running[2])}
    assert [*rates] == [*range(3, STEPS + 1, 3)]
    for step, rate in rates.items():
        shape = warmup_cosine((step - 1) * 32, 1.25 * 1920, 1920)
        assert rate == pytest.approx(0.9 * 32 / 96 * shape, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("amp", "norm"), [("fp16", 0.01), ("bf16", 0)])
def test_clipping_bounds_the_true_gradient(amp, norm, training):
    """With fp16 the gradient is 65,536 times too long until it is unscaled. A norm of 0 is none."""
    flags = ["--model", "linear", "--amp", amp, "--max-grad-norm", norm, "--max-steps", 1]
    training.succeed("single", *flags, "--weight-decay", 0, "--warmup-epochs", 0)
    torch.manual_seed(0)
    before, after = models.linear().state_dict(), training.checkpoint["model"]
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm()
    if norm:  # Nesterov's first step is 1.9 gradients long
        assert float(moved) == pytest.approx(0.1 * 1.9 * norm, rel=1e-2)
    else:
        assert float(moved) > 0.1
    assert all(value.dtype == torch.float32 for value in after.values())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 7])
def test_an_evaluation_is_exact_on_any_number_of_ranks(ranks, training, digits_dir):
    """500 images divide by neither, and each rank has batch statistics of its own."""
    flags = ["--model", "convnet", "--batch-size", 16, "--max-steps", 8]
    training.succeed("ddp", *flags, ranks=ranks, timeout=240)
    facts = training.summary
    found = facts["test_correct"], facts["test_loss"]
    assert found == score("convnet", training.checkpoint["model"], digits_dir)
    assert facts["test_count"] == 500


@pytest.mark.slow
def test_ten_thousand_are_counted(mnist_dir, training, tmp_path):
    """At 1, 3 and 7 ranks the same model gets the same number right."""
    training.data_dir = mnist_dir
    flags = ["--model", "linear", "--epochs", 0.1, "--batch-size"]
    training.succeed("single", *flags, 84)
    first = training.summary
    for ranks in (3, 7):
        other = Training(mnist_dir, tmp_path / str(ranks))
        shutil.copytree(training.folder, other.folder)
        # What is left to do is the evaluation, as after a stop in it.
        (other.folder / "metrics.jsonl").unlink()
        (other.folder / "summary.json").unlink()
        other.succeed("ddp", *flags, 84 // ranks, "--resume", ranks=ranks, timeout=240)
        facts = other.summary
        assert (facts["test_count"], facts["world_size"]) == (10_000, ranks)
        assert facts["test_correct"] == first["test_correct"]
        assert facts["weights_sha256"] == first["weights_sha256"], "nothing is trained any more"


@pytest.mark.slow
def test_ignored_labels_count_nowhere(training):
    flags = ["--dataset", "tests.user_code:partly_labelled", "--model", "mlp"]
    training.succeed("ddp", *flags, "--batch-size", 30, "--lr", 0.5)
    facts = training.summary
    assert facts["test_count"] == 500 - 72
    assert facts["train_count"] == 1920 - 275
    assert facts["test_accuracy"] == facts["test_correct"] / 428 > 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_defaults_reach_99_percent(mnist_dir, training):
    training.data_dir = mnist_dir
    training.succeed("single", timeout=600)
    assert training.summary["test_accuracy"] >= 0.99


def test_flags_change_the_training(in_process, tmp_path):
    """Each of the first flags gives other weights than the defaults. The others change nothing."""
    short = ["--model=mlp", "--epochs=0.2", "--batch-size=32", "--no-tensorboard"]
    plain = in_process("plain", *short)
    torch.manual_seed(0)
    torch.save(models.mlp().state_dict(), tmp_path / "weights.pt")
    changing = """
        --lr=0.05  --lr-scaling=none  --momentum=0.5  --weight-decay=0.1  --label-smoothing=0.2
        --warmup-epochs=0.05  --max-grad-norm=0.1  --grad-accum-steps=2  --no-augment  --seed=1
        --amp=bf16  --epochs=0.3  --max-steps=5  --batch-size=16  --model=linear
    """
    neutral = f"""
        --num-workers=1  --eval-batch-size=7  --save-every-steps=2  --log-every=1  --no-progress
        --deterministic  --device=cpu  --init-weights={tmp_path}/weights.pt
    """
    hashes = {
        flag: in_process(flag.partition("=")[0], *short, flag).summary["weights_sha256"]
        for flag in (changing + neutral).split()
    }
    same = [flag for flag, value in hashes.items() if value == plain.summary["weights_sha256"]]
    assert same == neutral.split()
    assert plain.summary["global_step"] == 12
    assert not [*plain.folder.glob("events*")]
    assert in_process("threads", *short, "--threads", 2).summary["threads"] == 2


def test_flags_of_ddp_reach_pytorch(in_process, monkeypatch):
    """In a group of one rank, with the wrapped model caught."""
    wrapped = []

    def wrap(*arguments, **options):
        wrapped.append(DistributedDataParallel(*arguments, **options))
        return wrapped[-1]

    monkeypatch.setattr(train_ddp, "DistributedDataParallel", wrap)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for flags in (
        ["--bucket-cap-mb", 0.5, "--find-unused-parameters", "--local-rank", 0],
        ["--backend", "gloo", "--local_rank=0", "--timeout", 30],
    ):
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        in_process(flags[0], "--model", "mlp", "--max-steps", 2, *flags, script="ddp")
    first, second = wrapped
    assert (first.bucket_bytes_cap, second.bucket_bytes_cap) == (2**19, 25 * 2**20)
    assert (first.find_unused_parameters, second.find_unused_parameters) == (True, False)
