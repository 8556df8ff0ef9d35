"""Numbers of another kind, and what a process says of itself.

float64, float32: weights are of that type, and each rank prints their checksum, its last seed and
the outputs' type. exact: a minimal script without batch normalisation, and in float64.

clock: a step takes a second, the first ten a hundred, a save an hour.

watched: under pretended GPUs each rank prints how often it waited for one between two steps, as in
ALTER_AT=20:45, and which of them it has opened.
"""

import ctypes
import os
import time
from types import SimpleNamespace

import torch

import models
from tests.alterations import faults, instead, tell
from utils.training import checkpoint, run, timing
from utils.weights import weights_sha256

saves, dtype, waits = 0, None, []


def install(alter):
    if alter in ("float64", "exact"):
        torch.set_default_dtype(torch.float64)
    if alter == "exact":
        models.MODELS["convnet"] = models.mlp
    if alter in ("float64", "float32"):
        instead(models, "loss_and_counts", note_dtype)
        instead(run.Run, "__exit__", show_and_leave)
    if alter == "clock":
        instead(checkpoint.Checkpointer, "save", save_slowly)
        timing.time = SimpleNamespace(**vars(time) | {"perf_counter": read_clock})
    if alter == "watched":
        instead(run.Run, "end_step", end_watched_step)


def note_dtype(before, outputs, *more):
    global dtype
    dtype = outputs.dtype
    return before(outputs, *more)


def show_and_leave(before, self, *error):
    facts = f"{weights_sha256(self.model)} {torch.initial_seed()} {dtype}"
    tell(f"rank {self.rank} holds {facts}")
    return before(self, *error)


def read_clock():
    return faults.steps + 99.0 * min(faults.steps, 10) + 3600.0 * saves


def save_slowly(before, *args):
    global saves
    saves += 1
    before(*args)


def end_watched_step(before, self):
    before(self)
    if str(faults.steps) in os.environ["ALTER_AT"].split(":"):
        gpus = ctypes.CDLL(None)  # the pretended ones: LD_PRELOAD has loaded them
        waits.append(sum(gpus.pretend_count(kind) for kind in range(4)))  # the four ways to wait
        if len(waits) == 2:
            opened = [number for number in range(2) if gpus.pretend_context(number)]
            tell(f"rank {self.rank} waited {waits[1] - waits[0]} times, on GPUs {opened}")
