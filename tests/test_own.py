"""A user's own training: a few changed lines of train_ddp.py, stopped in mid-epoch and resumed."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import train_ddp
from tests.processes import ROOT, distance

PARTS = 'parts = {"model": model, "optimizer": optimizer, "scaler": scaler}'
STEP = "scaler.step(optimizer)"
CORRECT = "correct = (outputs.argmax(1) == labels).sum()"
# What a user changes: what is in the script, and what replaces it.
CHANGES = {
    # A scheduler of PyTorch's, and averaged weights, which are evaluated.
    PARTS: f"""{PARTS}
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=60)
    parts["scheduler"] = scheduler
    average = torch.optim.swa_utils.AveragedModel(
        model, avg_fn=lambda old, new, n: 0.9 * old + 0.1 * new, use_buffers=True
    )
    parts["average"] = average""",
    """for group in optimizer.param_groups:
                group["lr"] = lr * optim.warmup_cosine(epochs_done, args.epochs, args.warmup_epochs)
            """: "",
    STEP: f"{STEP}\n            average.update_parameters(model)",
    "scaler.update()": "scaler.update()\n            scheduler.step()",
    'group["lr"])': "scheduler.get_last_lr()[0])",
    "in model.buffers():": "in [*model.buffers(), *average.buffers()]:",
    "evaluate(model,": "evaluate(average,",
    # One more metric.
    'SUMS = ("loss", "correct", "count")': 'SUMS = ("loss", "correct", "top3", "count")',
    CORRECT: f"{CORRECT}\n    top3 = (outputs.topk(3).indices == labels[:, None]).any(1).sum()",
    "torch.stack([loss, correct, count])": "torch.stack([loss, correct, top3, count])",
}


class Network(nn.Sequential):
    def __init__(self):
        norm = nn.BatchNorm1d(16)
        dropout = nn.Dropout(0.2)
        super().__init__(
            nn.Flatten(), nn.Linear(27, 16), norm, nn.ReLU(), dropout, nn.Linear(16, 4)
        )


def colours(count):
    """Colour images, which are the brighter the larger their label is."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(4, (count,), generator=generator)
    noise = torch.rand(count, 3, 3, 3, generator=generator)
    return TensorDataset(noise + labels.view(-1, 1, 1, 1), labels)


def classes(data_dir):
    return colours(480), colours(101)


def changed_train():
    """Return ``train`` of train_ddp.py with the changes."""
    text = (ROOT / "train_ddp.py").read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1, f"the script has another line than {old!r}"
        text = text.replace(old, new)
    variables = {"__name__": "own"}
    exec(compile(text, "train_ddp.py", "exec"), variables)
    return variables["train"]


def test_an_own_scheduler_averaged_weights_and_metric_are_stopped_and_resumed(train, monkeypatch):
    """In the middle of the second epoch. All parts of the checkpoint are equal to the bit."""
    monkeypatch.setattr(train_ddp, "train", changed_train())
    flags = ["--model", "tests.test_own:Network", "--dataset", "tests.test_own:classes"]
    flags += ["--batch-size", 8, "--epochs", 2, "--no-tensorboard", "--resume"]
    calm = train("calm", *flags, script="ddp", ranks=2)
    train("stopped", *flags, "--max-steps", 41, script="ddp", ranks=2)
    stopped = train("stopped", *flags, script="ddp", ranks=2)
    facts = stopped.summary
    assert (facts["resumed_from"], facts["global_step"]) == (41, 60)
    assert facts["test_loss"] == calm.summary["test_loss"]
    assert facts["test_top3"] == calm.summary["test_top3"]
    assert 1 >= facts["test_top3"] > facts["test_accuracy"] > 0.3
    one = calm.checkpoint
    other = stopped.checkpoint
    assert distance(one["model"], other["model"]) == 0
    assert distance(one["average"], other["average"]) == 0
    assert one["scheduler"] == other["scheduler"]
    assert one["scheduler"]["last_epoch"] == 60
    weights = {f"module.{key}": value for key, value in one["model"].items()}
    assert any(not one["average"][key].equal(value) for key, value in weights.items())
