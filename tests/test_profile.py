"""Where the time goes: the arithmetic on traces made by hand, and the flag in the three scripts."""

import argparse
import gzip
import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from tests.processes import ROOT, succeed
from utils.errors import UsageError, guard
from utils.training import timing

sys.path.insert(0, str(ROOT / "scripts" / "tools"))

import trace as tool  # isort: skip

MAIN, AUTOGRAD = 1, 4  # threads
KEYS = ["data", "forward", "backward", "communication", "optimizer", "gaps"]


def event(name, begin, end, tid=MAIN, cat="user_annotation", **more):
    whole = {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid}
    return whole | {"args": more}


def op(name, begin, end, tid=MAIN):
    return event(name, begin, end, tid, cat="cpu_op")


def step(*inside):
    """Return a step of 100 us: data 10, forward 30, backward 40, optimizer 10, and the rest.

    Between loader and forward nothing has a name, nor between the forward and its backward.
    """
    return [
        event("ProfilerStep#7", 0, 100),
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 5),
        event("forward", 10, 36),
        op("autograd::engine::evaluate_function: NllLossBackward0", 40, 45),
        op("autograd::engine::evaluate_function: ConvolutionBackward0", 46, 70),
        op("autograd::engine::evaluate_function: AccumulateGrad", 79, 80),
        event("Optimizer.step#SGD.step", 80, 88),
        event("Optimizer.zero_grad#SGD.zero_grad", 88, 90),
        *inside,
    ]


def kernel(name, begin, end, launched, tid=MAIN):
    """Return a kernel of device 0, stream 7, and its launch; a number belongs to both."""
    number = hash((name, begin))
    launch = event("cudaLaunchKernel", launched, launched + 1, tid, correlation=number)
    work = event(name, begin, end, 7, cat="kernel", correlation=number, device=0)
    return [launch | {"cat": "cuda_runtime"}, work]


def analyse(events):
    return tool.share_out(tool.sort_events(events))


def test_phases_of_whole_steps_and_the_rest():
    later = [event("ProfilerStep#8", 100, 900), event("forward", 110, 890)]  # it never ends
    result = analyse(step() + later)
    assert result["shares"] == dict(zip(KEYS, [0.1, 0.3, 0.4, 0, 0.1, 0.1], strict=True))
    assert result["step_seconds"] == pytest.approx(100e-6)
    assert result["timeline"] == "main thread"
    with pytest.raises(UsageError, match="no whole step"):
        tool.sort_events(later)


def test_a_collective_beside_an_operation_is_hidden():
    result = analyse(
        step(
            op("aten::convolution_backward", 40, 70),
            event("gloo:all_reduce", 60, 78, tid=9),  # 10 us beside the convolution, 8 after it
            op("c10d::allreduce_", 90, 95),  # the agreement on a stop signal
        )
    )
    assert result["shares"]["backward"] == 0.32
    assert (result["kernels"], result["operations"]) == (0, 1)
    assert result["shares"]["communication"] == 0.13
    assert result["communication_total"] == 0.23
    assert result["communication_parts"] == {"in_backward": 0.08, "elsewhere": 0.05}


def test_a_kernel_belongs_to_the_phase_that_launched_it():
    result = analyse(
        step(
            *kernel("copy", 8, 12, launched=6),
            op("Broadcast", 12, 14),
            *kernel("ncclDevKernel_Broadcast", 14, 20, launched=13),
            *kernel("gemm", 20, 40, launched=15),
            *kernel("gemm_backward", 45, 85, launched=50, tid=AUTOGRAD),
            *kernel("ncclDevKernel_AllReduce_Sum_f32_RING", 75, 91, launched=60, tid=AUTOGRAD),
            *kernel("sgd", 91, 99, launched=82),
            event("elsewhere", 0, 100, tid=7, cat="kernel", device=1, correlation=0),
        )
    )
    assert result["timeline"] == "device"
    assert (result["kernels"], result["operations"]) == (6, 0), "none of another GPU"
    assert list(result["shares"].values()) == [0.04, 0.2, 0.4, 0.12, 0.08, 0.16]
    assert result["communication_parts"] == {"replicate": 0.06, "in_backward": 0.06}


@pytest.mark.parametrize(
    ("steps", "timed", "speed"), [(1, None, None), (10, (2, 10), 10.0), (14, (11, 14), 10.0)]
)
def test_a_speed_says_over_which_steps_it_is(steps, timed, speed, monkeypatch):
    """A step takes a second, the first one nine."""
    clock = SimpleNamespace(seconds=0.0)
    clock.perf_counter = lambda: clock.seconds
    monkeypatch.setattr(timing, "time", clock)
    throughput = timing.Throughput(torch.device("cpu"), 10, timing.WARMUP_STEPS)
    throughput.start_epoch()
    for step in range(1, steps + 1):
        clock.seconds += 9 if step == 1 else 1
        throughput.step()
    throughput.end_epoch()
    assert (throughput.timed_steps, throughput.images_per_second()) == (timed, speed)


def trace(run_dir):
    """Run the tool in this process, which has imported what it needs."""
    return guard(tool.run, argparse.Namespace(run_dirs=[run_dir]))


SINGLE = {"forward", "Optimizer.step#SGD.step", "aten::_foreach_norm"}
DP = {"DataParallel.forward", "DataParallel.scatter"}
RANKS = ["--grad-accum-steps", 2, "--bucket-cap-mb", 0.1]
DDP = {"DistributedDataParallel.forward", "gloo:all_reduce", "c10d::allreduce_"}


@pytest.mark.parametrize(
    ("name", "extra", "names", "parts"),
    [
        ("single", ["--num-workers", 1], SINGLE, set()),
        ("dp", [], DP, {"scatter", "replicate", "gather"}),
        ("ddp", RANKS, DDP, {"in_backward"}),
    ],
)
def test_a_profiled_run(name, extra, names, parts, training, capsys):
    words = ["--batch-size", 16, "--max-steps", 24, "--profile", "--no-tensorboard", *extra]
    result = succeed(training.run(name, *words))
    assert result.stdout.count("profile of 10 steps") == 1, "rank 0 alone prints, and once"
    assert "ERROR" not in result.text, "Kineto misses the GPU"
    capsys.readouterr()
    assert trace(training.folder) == 0
    assert capsys.readouterr().out.startswith(f"{training.folder}: profile of 10 steps, ")
    facts = tool.share_out(tool.read_trace(training.folder / "profile" / "rank0.json.gz"))
    # The agreement on a stop, elsewhere, may hide behind other work.
    assert set(facts["communication_parts"]) - {"elsewhere"} == parts
    assert facts["shares"]["gaps"] < 0.5, "most of a step has a name"
    assert min(facts["shares"][name] for name in ("data", "forward", "backward", "optimizer")) > 0
    for rank in range(2 if name == "ddp" else 1):
        with gzip.open(training.folder / "profile" / f"rank{rank}.json.gz", "rt") as file:
            found = Counter(e.get("name", "") for e in json.load(file)["traceEvents"])
        assert {*found} >= names
        if name == "ddp":  # 10 steps of two buckets, 1 to 10 agreements on a stop, nothing else
            sent = found["gloo:all_reduce"]
            assert sent > 20, "--bucket-cap-mb"
            assert sent <= 30, "the backward of a step's first batch sends nothing"
            assert found["gloo:broadcast"] == 0, "each forward waits for rank 0's buffers"


def test_a_run_without_a_trace_is_one_line(tmp_path, capsys):
    assert trace(tmp_path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "does not exist: train with --profile" in line
