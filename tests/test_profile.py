"""Where the time goes: the arithmetic on traces made by hand, and the flag in the three scripts."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import ROOT, run, script
from utils import profiler

sys.path.insert(0, str(ROOT / "scripts" / "tools"))

import phases

MAIN, REPLICAS, AUTOGRAD = 1, (2, 3), 4  # threads
KEYS = ["data", "forward", "backward", "communication", "optimizer", "gaps"]


def event(name: str, begin: float, end: float, tid: Any = MAIN, **more: Any) -> dict[str, Any]:
    cat = more.pop("cat", "user_annotation")
    whole = {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid}
    return whole | {"args": more}


def step(*inside: dict[str, Any], backward_end: float = 80) -> list[dict[str, Any]]:
    """Return a step of 100 us: data 10, forward 30, backward 40, optimizer 10, and the rest.

    Between loader and forward nothing has a name, nor between the forward and its backward.
    """
    return [
        event("ProfilerStep#7", 0, 100),
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 5),
        event("forward", 10, 36),
        op("autograd::engine::evaluate_function: NllLossBackward0", 40, 45),
        op("autograd::engine::evaluate_function: ConvolutionBackward0", 46, 70),
        op("autograd::engine::evaluate_function: AccumulateGrad", backward_end - 1, backward_end),
        event("Optimizer.step#SGD.step", 80, 88),
        event("Optimizer.zero_grad#SGD.zero_grad", 88, 90),
        *inside,
    ]


def op(name: str, begin: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    return event(name, begin, end, tid, cat="cpu_op")


def kernel(name: str, begin: float, end: float, launched: float, tid: int = MAIN) -> list[Any]:
    """Return a kernel of device 0, stream 7, and its launch, which tells them by their number."""
    number = hash((name, begin))
    launch = event("cudaLaunchKernel", launched, launched + 1, tid, correlation=number)
    work = event(name, begin, end, 7, cat="kernel", correlation=number, device=0)
    return [launch | {"cat": "cuda_runtime"}, work]


def analyse(events: list[dict[str, Any]]) -> dict[str, Any]:
    return phases.share_out(phases.sort_events(events))


def test_phases_and_the_rest() -> None:
    result = analyse(step())
    assert list(result["shares"].values()) == [0.1, 0.3, 0.4, 0, 0.1, 0.1]
    assert list(result["shares"]) == KEYS
    assert result["step_seconds"] == pytest.approx(100e-6)
    assert result["timeline"] == "main thread"
    assert result["communication_parts"] == {}


def test_a_collective_beside_an_operation_is_hidden() -> None:
    trace = step(
        op("aten::convolution_backward", 40, 70),
        event("gloo:all_reduce", 60, 78, tid=9),  # 10 us beside the convolution, 8 after it
        op("c10d::allreduce_", 90, 95),  # the agreement on a stop signal
    )
    result = analyse(trace)
    assert result["shares"]["backward"] == 0.32
    assert result["shares"]["communication"] == 0.13
    assert result["shares"]["gaps"] == 0.05
    assert result["communication_total"] == 0.23
    assert result["communication_parts"] == {"in_backward": 0.08, "elsewhere": 0.05}


def test_the_parts_of_dp_and_its_threads() -> None:
    first, second = REPLICAS
    trace = step(
        event("DataParallel.forward", 10, 40),
        event("DataParallel.scatter", 10, 12),
        event("DataParallel.replicate", 12, 20),
        op("aten::clone", 13, 19),
        event("DataParallel.parallel_apply", 20, 36),
        op("aten::conv2d", 20, 32, tid=first),
        op("aten::conv2d", 24, 32, tid=second),
        event("DataParallel.gather", 36, 40),
    )
    result = analyse(trace)
    assert result["communication_parts"] == {"scatter": 0.02, "replicate": 0.08, "gather": 0.04}
    assert result["shares"]["communication"] == result["communication_total"] == 0.14
    assert result["shares"]["forward"] == 0.16
    assert result["replica_threads"] == {"count": 2, "at_once": (12 + 8) / 16}


def test_a_kernel_belongs_to_the_phase_that_launched_it() -> None:
    trace = step(
        *kernel("copy", 8, 12, launched=6),
        *kernel("gemm", 20, 40, launched=15),
        *kernel("gemm_backward", 45, 85, launched=50, tid=AUTOGRAD),
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING", 75, 91, launched=60, tid=AUTOGRAD),
        *kernel("sgd", 91, 99, launched=82),
        event("elsewhere", 0, 100, tid=7, cat="kernel", device=1, correlation=0),
    )
    result = analyse(trace)
    assert result["timeline"] == "device"
    assert list(result["shares"].values()) == [0.04, 0.2, 0.4, 0.06, 0.08, 0.22]
    assert result["communication_total"] == 0.16
    assert result["communication_parts"] == {"in_backward": 0.06}


def test_the_copies_of_dp_on_a_device() -> None:
    trace = step(
        op("Broadcast", 12, 16),
        *kernel("ncclDevKernel_Broadcast", 14, 20, launched=13),
        *kernel("gemm", 20, 30, launched=22, tid=REPLICAS[0]),
        op("autograd::engine::evaluate_function: BroadcastBackward", 60, 70, tid=AUTOGRAD),
        *kernel("ncclDevKernel_Reduce", 66, 70, launched=65, tid=AUTOGRAD),
    )
    parts = analyse(trace)["communication_parts"]
    assert parts == {"replicate": 0.06, "reduce": 0.04}


def test_only_whole_steps_count() -> None:
    """After the last batch a step begins that never ends."""
    later = [event("ProfilerStep#8", 100, 900), event("forward", 110, 890)]
    assert analyse(step() + later)["shares"]["forward"] == 0.3
    with pytest.raises(phases.TraceError, match="no whole step"):
        phases.sort_events(later)


def test_clipping_is_the_optimizers_and_a_norm_of_the_forward_is_not() -> None:
    trace = step(
        op("aten::linalg_vector_norm", 12, 14),
        op("aten::_foreach_norm", 76, 77),
        op("aten::_foreach_mul_", 78, 79),
        backward_end=75,
    )
    shares = analyse(trace)["shares"]
    assert (shares["forward"], shares["backward"], shares["optimizer"]) == (0.3, 0.35, 0.14)


def test_micro_steps_are_told_apart() -> None:
    trace = [
        event("ProfilerStep#7", 0, 100),
        event("enumerate(DataLoader)#x", 0, 5),
        event("forward", 10, 20),
        op("autograd::engine::evaluate_function: A", 25, 40),
        event("enumerate(DataLoader)#x", 50, 55),
        event("forward", 60, 70),
        op("autograd::engine::evaluate_function: A", 75, 90),
        event("Optimizer.step#SGD.step", 90, 100),
    ]
    shares = analyse(trace)["shares"]
    assert list(shares.values()) == [0.2, 0.3, 0.3, 0, 0.1, 0.1]


def test_an_agreement_that_outlasts_its_step_is_no_part_of_the_next_ones_phases() -> None:
    trace = step(event("gloo:all_reduce", 3, 7, tid=9), event("gloo:all_reduce", 37, 39, tid=9))
    result = analyse(trace)
    assert list(result["communication_parts"]) == ["elsewhere"]
    assert result["shares"]["backward"] == 0.4


def test_an_all_reduce_that_ends_the_backward_belongs_to_it() -> None:
    """With one bucket it begins, on a thread of gloo's, when autograd has nothing left to do."""
    result = analyse(step(event("gloo:all_reduce", 72, 78, tid=9), backward_end=71))
    assert result["communication_parts"] == {"in_backward": 0.06}
    assert result["shares"]["backward"] == 0.32, "from 40 to 78, but for the 6 that it waits"


