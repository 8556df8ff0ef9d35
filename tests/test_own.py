"""A user's own training: a few changed lines of train_ddp.py, stopped in mid-epoch and resumed."""

import train_ddp
from tests.helpers import train_of
from tests.processes import ROOT, distance

# What a user changes: what is in the script, and what replaces it.
CHANGES = {
    # A scheduler of PyTorch's, and averaged weights, which are evaluated.
    'parts = {"model": model, "optimizer": optimizer, "scaler": scaler}': """
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=60)
    average = torch.optim.swa_utils.AveragedModel(
        model, avg_fn=lambda old, new, n: 0.9 * old + 0.1 * new, use_buffers=True
    )
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    parts |= {"scheduler": scheduler, "average": average}""",
    """for group in optimizer.param_groups:
                group["lr"] = lr * optim.warmup_cosine(epochs_done, args.epochs, args.warmup_epochs)
            """: "",
    "scaler.update()": """scaler.update()
            scheduler.step()
            average.update_parameters(model)""",
    'group["lr"])': "scheduler.get_last_lr()[0])",
    "in model.buffers():": "in [*model.buffers(), *average.buffers()]:",
    "evaluate(model,": "evaluate(average,",
    # One more metric.
    'SUMS = ("loss", "correct", "count")': 'SUMS = ("loss", "correct", "top3", "count")',
    "    return torch.stack([loss, correct, count])": """
    top3 = (outputs.topk(3).indices == labels[:, None]).any(1).sum()
    return torch.stack([loss, correct, top3, count])""",
}


def test_an_own_scheduler_averaged_weights_and_metric_are_stopped_and_resumed(train, monkeypatch):
    """In the middle of the second epoch. All parts of the checkpoint are equal to the bit."""
    text = (ROOT / "train_ddp.py").read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1, f"the script has another line than {old!r}"
        text = text.replace(old, new)
    monkeypatch.setattr(train_ddp, "train", train_of(text))
    flags = ["--model", "tests.user_code:dropout_network", "--batch-size", 32]
    flags += ["--epochs", 2, "--no-tensorboard", "--resume"]
    calm = train("calm", *flags, script="ddp", ranks=2)
    train("stopped", *flags, "--max-steps", 41, script="ddp", ranks=2)
    stopped = train("stopped", *flags, script="ddp", ranks=2)
    facts = stopped.summary
    assert (facts["resumed_from"], facts["global_step"]) == (41, 60)
    assert facts["test_top3"] == calm.summary["test_top3"]
    assert 1 >= facts["test_top3"] > facts["test_accuracy"] > 0.3
    one = calm.checkpoint
    other = stopped.checkpoint
    assert distance(one["model"], other["model"]) == 0
    assert distance(one["average"], other["average"]) == 0
    assert one["scheduler"] == other["scheduler"]
