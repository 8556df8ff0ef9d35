"""A forked process does what a started one does: nearly every other test rests on it."""

import signal
import sys

import pytest

from tests.processes import ROOT, Training, run, succeed

SLOW = pytest.mark.slow
# Ends as a program may: with a thread that is still at work, and exit handlers.
PROGRAM = """
import atexit, os, signal, sys, threading, time

def work():
    time.sleep(0.3)
    print("the thread has ended")

atexit.register(print, "first exit handler")
atexit.register(print, "second exit handler")
threading.Thread(target=work).start()
print("torch is here:", "torch" in sys.modules, sys.argv, __name__, __file__, sys.path[0])
"""
ENDS = {
    "": 0,
    "sys.exit(3)": 3,
    "sys.exit('a word')": 1,
    "1 / 0": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "os.kill(os.getpid(), signal.SIGTERM)": -signal.SIGTERM,
}


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_as_the_interpreter_does(end, tmp_path):
    """Exit status, order of what is left to do, and the last line of an error."""
    (tmp_path / "program.py").write_text(PROGRAM + end)
    words = [sys.executable, tmp_path / "program.py", "--flag"]
    forked, started = (run(*words, real=is_real) for is_real in (False, True))
    assert forked.returncode == started.returncode == ENDS[end], (forked, started)
    assert forked.stdout.replace("torch is here: True", "torch is here: False") == started.stdout
    assert forked.stdout != started.stdout, "it was not forked, and the tests take an hour"
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    "technique", ["single", *(pytest.param(name, marks=SLOW) for name in ("spawn", "ddp"))]
)
def test_a_forked_training_equals_a_started_one(technique, short_dir, tmp_path):
    """To the bit, with dropout, augmentation, loader workers and several gradient buckets."""
    extra = ["--model", "basic", "--max-steps", 4, "--num-workers", 1, "--batch-size", 16]
    forked, started = (Training(short_dir, tmp_path / name) for name in ("forked", "started"))
    succeed(forked.run(technique, *extra))
    succeed(started.run(technique, *extra, real=True))
    assert forked.final_state == started.final_state


@pytest.mark.slow
def test_a_lesson_starts_its_ranks_by_a_server_of_its_own():
    """Elsewhere in the tests these ranks are forks of the lesson."""
    succeed(run(sys.executable, ROOT / "scripts" / "lessons" / "one_step.py", real=True))