def test_a_rank_waits_for_the_slowest_from_when_it_comes_to_a_reduction() -> None:
    """The clock of each trace begins somewhere else; their bases tell where."""

    def rank(begin: float, base: int) -> phases.Trace:
        reduce = event("gloo:all_reduce", begin, 78, tid=9)
        hook = op("autograd::engine::evaluate_function: AccumulateGrad", begin, begin + 1)
        launches = op("c10d::allreduce_", begin, begin + 1), op("c10d::allreduce_", 95, 96)
        found = phases.sort_events(step(hook, *launches, reduce, backward_end=71))
        found.base = base
        return found

    first, second = rank(72, 5_000_000), rank(71, 5_006_000)  # nanoseconds: 6 us later
    assert phases.waits([first, second]) == [0.05, 0], "from 72 to 77"
    assert phases.waits([second, first]) == [0, 0.05]
    assert phases.waits([first]) == [0]
    second.host = "another"
    assert phases.waits([first, second]) == [], "it has another clock"
    without = phases.sort_events(step())
    assert phases.waits([first, without]) == []
    assert phases.waits([without, without]) == [0, 0]


def test_spans() -> None:
    assert phases.union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert phases.subtract([(0, 10)], [(-1, 1), (3, 4), (9, 12)]) == [(1, 3), (4, 9)]
    assert phases.subtract([(0, 1), (5, 6)], [(0, 9)]) == []
    assert phases.intersect([(0, 5), (7, 9)], [(4, 8)]) == [(4, 5), (7, 8)]


