"""A forked process has to look like a fresh one, from the inside and to who started it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.processes import Finished, environment, run, script, start, summary

# What a process sees of itself. Addresses, ids and what torch has loaded differ anyway.
LOOK = """
import json, os, signal, sys, threading
from pathlib import Path
main = sys.modules["__main__"]
fields = Path("/proc/self/environ").read_bytes().strip(b"\\0").split(b"\\0")
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "path": sys.path,
    "main": {n: str(v) for n, v in vars(main).items()
             if n in ("__name__", "__file__", "__package__", "__cached__")},
    "spec": main.__spec__ and main.__spec__.name,
    "globals are main's": globals() is vars(main),
    "environ": dict(os.environ),
    "cwd": os.getcwd(),
    "leads its session": os.getsid(0) == os.getpid(),
    "signals": {int(n): str(signal.getsignal(n)).partition(" at ")[0]
                for n in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "parent": os.getppid(),
    "threads": [threading.current_thread().name, threading.active_count()],
    "descriptors": {n: os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in range(3)},
    "command line": Path("/proc/self/cmdline").read_text().strip("\\0").split("\\0"),
    "proc's environ": sorted(field.decode() for field in fields if b"=" in field),
    "recursion": sys.getrecursionlimit(),
    "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through)
                for s in (sys.stdin, sys.stdout, sys.stderr)],
}))
"""


@pytest.fixture(autouse=True)
def _forks(request: pytest.FixtureRequest) -> None:
    if not processes.use_fork_server:
        pytest.skip("needs the fork server, and --real leaves it out")


def both(*command: Any, **options: Any) -> tuple[Finished, Finished]:
    return run(*command, real=True, **options), run(*command, **options)


@pytest.mark.parametrize("kind", ["code", "script", "module"])
def test_a_fork_sees_what_a_fresh_process_sees(kind: str, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    program = {"code": ["-c", LOOK], "script": ["look.py"], "module": ["-m", "look"]}[kind]
    real, forked = both(sys.executable, *program, "--flag", "", "ä b", cwd=tmp_path, EXTRA="1")
    assert (real.stderr, forked.stderr) == ("", "")
    assert json.loads(forked.stdout) == json.loads(real.stdout)
    assert json.loads(forked.stdout)["parent"] == os.getpid()


def test_only_a_fork_has_torch_already() -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert [ended.stdout.strip() for ended in both(sys.executable, "-c", code)] == ["False", "True"]
    # Where what is read at the start differs, it takes a real process.
    for name, value in (("OMP_NUM_THREADS", "2"), ("PYTHONPATH", "."), ("TORCH_LOGS", "dynamo")):
        assert run(sys.executable, "-c", code, **{name: value}).stdout.strip() == "False"
    assert run(sys.executable, "-I", "-c", code).stdout.strip() == "False"


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a message')",
        "import sys; sys.exit(None)",
        "import sys; sys.exit(-1)",
        "import os; os._exit(7)",
        "def f():\n    1 / 0\nf()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import os; os.abort()",
        "import atexit; atexit.register(print, 1); atexit.register(print, 2)",
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('last'))).start()\nprint('first')",
        "class C:\n    def __del__(self):\n        print('gone')\nc = C()\nd = [c]\nd.append(d)",
        "syntax error",
    ],
)
def test_a_fork_ends_as_a_fresh_process_does(code: str) -> None:
    real, forked = both(sys.executable, "-c", code)
    assert (forked.returncode, forked.stdout) == (real.returncode, real.stdout)
    if "SIGINT" in code:
        # Only here the server's frames are shown as well, and what a library of torch 2.15 misses
        # when an interpreter ends that has loaded it.
        shown = forked.stderr.partition("nanobind: ")[0]
        assert shown.splitlines()[-2:] == real.stderr.splitlines()[-2:]
    else:
        assert forked.stderr == real.stderr


def test_a_forked_module_that_is_not_there() -> None:
    real, forked = both(sys.executable, "-m", "no_such_module")
    assert (forked.returncode, forked.stderr) == (real.returncode, real.stderr)
    assert real.returncode
    real, forked = both(sys.executable, "no_such_script.py")
    assert (forked.returncode, forked.stderr) == (real.returncode, real.stderr)
    assert real.returncode


def test_ignored_signals_are_inherited() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGUSR1).name)"
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        real, forked = both(sys.executable, "-c", code)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert forked.stdout == real.stdout == "SIG_IGN\n"


# A parent that starts a child as ``how`` says; the child dies with it if it is told to (SIGTERM).
FAMILY = """
import ctypes, multiprocessing, os, subprocess, sys, time

def child():
    ctypes.CDLL(None).prctl(1, 15)
    print("child", os.getpid(), os.getppid(), "torch" in sys.modules, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    print("parent", os.getpid(), flush=True)
    if sys.argv[1] == "popen":
        code = "import sys; sys.path.insert(0, '.'); from family import child; child()"
        subprocess.Popen([sys.executable, "-c", code]).wait()
    else:
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
        process.join()
"""


@pytest.mark.parametrize("how", ["popen", "spawn"])
def test_what_a_fork_starts_is_its_child(how: str, tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    process = start(sys.executable, "family.py", how, cwd=tmp_path)
    assert process.stdout
    parent = process.stdout.readline().split()
    child = process.stdout.readline().split()
    assert parent == ["parent", str(process.pid)]
    assert child[2:] == [str(process.pid), "True"], "forked, and by the one that started it"
    status = Path(f"/proc/{child[1]}/environ").read_bytes()
    assert b"MNIST_TEST_SESSION" in status, "the child is known as a test's"
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    wait_until_gone(int(child[1]))


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():  # only its entry is left
                return
        except OSError:
            return
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.02)


def test_a_server_ends_with_its_fork() -> None:
    code = "import os; print(open(f'/proc/self/task/{os.getpid()}/children').read()); os.pause()"
    code = code.replace("os.pause()", "import signal; print(flush=True); signal.pause()")
    process = start(sys.executable, "-c", code)
    assert process.stdout
    (server,) = process.stdout.readline().split()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    wait_until_gone(int(server))


def test_descriptors_go_to_the_numbers_they_have(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        code = f"import os; os.write({writing}, b'here')"
        subprocess.run(
            [sys.executable, "-c", code], env=environment(), pass_fds=[writing], check=True
        )
        assert os.read(reading, 10) == b"here"
    finally:
        os.close(reading)
        os.close(writing)


def test_a_forked_training_is_the_same_to_the_bit(synthetic_dir: Path, tmp_path: Path) -> None:
    def command(name: str) -> list[Any]:
        flags = [
            "--dataset",
            "synthetic",
            "--data-dir",
            synthetic_dir,
            "--max-steps",
            8,
            "--model",
            "mlp",
        ]
        return script("train_single.py", *flags, "--run-dir", tmp_path / name)

    for name, real in (("real", True), ("forked", False)):
        ended = run(*command(name), real=real)
        assert ended.returncode == 0, ended.text
    real_one, forked = summary(tmp_path / "real"), summary(tmp_path / "forked")
    for key in ("weights_sha256", "test_loss", "test_correct"):
        assert forked[key] == real_one[key]
