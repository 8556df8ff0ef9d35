"""Where the time goes: the arithmetic on traces made by hand, and the flag in the three scripts."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run, script
from utils import profiling

MAIN, REPLICAS, AUTOGRAD = 1, (2, 3), 4  # threads
KEYS = ["data", "forward", "backward", "communication", "optimizer", "gaps"]


def event(name: str, begin: float, end: float, tid: Any = MAIN, **more: Any) -> dict[str, Any]:
    cat = more.pop("cat", "user_annotation")
    whole = {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid}
    return whole | {"args": more}


def step(*inside: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a step of 100 us: data 10, forward 30, backward 40, optimizer 10, and the rest."""
    return [
        event("ProfilerStep#7", 0, 100),
        event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 5),
        event("prepare", 5, 10),
        event("forward", 10, 40),
        event("backward", 40, 80),
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


def test_phases_and_the_rest() -> None:
    result = profiling.analyse(step(), 1)
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
    result = profiling.analyse(trace, 1)
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
    result = profiling.analyse(trace, 1)
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
    result = profiling.analyse(trace, 1)
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
    parts = profiling.analyse(trace, 1)["communication_parts"]
    assert parts == {"replicate": 0.06, "reduce": 0.04}


def test_only_whole_steps_count() -> None:
    """After the last batch a step begins that never ends."""
    later = [event("ProfilerStep#8", 100, 900), event("forward", 110, 890)]
    assert profiling.analyse(step() + later, 1)["shares"]["forward"] == 0.3


def test_spans() -> None:
    assert profiling.union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert profiling.subtract([(0, 10)], [(-1, 1), (3, 4), (9, 12)]) == [(1, 3), (4, 9)]
    assert profiling.subtract([(0, 1), (5, 6)], [(0, 9)]) == []
    assert profiling.intersect([(0, 5), (7, 9)], [(4, 8)]) == [(4, 5), (7, 8)]


def test_a_mark_is_nothing_while_nothing_records() -> None:
    with profiling.mark("outside") as nothing:
        assert nothing is None
    with torch.profiler.profile() as recorded, profiling.mark("ours alone"):
        torch.ones(1)
    assert "ours alone" not in {event.key for event in recorded.key_averages()}


def read_trace(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {e.get("name", "") for e in json.load(file)["traceEvents"]}


def check_result(run_dir: Path, steps: int) -> dict[str, Any]:
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


MARKS = {"prepare", "forward", "backward", "Optimizer.step#SGD.step"}
REPLICATION = {"scatter", "replicate", "gather"}


@pytest.mark.parametrize(
    ("name", "ranks", "extra", "names", "parts"),
    [
        ("single", 1, ["--num-workers", 1, "--max-grad-norm", 5], {"clip_grad_norm"}, set()),
        ("dp", 1, [], {"DataParallel.forward", "DataParallel.parallel_apply"}, REPLICATION),
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
    assert "communication" in result.stdout
    assert "ERROR" not in result.text, "Kineto misses the GPU"
    facts = check_result(tmp_path / "run", 10)
    if parts is not None:
        assert set(facts["communication_parts"]) == parts
    if name == "dp":
        assert facts["replica_threads"]["count"] == 2
    traces = sorted(path.name for path in (tmp_path / "run" / "profile").iterdir())
    assert traces == [f"rank{rank}.json.gz" for rank in range(ranks)]
    for trace in traces:
        found = read_trace(tmp_path / "run" / "profile" / trace)
        assert found >= MARKS | names
        assert any(word.startswith("enumerate(DataLoader)#") for word in found)
        assert sum(word.startswith("ProfilerStep#") for word in found) == 10


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
    profiler = profiling.StepProfiler(tmp_path, torch.device("cpu"), 0)
    for steps in range(1, profiling.LAST_STEP + 1):
        profiler.step(steps)
    profiler.finish(profiling.LAST_STEP)
    assert profiler.report.startswith("profile: ")
    assert "could not be written" in profiler.report
    assert len(profiler.report.splitlines()) == 1
