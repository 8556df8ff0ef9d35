"""Train the same on one device and on several: a global batch, and the flags that go with it."""

import re

import torch

from tests.processes import Training, succeed

# Data parallelism is an identity: the same global batch gives the same weights. SGD without
# momentum at a small rate, no dropout, no augmentation: what is left is the order in which floats
# are summed, which momentum and a larger rate enlarge to whole digits within some fifty steps.
PLAIN = ["--lr", 0.01, "--lr-scaling", "none", "--warmup-epochs", 0, "--momentum", 0]
PLAIN += ["--no-augment", "--no-tensorboard"]


def state(run_dir):
    return torch.load(run_dir / "checkpoints" / "last.pt", weights_only=True, map_location="cpu")


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


def train(layout, model, folder, data_dir, *extra, dtype="float64", global_batch=96):
    """Train on a layout (technique, devices, accumulation); return weights and ranks' hashes."""
    technique, devices, accumulation = layout
    share = global_batch // devices // accumulation
    words = ["--grad-accum-steps", accumulation, "--model", model, "--batch-size", share, *extra]
    more = {"processes": devices, "timeout": 200, "ALTER": dtype}
    ended = succeed(Training(data_dir, folder).run(technique, *PLAIN, *words, **more))
    hashes, seeds, dtypes = zip(
        *re.findall(r"rank \d+ holds ([0-9a-f]{64}) (\d+) torch\.(\w+)", ended.stdout), strict=True
    )
    assert len(hashes) == (1 if technique in ("single", "dp", "gpus") else devices)
    assert len({*seeds}) == len(seeds), "ranks draw the same dropout and shifts"
    amp = extra[extra.index("--amp") + 1] if "--amp" in extra else "off"
    assert {*dtypes} == {{"bf16": "bfloat16", "fp16": "float16"}.get(amp, dtype)}, "--amp"
    return state(folder)["model"], set(hashes)