def read_trace(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {e.get("name", "") for e in json.load(file)["traceEvents"]}


def check_result(run_dir: Path, steps: int) -> dict[str, Any]:
    told = run(sys.executable, ROOT / "scripts" / "tools" / "trace.py", run_dir)
    assert told.returncode == 0, told.text
    assert told.stdout.startswith(f"{run_dir}: profile of {steps} steps, ")
    assert "communication" in told.stdout
    result = json.loads((run_dir / "profile.json").read_text())
    assert result["steps"] == steps
    assert result["step_seconds"] > 0
    assert list(result["shares"]) == KEYS
    assert all(0 <= share <= 1 for share in result["shares"].values())
    assert sum(result["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert result["shares"]["forward"] > 0
    assert result["shares"]["backward"] > 0
    assert 1 >= result["communication_total"] >= result["shares"]["communication"] - 1e-3
    return result


NAMES = {"forward", "Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"}
REPLICATION = {"scatter", "replicate", "gather"}


@pytest.mark.parametrize(
    ("name", "ranks", "extra", "names", "parts"),
    [
        ("single", 1, ["--num-workers", 1, "--max-grad-norm", 5], {"aten::_foreach_norm"}, set()),
        (
            "dp",
            1,
            [],
            {"DataParallel.forward", "DataParallel.scatter", "DataParallel.gather"},
            REPLICATION,
        ),
        (
            "ddp",
            2,
            ["--nprocs", 2, "--grad-accum-steps", 2],
            {"DistributedDataParallel.forward", "gloo:all_reduce", "c10d::allreduce_"},
            {"in_backward", "elsewhere"},
        ),
        pytest.param(
            "ddp", 1, [], {"DistributedDataParallel.forward"}, None, marks=pytest.mark.slow
        ),
        pytest.param(
            "ddp",
            3,
            ["--nprocs", 3, "--bucket-cap-mb", 0.1],
            {"gloo:all_reduce"},
            {"in_backward", "elsewhere"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_profiled_run(
    name: str,
    ranks: int,
    extra: list[Any],
    names: set[str],
    parts: set[str] | None,
    synthetic_dir: Path,
    tmp_path: Path,
) -> None:
    flags = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--batch-size", 16]
    flags += ["--run-dir", tmp_path / "run", "--max-steps", 20, "--profile", "--no-tensorboard"]
    result = run(*script(f"train_{name}.py", *flags, *extra))
    assert result.returncode == 0, result.text
    assert result.stdout.count("profile of 10 steps") == 1, "rank 0 alone prints, and once"
    assert not (tmp_path / "run" / "profile.json").exists(), "the training only records"
    assert "ERROR" not in result.text, "Kineto misses the GPU"
    facts = check_result(tmp_path / "run", 10)
    if parts is not None:
        assert set(facts["communication_parts"]) == parts
    if name == "dp":
        assert facts["replica_threads"]["count"] == 2
    traces = sorted(path.name for path in (tmp_path / "run" / "profile").iterdir())
    assert traces == [f"rank{rank}.json.gz" for rank in range(ranks)]
    assert len(facts["waits"]) == ranks
    assert all(0 <= share < 1 for share in facts["waits"])
    for trace in traces:
        found = read_trace(tmp_path / "run" / "profile" / trace)
        assert found >= NAMES | names
        assert any(word.startswith("enumerate(DataLoader)#") for word in found)
        assert sum(word.startswith("ProfilerStep#") for word in found) == 10
    if ranks == 2:  # of which one was killed while it wrote
        (tmp_path / "run" / "profile" / "rank1.json.gz").write_bytes(b"cut")
        assert check_result(tmp_path / "run", 10)["waits"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["single", "dp", "ddp"])
def test_on_a_gpu_the_clock_is_the_devices(name: str, synthetic_dir: Path, tmp_path: Path) -> None:
    flags = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--run-dir", tmp_path / "run"]
    result = run(*script(f"train_{name}.py", *flags, "--max-steps", 20, "--profile"))
    assert result.returncode == 0, result.text
    assert check_result(tmp_path / "run", 10)["timeline"] == "device"


@pytest.mark.slow
def test_short_epochs_and_resumed_ones(synthetic_dir: Path, tmp_path: Path) -> None:
    """The weights are those of a run without; and without the flag nothing is written."""
    flags = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--model", "linear"]
    flags += ["--batch-size", 6000, "--epochs", 2, "--no-tensorboard"]
    hashes = []
    for folder, extra in ((tmp_path / "with", ["--profile"]), (tmp_path / "without", [])):
        result = run(*script("train_single.py", *flags, "--run-dir", folder, *extra))
        assert result.returncode == 0, result.text
        assert result.stdout.count("profile of 3 steps") == len(extra), "in the first epoch only"
        hashes.append(json.loads((folder / "summary.json").read_text())["weights_sha256"])
    assert hashes[0] == hashes[1]
    check_result(tmp_path / "with", 3)
    assert not [path for path in (tmp_path / "without").iterdir() if "profile" in path.name]

    # Resumed, with two epochs to go, which are long enough; and one that is not.
    more = [*flags, "--run-dir", tmp_path / "with", "--resume", "--profile", "--epochs"]
    result = run(*script("train_single.py", *more, 3))
    assert "profile of 3 steps" in result.stdout, result.text
    result = run(*script("train_single.py", *more, 4, "--max-steps", 35))
    assert "profile: 5 steps are too few, it takes 8 or more" in result.stdout, result.text
    assert result.returncode == 0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file in the place of the folder")
    subject = profiler.StepProfiler(tmp_path, torch.device("cpu"), 0)
    for steps in range(1, profiler.LAST_STEP + 1):
        subject.step(steps)
    subject.finish(profiler.LAST_STEP)
    assert subject.report.startswith("profile: ")
    assert "could not be written" in subject.report
    assert len(subject.report.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: train with --profile"),
        (b"no archive", "is not a trace of --profile"),
        (gzip.compress(b"no JSON"), "is not a trace of --profile"),
        (gzip.compress(b"[1]"), "is not a trace of --profile"),
        (gzip.compress(b"[" * 100_000), "is not a trace of --profile"),
        (gzip.compress(b'{"traceEvents": [{"ph": "X"}]}'), "is not a trace of --profile"),
        (gzip.compress(b'{"traceEvents": []}'), "the trace holds no step"),
        (gzip.compress(b'{"traceEvents": []}')[:-9], "is not a trace of --profile"),
    ],
    ids=[
        "missing",
        "no archive",
        "no JSON",
        "a list",
        "too deep",
        "no times",
        "no step",
        "truncated",
    ],
)
def test_without_a_trace_of_use_the_tool_says_so_in_one_line(
    content: bytes | None,
    message: str,
    tmp_path: Path,
) -> None:
    if content is not None:
        (tmp_path / "profile").mkdir()
        (tmp_path / "profile" / "rank0.json.gz").write_bytes(content)
    with pytest.raises(phases.TraceError, match=message) as told:
        phases.analyse(tmp_path)
    assert len(str(told.value).splitlines()) == 1
    assert told.value.exit_status == 2


def test_the_tool_ends_with_one_line_where_there_is_no_trace(tmp_path: Path) -> None:
    told = run(sys.executable, ROOT / "scripts" / "tools" / "trace.py", tmp_path)
    assert told.returncode == 2, told.text
    assert told.stderr.startswith("trace.py: error: ")
    assert len(told.stderr.splitlines()) == 1
