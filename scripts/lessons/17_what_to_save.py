"""What belongs into a checkpoint, and under which names?

Training with momentum and a scheduler is interrupted after two of four epochs. It is resumed from a
checkpoint that lacks one thing. Without which of them are the weights at the end still right?

a) Without the scheduler, because the optimizer's state has the learning rate.
b) Without the optimizer, because the scheduler's state has the learning rate.
c) There is no such thing.

A wrapped model's state dict has `module.` before every name. Both wrappers keep the model as their
attribute `module`.
"""

import copy
from typing import Any

import _lesson as lesson
import torch
from torch import nn

lesson.start(__doc__, answer="c")
torch.manual_seed(0)
raw_model = nn.Linear(2, 2)
fresh = nn.Linear(2, 2)
model = nn.DataParallel(raw_model)
print(f"raw_model.state_dict(): {list(raw_model.state_dict())}")
print(f"model.state_dict():     {list(model.state_dict())}")
said = lesson.error_of(lambda: fresh.load_state_dict(model.state_dict()))
print(f"a plain model loads the wrapped one's: {said}")
assert "Unexpected key(s)" in said
# strict=False hides the error, and loads nothing.
report = fresh.load_state_dict(model.state_dict(), strict=False)
assert report.missing_keys == ["weight", "bias"]
assert not torch.equal(fresh.weight, raw_model.weight)
# Saved wrapped and loaded wrapped works. Saved from raw_model, everyone can load it.
nn.DataParallel(fresh).load_state_dict(model.state_dict())
assert torch.equal(fresh.weight, raw_model.weight)
other = nn.Linear(2, 2)
other.load_state_dict(model.module.state_dict())
assert torch.equal(other.weight, raw_model.weight)


def train(epochs: int, saved: dict[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """Go on from what was saved; return a checkpoint and the learning rate of each epoch."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for name, part in parts.items():
        if name in saved:
            part.load_state_dict(saved[name])
    rates = []
    for epoch in range(saved.get("epoch", -1) + 1, epochs):  # the next one, not the one just done
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
        scheduler.step()
        saved = {"epoch": epoch}
    states = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    return states | saved, rates


start = {"model": nn.Linear(2, 1).state_dict()}
whole, rates = train(4, start)
half, _ = train(2, start)
off = {}
for left_out in ("nothing", "optimizer", "scheduler", "epoch"):
    saved = {name: value for name, value in half.items() if name != left_out}
    ended, seen = train(4, saved)
    off[left_out] = (ended["model"]["weight"] - whole["model"]["weight"]).abs().max().item()
    print(f"without {left_out:10} rates {seen}, weights off by {off[left_out]:.4f}")
assert off["nothing"] == 0
# Without the optimizer the momentum and the rate are lost. Without the scheduler the rate is right
# once, and then that of epoch 1. Without the epoch the first two are done twice.
assert min(off["optimizer"], off["scheduler"], off["epoch"]) > 1e-3

lesson.claim("save raw_model, the optimizer, the scheduler and the epoch; resume at epoch + 1.")
