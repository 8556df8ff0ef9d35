"""Break it: a wrapped model's state dict has `module.` before every name.

It prints the names in both state dicts, and what load_state_dict says to them.
"""

import torch
from _lesson import error_of, start
from torch import nn


def main() -> dict[str, bool]:
    torch.manual_seed(0)
    raw_model = nn.Linear(2, 2)
    # DDP does the same to the names: both keep the model as their attribute `module`.
    model = nn.DataParallel(raw_model)
    wrapped = model.state_dict()
    print(f"raw_model.state_dict(): {list(raw_model.state_dict())}")
    print(f"model.state_dict():     {list(wrapped)}")

    fresh = nn.Linear(2, 2)
    before = fresh.weight.clone()
    said = error_of(lambda: fresh.load_state_dict(wrapped))
    print(f"load_state_dict: {said}")
    report = fresh.load_state_dict(wrapped, strict=False)
    unchanged = torch.equal(fresh.weight, before)
    print(f"strict=False: no error, missing {report.missing_keys}, weights loaded: {not unchanged}")

    stripped = {name.removeprefix("module."): tensor for name, tensor in wrapped.items()}
    loads = []
    for state in (model.module.state_dict(), stripped):
        other = nn.Linear(2, 2)
        other.load_state_dict(state)
        loads.append(torch.equal(other.weight, raw_model.weight))
    print(f"saved from raw_model, or with the prefix stripped, weights loaded: {loads}")
    return {
        "the names do not match, and load_state_dict raises an error": (
            'Missing key(s) in state_dict: "weight"' in said and '"module.weight"' in said
        ),
        "strict=False hides it: no error, and no weight is loaded": unchanged,
        "cure: the unwrapped model's state dict has the plain names": loads[0],
        "cure: a file with the prefix loads once the prefix is stripped": loads[1],
    }


if __name__ == "__main__":
    start(main, "You load a wrapped model's file with strict=False. Which weights are loaded?")
