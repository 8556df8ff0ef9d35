"""A forked process does what a started one does: nearly every other test rests on it."""

import signal
import sys

import pytest

from tests.processes import Training, run, succeed

# Ends as a program may: with a thread that is still at work, exit handlers, and objects alive.
PROGRAM = """
import atexit, os, signal, sys, threading, time

class Object:
    def __del__(self):
        print("collected")

def work():
    time.sleep(0.3)
    print("the thread has ended")

alive = Object()
atexit.register(print, "first exit handler")
atexit.register(print, "second exit handler")
threading.Thread(target=work).start()
print("torch is here:", "torch" in sys.modules)
"""
ENDS = {
    "": 0,
    "sys.exit()": 0,
    "sys.exit(3)": 3,
    "sys.exit(-1)": 255,
    "sys.exit('a word')": 1,
    "1 / 0": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "os._exit(7)": 7,
    "os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_as_the_interpreter_does(end):
    """Exit status, order of what is left to do, and the last line of an error."""
    forked, started = (
        run(sys.executable, "-c", PROGRAM + end, real=is_real) for is_real in (False, True)
    )
    assert forked.returncode == started.returncode == ENDS[end], (forked, started)
    assert forked.stdout.replace("torch is here: True", "torch is here: False") == started.stdout
    assert forked.stdout != started.stdout, "it was not forked, and the tests take an hour"
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    "technique", ["single", *(pytest.param(t, marks=pytest.mark.slow) for t in ("spawn", "ddp"))]
)
def test_a_forked_training_equals_a_started_one(technique, short_dir, tmp_path):
    """To the bit, with dropout, augmentation, loader workers and several gradient buckets."""
    extra = ["--model", "basic", "--max-steps", 4, "--num-workers", 1, "--batch-size", 16]
    forked, started = (Training(short_dir, tmp_path / name) for name in ("forked", "started"))
    succeed(forked.run(technique, *extra))
    succeed(started.run(technique, *extra, real=True))
    assert forked.final_state == started.final_state
