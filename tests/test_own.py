"""A user's own training: a few changed lines in a copy of train_ddp.py, stopped and resumed."""

import json
import shutil

import pytest
import torch

from tests.processes import ROOT, distance, said_by_ranks, succeed, torchrun

SUMS = 'SUMS = ("loss", "correct", "count")'
LOSS = 'F.cross_entropy(outputs, labels, label_smoothing=smoothing, reduction="sum")'
CORRECT = "correct = (outputs.argmax(1) == labels).sum()"
STACK = "torch.stack([loss.detach(), correct, count])"
PARTS = 'parts = {"model": raw_model, "optimizer": optimizer, "scaler": scaler}'
RATE = """for group in optimizer.param_groups:
                group["lr"] = lr * optim.warmup_cosine(samples_seen, total_samples, warmup_samples)
            """
STEP = "scaler.step(optimizer)"
SCHEDULER = f"{PARTS}\n    scheduler = parts['scheduler'] = torch.optim.lr_scheduler."
RATES = {
    RATE: "",
    "scaler.update()": "scaler.update()\n            scheduler.step()",
}
# What a user changes, for each wish: what is in the script, and what replaces it.
WISHES = {
    "cosine": {PARTS: f"{SCHEDULER}CosineAnnealingLR(optimizer, T_max=60)"} | RATES,
    "one cycle": {PARTS: f"{SCHEDULER}OneCycleLR(optimizer, lr, total_steps=60)"} | RATES,
    "averaged weights": {
        PARTS: (
            f"{PARTS}\n    average = parts['average'] = torch.optim.swa_utils.AveragedModel(\n"
            "        raw_model, avg_fn=lambda old, new, n: 0.9 * old + 0.1 * new, use_buffers=True)"
        ),
        STEP: f"{STEP}\n            average.update_parameters(raw_model)",
        "in raw_model.buffers():": "in [*raw_model.buffers(), *average.buffers()]:",
        "evaluate(raw_model,": "evaluate(average,",
    },
    "top 3": {
        SUMS: 'SUMS = ("loss", "correct", "top3", "count")',
        STACK: "torch.stack([loss.detach(), correct, top3, count])",
        CORRECT: f"{CORRECT}\n    top3 = (outputs.topk(3).indices == labels[:, None]).any(1).sum()",
    },
    "regression": {
        SUMS: 'SUMS = ("loss", "error", "count")',
        LOSS: 'F.mse_loss(outputs[:, 0], labels, reduction="sum")',
        CORRECT: "error = (outputs[:, 0] - labels).abs().sum()",
        STACK: "torch.stack([loss.detach(), error, count])",
    },
    "exit handlers": {
        "stop_signal, stop = StopSignal(), 0": (
            "stop_signal, stop = StopSignal(), 0\n"
            "    import atexit\n"
            "    log = open(f'log-{rank}.txt', 'a')\n"
            "    atexit.register(log.write, 'handled ')"
        ),
    },
}
MODULE = """
import torch
from torch import nn
from torch.utils.data import Dataset


class Network(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Flatten(), nn.Linear(27, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(16, 4),
        )


class Colours(Dataset):
    def __init__(self, count, as_numbers):
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.randint(4, (count,), generator=generator)
        noise = torch.rand(count, 3, 3, 3, generator=generator)
        self.images = noise + self.labels.view(-1, 1, 1, 1)
        self.labels = self.labels.float() if as_numbers else self.labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def classes(data_dir):
    return Colours(480, False), Colours(101, False)


def numbers(data_dir):
    return Colours(480, True), Colours(101, True)
"""


@pytest.fixture
def change(tmp_path):
    """Return what copies the project, and changes the script as for the given wishes."""

    def copy(*wishes):
        for name in ("utils", "data.py", "models.py", "train_ddp.py"):
            kind = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            kind(ROOT / name, tmp_path / name)
        (tmp_path / "own.py").write_text(MODULE)
        text = (tmp_path / "train_ddp.py").read_text()
        for wish in wishes:
            lines = 0
            for old, new in WISHES[wish].items():
                assert text.count(old) == 1, f"the script has another line than {old!r}"
                text = text.replace(old, new)
                lines += max(old.count("\n"), new.count("\n"), 1)
            assert lines <= 5, wish
        (tmp_path / "train_ddp.py").write_text(text)
        return tmp_path

    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "rate", "wishes"),
    [
        ("classes", 0.1, ["cosine", "averaged weights", "top 3", "exit handlers"]),
        ("numbers", 0.02, ["one cycle", "regression"]),
    ],
)
def test_own_lines_are_stopped_and_resumed(data, rate, wishes, change):
    """In the middle of the second epoch. All parts of the checkpoint are equal to the bit."""
    folder, states, found = change(*wishes), {}, {}
    flags = ["--model", "own:Network", "--dataset", f"own:{data}", "--batch-size", 8, "--lr", rate]
    flags += ["--epochs", 2, "--lr-scaling", "none", "--no-tensorboard", "--threads", 1]
    for name, parts in {"calm": [[]], "stopped": [["--max-steps", 41], ["--resume"]]}.items():
        for more in parts:
            command = torchrun(2, "train_ddp.py", *flags, "--run-dir", name, *more)
            ended = succeed(*command, cwd=folder)
            assert said_by_ranks(ended) == []
        found[name] = json.loads((folder / name / "summary.json").read_text())
        states[name] = torch.load(folder / name / "checkpoints" / "last.pt", weights_only=True)
    calm, stopped = found.values()
    assert (stopped["resumed_from"], stopped["global_step"]) == (41, 60)
    assert stopped["weights_sha256"] == calm["weights_sha256"]
    assert stopped["test_loss"] == calm["test_loss"]
    one, other = states.values()
    assert one.keys() == other.keys() >= {"scheduler"}
    assert one["scheduler"] == other["scheduler"]
    assert one["scheduler"]["last_epoch"] == 60
    if "top 3" in wishes:
        assert 1 >= calm["test_top3"] == stopped["test_top3"] > calm["test_accuracy"] > 0.3
        assert distance(one["average"], other["average"]) == 0
        own = {f"module.{key}": value for key, value in one["model"].items()}
        assert any(not one["average"][key].equal(value) for key, value in own.items())
        for rank in (0, 1):
            assert (folder / f"log-{rank}.txt").read_text() == 3 * "handled "
    else:
        assert calm["test_error"] == stopped["test_error"] < 1
        assert "test_accuracy" not in calm


@pytest.mark.slow
def test_exit_handlers_run_after_an_error(change):
    folder = change("exit handlers")
    text = (folder / "train_ddp.py").read_text()
    text = text.replace("log.write, 'handled ')", "log.write, 'handled ')\n    raise OSError(rank)")
    (folder / "train_ddp.py").write_text(text)
    flags = ["--model", "own:Network", "--dataset", "own:classes", "--no-tensorboard"]
    with pytest.raises(AssertionError, match="OSError: 0"):
        succeed(*torchrun(2, "train_ddp.py", *flags), cwd=folder)
    assert (folder / "log-0.txt").read_text() == "handled "
