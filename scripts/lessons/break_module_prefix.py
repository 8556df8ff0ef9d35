"""Break it: a wrapped model's state dict has `module.` before every name.

python scripts/lessons/break_module_prefix.py

`scripts/check/check.py` says "module. in keys" where a script of your own does this.

It prints the names in both state dicts, and what load_state_dict says to them.
"""

import torch
from _lesson import first_line, start
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
    try:
        fresh.load_state_dict(wrapped)
        said = "nothing"
    except RuntimeError as error:
        said = " ".join(str(error).split())
        print(f"load_state_dict: {first_line(error)}")
        print("  " + "\n  ".join(line.strip() for line in str(error).splitlines()[1:]))

    report = fresh.load_state_dict(wrapped, strict=False)
    unchanged = torch.equal(fresh.weight, before)
    print(
        f"strict=False: no error, missing {report.missing_keys}, weights changed: {not unchanged}"
    )

    fresh.load_state_dict(model.module.state_dict())
    saved_unwrapped = torch.equal(fresh.weight, raw_model.weight)
    rescued = nn.Linear(2, 2)
    stripped = {name.removeprefix("module."): tensor for name, tensor in wrapped.items()}
    rescued.load_state_dict(stripped)
    print("saved from raw_model, or with the prefix stripped: loads")
    return {
        "the names do not match, and load_state_dict raises an error": (
            'Missing key(s) in state_dict: "weight"' in said and '"module.weight"' in said
        ),
        "strict=False hides it: no error, and no weight is loaded": unchanged,
        "cure: the unwrapped model's state dict has the plain names": saved_unwrapped,
        "cure: a file with the prefix loads once the prefix is stripped": torch.equal(
            rescued.weight, raw_model.weight
        ),
    }


if __name__ == "__main__":
    start(main, ask="You load a wrapped model's file with strict=False. Which weights are loaded?")
