"""A user's own training: a few changed lines of train_ddp.py, stopped in mid-epoch and resumed."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import train_ddp
from tests.processes import ROOT, distance

SUMS = 'SUMS = ("loss", "correct", "count")'
LOSS = "loss = F.cross_entropy(outputs, labels, label_smoothing=0.05)"
SUM = 'loss = F.cross_entropy(outputs, labels, reduction="sum")'
CORRECT = "correct = (outputs.argmax(1) == labels).sum()"
STACK = "torch.stack([loss, correct, count])"
PARTS = 'parts = {"model": model, "optimizer": optimizer, "scaler": scaler}'
RATE = """for group in optimizer.param_groups:
                group["lr"] = lr * optim.warmup_cosine(epochs_done, args.epochs, args.warmup_epochs)
            """
STEP = "scaler.step(optimizer)"
SCHEDULER = f"{PARTS}\n    scheduler = parts['scheduler'] = torch.optim.lr_scheduler."
RATES = {
    RATE: "",
    "scaler.update()": "scaler.update()\n            scheduler.step()",
    'group["lr"])': "scheduler.get_last_lr()[0])",
}
# What a user changes, for each wish: what is in the script, and what replaces it.
WISHES = {
    "cosine": {PARTS: f"{SCHEDULER}CosineAnnealingLR(optimizer, T_max=60)"} | RATES,
    "one cycle": {PARTS: f"{SCHEDULER}OneCycleLR(optimizer, lr, total_steps=60)"} | RATES,
    "averaged weights": {
        PARTS: (
            f"{PARTS}\n    average = parts['average'] = torch.optim.swa_utils.AveragedModel(\n"
            "        model, avg_fn=lambda old, new, n: 0.9 * old + 0.1 * new, use_buffers=True)"
        ),
        STEP: f"{STEP}\n            average.update_parameters(model)",
        "in model.buffers():": "in [*model.buffers(), *average.buffers()]:",
        "evaluate(model,": "evaluate(average,",
    },
    "top 3": {
        SUMS: 'SUMS = ("loss", "correct", "top3", "count")',
        STACK: "torch.stack([loss, correct, top3, count])",
        CORRECT: f"{CORRECT}\n    top3 = (outputs.topk(3).indices == labels[:, None]).any(1).sum()",
    },
    "regression": {
        SUMS: 'SUMS = ("loss", "error", "count")',
        LOSS: "loss = F.mse_loss(outputs[:, 0], labels)",
        SUM: 'loss = F.mse_loss(outputs[:, 0], labels, reduction="sum")',
        CORRECT: "error = (outputs[:, 0] - labels).abs().sum()",
        STACK: "torch.stack([loss, error, count])",
    },
}


class Network(nn.Sequential):
    def __init__(self):
        first, second = nn.Linear(27, 16), nn.Linear(16, 4)
        norm, dropout = nn.BatchNorm1d(16), nn.Dropout(0.2)
        super().__init__(nn.Flatten(), first, norm, nn.ReLU(), dropout, second)


def colours(count):
    """Colour images, which are the brighter the larger their label is."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(4, (count,), generator=generator)
    noise = torch.rand(count, 3, 3, 3, generator=generator)
    return noise + labels.view(-1, 1, 1, 1), labels


def classes(data_dir):
    return [TensorDataset(*colours(count)) for count in (480, 101)]


def numbers(data_dir):
    return [TensorDataset(images, labels.float()) for images, labels in map(colours, (480, 101))]


def changed_train(wishes):
    """Return ``train`` of train_ddp.py with changed lines, at most five for each wish."""
    text = (ROOT / "train_ddp.py").read_text()
    for wish in wishes:
        for old, new in WISHES[wish].items():
            assert text.count(old) == 1, f"the script has another line than {old!r}"
            text = text.replace(old, new)
        changes = WISHES[wish].items()
        assert sum(max(old.count("\n"), new.count("\n"), 1) for old, new in changes) <= 5, wish
    variables = {"__name__": "own"}
    exec(compile(text, "train_ddp.py", "exec"), variables)
    return variables["train"]


@pytest.mark.parametrize(
    ("data", "rate", "wishes"),
    [
        ("classes", 0.1, ["cosine", "averaged weights", "top 3"]),
        ("numbers", 0.02, ["one cycle", "regression"]),
    ],
)
def test_own_lines_are_stopped_and_resumed(data, rate, wishes, train, monkeypatch):
    """In the middle of the second epoch. All parts of the checkpoint are equal to the bit."""
    monkeypatch.setattr(train_ddp, "train", changed_train(wishes))
    flags = ["--model", "tests.test_own:Network", "--dataset", f"tests.test_own:{data}"]
    flags += ["--batch-size", 8, "--lr", rate, "--epochs", 2]
    flags += ["--no-tensorboard", "--resume"]
    calm = train("calm", *flags, script="ddp", ranks=2)
    train("stopped", *flags, "--max-steps", 41, script="ddp", ranks=2)
    stopped = train("stopped", *flags, script="ddp", ranks=2)
    assert (stopped.summary["resumed_from"], stopped.summary["global_step"]) == (41, 60)
    one, other = calm.checkpoint, stopped.checkpoint
    assert one.keys() == other.keys() >= {"scheduler"}
    assert distance(one["model"], other["model"]) == 0
    assert one["scheduler"] == other["scheduler"]
    assert one["scheduler"]["last_epoch"] == 60
    assert calm.summary["test_loss"] == stopped.summary["test_loss"]
    if "top 3" in wishes:
        facts = stopped.summary
        assert 1 >= calm.summary["test_top3"] == facts["test_top3"] > facts["test_accuracy"] > 0.3
        assert distance(one["average"], other["average"]) == 0
        weights = {f"module.{key}": value for key, value in one["model"].items()}
        assert any(not one["average"][key].equal(value) for key, value in weights.items())
    else:
        assert calm.summary["test_error"] == stopped.summary["test_error"] < 1
        assert "test_accuracy" not in calm.summary
