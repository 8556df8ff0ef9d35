"""Every lesson runs as its docstring says, and shows what it claims."""

import functools
import re
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, Finished, run
from tests.sources import code_lines

FOLDER = ROOT / "scripts" / "lessons"
MAX_LINES = 100  # of code, as for scripts and tools: a comment more is no fault
TIMEOUT = 75.0  # seconds, on a machine that others use, too; a lesson ends itself after 60

# What each lesson has to print: regular expressions, one of them per fact that documents cite.
LESSONS: dict[str, tuple[str, ...]] = {
    "ring_all_reduce": (
        r"step 3  reduce-scatter +0001 1111 1101 1001",
        r"step 6  all-gather +1111 1111 1111 1111  1111",
        r"tensor: 32,000 bytes; sent by each rank: \[48000, 48000, 48000, 48000\]",
        r"shown: it takes 2\(n - 1\) = 6 steps, not n = 4",
    ),
    "data_parallel_by_hand": (
        r"scatter the batch +\d+\.\d\d ms",
        r"replicate the model +\d+\.\d\d ms",
        r"batch 10 on 4 replicas is split \[3, 3, 3, 1\], batch 3 \[1, 1, 1\]",
        r"shown: .* nothing is averaged",
        r"gathered as\n  \[\d\.\d+, \d\.\d+, \d\.\d+, \d\.\d+\], whose mean is \d\.\d+\n",
    ),
    "threads_and_gil": (
        r"another thread was in a torch product +\d*[1-9]",
        r"two threads in a Python loop kept \d\.\d\d cores busy",
    ),
    "equivalence": (
        r"nothing changed +0\.000 +0\.000",
        r"weights' seed per rank +0\.000 +0\.000",
        r"unequal shares, weighted losses +0\.000 +0\.000",
        r"unequal shares +0\.000 +0\.615",
        r"order's seed per rank +0\.000 +0\.580",
        r"batch normalisation +0\.346 +0\.230",
        r"half the steps, twice the batch +0\.493 +0\.493",
        r"\.\.\. and the rate +0\.020 +0\.020",
    ),
    "sync_points": (
        r"DistributedDataParallel\(model\) +1 allgather, \d broadcast",
        r"backward +1 allreduce +1 allreduce",
        r"the optimizer's step +- +-",
        r"backward in no_sync, forward before it +1 allreduce",
    ),
    "bucket_overlap": (
        r"layer 3, send 0, layer 2, send 1, layer 1, send 2",
        r"layer 3, layer 2, layer 1, send 0",
    ),
    "checkpoint_and_barrier": (
        r"rank 1: FileNotFoundError: \[Errno 2\] No such file or directory: '\.\.\./model\.pt'",
        r"rank 1: weights sum to \+0\.2471, after loading to -0\.7283",
    ),
    "model_parallel": (
        r"ValueError: device_ids can only be None or contain a single element\.",
        r"only work with single-device/multiple-device GPU modules or CPU modules",
    ),
    "zero_first": (
        r"local_rank  node0 by \[0\], node1 by \[2\] +shared by \[0, 2\] RACE",
        r"rank        node0 by \[0\], node1 by \[2, 3\] RACE +shared by \[0\]\n",
        r"file lock   node0 by \[[01]\], node1 by \[[23]\] +shared by \[\d\]\n",
    ),
    "join_uneven": (
        r"rank 1: RuntimeError: .* Timed out waiting 2000ms for recv operation to complete",
        r"rank 0: 3 steps, then \[101\.0, 101\.0, 101\.0\]",
        r"join:\n  rank 0: 3 steps, .*\n  rank 1: 5 steps, ",
    ),
    "break_set_epoch": (
        r"without set_epoch:(\n  epoch \d: rank 0 \[4, 7, 2, 1\]   rank 1 \[0, 3, 5, 6\]){3}\n",
        r"ValueError: sampler option is mutually exclusive with shuffle",
    ),
    "break_world_size": (
        r"DistStoreError: Timed out after \d seconds waiting for clients\. 2/3 clients joined\.",
        r"DistStoreError: wait timeout after 2000ms, keys: ",
        r"rank < size\. 2 vs 2",
        r"right: .*\n  rank 0: counted 2 ranks\n  rank 1: counted 2 ranks",
    ),
    "break_rank_zero_collective": (
        r"rank 0: RuntimeError: .* Timed out waiting 2000ms for recv operation to complete",
        r"rank 0: RuntimeError: .*(Connection closed by peer|Connection reset by peer)",
        r"rank 1: gradient = 1010\n",
        r"rank 0: correct = 30\n  rank 1: correct = 30\n",
    ),
    "break_every_rank_saves": (
        r"loads: (EOFError|RuntimeError: PytorchStreamReader failed|UnpicklingError)",
        r"saves: FileNotFoundError: .* 'last\.tmp' -> 'last\.pt'",
        r"rank 0, through a temporary file:\n +\d+ saves: fine\n +\d+ loads: fine\n\n",
    ),
    "break_padded_evaluation": (
        r"DistributedSampler +shares .*: 8 of 12 = 66\.7%",
        r"drop_last=True +shares .*: 6 of 8 = 75\.0%",
        r"unpadded +shares .*: 8 of 10 = 80\.0%",
    ),
    "break_local_accuracy": (
        r"its own correct / all samples +rank 0 +40\.0% +rank 1 +10\.0% +rank 2 +20\.0%",
        r"mean of the ranks' accuracies +rank 0 +66\.7%",
        r"sum of correct / sum of counts +rank 0 +70\.0% +rank 1 +70\.0% +rank 2 +70\.0%",
        r"TypeError: unsupported operand type\(s\) for /: 'NoneType' and 'int'",
    ),
    "break_module_prefix": (
        r'Missing key\(s\) in state_dict: "weight", "bias"\.',
        r'Unexpected key\(s\) in state_dict: "module\.weight", "module\.bias"\.',
        r"strict=False: no error, missing \['weight', 'bias'\], weights changed: False",
    ),
    "break_unused_parameters": (
        r"Expected to have finished reduction in the prior iteration before starting a new one",
        r"Parameter indices which did not receive grad for rank 0: 4 5",
        r"Parameters which did not receive grad for rank 0: spare\.bias, spare\.weight",
    ),
    "break_timeout": (
        r"Timed out waiting 1000ms for (recv|send) operation to complete",
        r"\[Rank 0\]: Ranks 2 failed to pass monitoredBarrier in 1000 ms",
        r"rank 0: waited [12]\.\d s\n  rank 1: waited [12]\.\d s\n  rank 2: waited ",
    ),
    "break_port_in_use": (
        r"The server socket has failed to listen on any local network address\. port: \d+",
        r"EADDRINUSE, message: address already in use",
        r"a free port, while the other job runs: joined",
    ),
    "break_early_stop": (
        r"busy:\n  rank 0: stopped after 4\n  rank 1: RuntimeError: .* Timed out waiting 2000ms",
        r"all stop with the first:\n  rank 0: stopped after 4\n  rank 1: stopped after 4\n",
        r"the loss of all:\n  rank 0: stopped after 7\n  rank 1: stopped after 7\n",
    ),
    "break_loss_average": (
        r"mean of each micro-batch / micro-batches +0\.445 off",
        r"sum / tokens of this rank +0\.180 off",
        r"sum / tokens of all ranks +0\.500 off",
        r"sum / tokens of all ranks \* world size +0\.000 off",
    ),
    "break_same_random": (
        r"one seed:\n  rank 0: .* (shifted by .*),.*\n  rank 1: .* \1",
        r"seed \+ rank:\n  rank 0: .* (shifted by .*),.*\n  rank 1: (?!.* \1)",
    ),
    "break_two_forwards": (
        r"needed for gradient computation has been modified by an inplace operation",
        r"two backwards:\n  rank 0: gradient 40\.661, .* 45\.240\n  rank 1: gradient 49\.818",
        r"each after its forward:\n  rank 0: gradient 45\.240, of one device 45\.240\n",
    ),
    "break_large_batch": (
        r"small batch +32 +512 +0\.04 +\d\.\d\d +99\.\d%",
        r"large, linear, warm-up +512 +32 +0\.64 +\d\.\d\d +9\d\.\d%",
        r"huge, linear, warm-up +2048 +8 +2\.56 +",
    ),
    "break_forward_state": (
        r"self\.calls \+= 1 +3 +0 +3 +3\n",
        r"self\.buffer \+= n +12 +6 +6 +6\n",
        r"returned, added up outside +12 +12 +6 +6\n",
    ),
    "break_thread_oversubscription": (r"the fair share is \d+\.\d times as fast as the crowd",),
}


@functools.cache
def run_lesson(name: str) -> Finished:
    """Run a lesson by the command in its docstring, once for all tests that look at its output."""
    source = (FOLDER / f"{name}.py").read_text()
    commands = re.findall(r"^python (\S+)$", source.split('"""')[1], flags=re.MULTILINE)
    assert commands == [f"scripts/lessons/{name}.py"]
    return run(sys.executable, *commands, timeout=TIMEOUT)


def test_every_lesson_is_in_the_table() -> None:
    files = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert files == set(LESSONS)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_lesson_is_short(path: Path) -> None:
    assert len(code_lines(path.read_text())) <= MAX_LINES


# Ten seconds each, most of it the waiting that they are about.
SLOW = ("break_world_size", "break_timeout", "break_thread_oversubscription", "join_uneven")
SLOW += ("break_every_rank_saves",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LESSONS]
)
def test_lesson(name: str) -> None:
    finished = run_lesson(name)
    assert finished.returncode == 0, finished.text
    assert "NOT SHOWN" not in finished.stdout
    assert "\nshown: " in finished.stdout
    assert "Traceback" not in finished.text
    for pattern in LESSONS[name]:
        assert re.search(pattern, finished.stdout), f"no {pattern!r} in:\n{finished.stdout}"
