"""Something goes wrong in the rank ALTER_RANK, or 0, at ALTER_AT.

ALTER_AT is after so many steps, or before ``start``, ``group`` (of two ranks is made),
``loss`` (is computed), ``loss 9`` (for the ninth time), ``evaluate`` or ``results`` (are written).

SIGKILL and other signals: one that comes ALTER_DELAY seconds later comes within the next step.
raise, nan, late, hang: in a way of its own. wait: the rank goes on when a signal has come to it.

ALTER_FLAG is a file that is made at that moment. With ALTER_ONCE nothing goes wrong where it is.
"""

import ctypes
import functools
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn

from tests.alterations import instead, is_chosen
from utils.training import evaluation, run

AT = os.environ.get("ALTER_AT", "")
MOMENTS = {
    "group": (torch.distributed, "init_process_group"),
    "evaluate": (evaluation, "evaluate"),
    "results": (run, "collect_results"),
}
how, steps, losses, timers = "", 0, 0, []


def install(alter):
    global how
    how = alter
    for when, (module, name) in MOMENTS.items():
        instead(module, name, functools.partial(at, when))
    instead(nn.functional, "cross_entropy", compute_loss)
    instead(run.Run, "end_step", end_step)


def at(when, function, *args, **kwargs):
    go_wrong(when)
    return function(*args, **kwargs)


def compute_loss(before, *args, **kwargs):
    global losses
    losses += 1
    go_wrong("loss")
    go_wrong(f"loss {losses}")
    return before(*args, **kwargs)


def compute_nan(before, *args, **kwargs):
    return before(*args, **kwargs) * float("nan")


def end_step(before, self):
    global steps
    steps += 1
    for timer in timers:
        timer.join()
    go_wrong(str(steps))
    before(self)


def go_wrong(when):
    if when != AT:
        return
    flag = Path(os.environ.get("ALTER_FLAG", os.devnull))
    other_rank_has_come = flag.with_suffix(".other")
    if not is_chosen():
        if when == "group":
            other_rank_has_come.touch()
        return
    while when == "group" and not other_rank_has_come.exists():
        time.sleep(0.01)  # it may still ask rank 0's store whether all are there
    if "ALTER_ONCE" in os.environ and flag.exists():
        return
    if how == "wait":
        noted, note = os.pipe()
        os.set_blocking(note, False)
        signal.set_wakeup_fd(note)
    flag.write_text(str(os.getpid()))
    if how == "wait":
        os.read(noted, 1)
    if how == "late":
        time.sleep(3.0)
    if how == "raise":
        raise ArithmeticError("wrong on purpose")
    if how == "nan":
        instead(nn.functional, "cross_entropy", compute_nan)
    if how.startswith("SIG"):
        number, seconds = getattr(signal, how), float(os.environ.get("ALTER_DELAY", 0))
        if not seconds:
            return os.kill(os.getpid(), number)
        timers.append(threading.Timer(seconds, os.kill, (os.getpid(), number)))
        timers[0].start()
    if how == "hang":  # in C, as in a collective: Python calls no handler
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
