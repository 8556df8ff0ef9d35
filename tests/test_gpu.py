"""What only GPUs show, and the script that has it run where there are some.

Tests marked ``gpu`` see the GPUs that the user lets them see; no other test does. None of those
here has run yet: scripts/gpu_check.sh runs them.
"""

import ast
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import ROOT, Finished, run, script, summary
from tests.test_equivalence import GLOBAL_BATCH, PLAIN, distance
from tests.test_interrupted import dying
from tests.test_scripts import flags, succeed

SHORT = ["--model", "mlp", "--max-steps", 30, "--batch-size", 48, "--warmup-epochs", 0]
TECHNIQUES = ("single", "dp", "ddp")


# The script, on any machine


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A folder with a copy of the script, and with programs that only say what they were asked."""
    (tmp_path / "scripts").mkdir()
    for name in ("gpu_check.sh", "environment.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    programs = {
        "nvidia-smi": "echo GPU 0: Fake; echo GPU 1: Fake",
        "python3": 'case "$*" in -c*) echo 2 ;; *pytest*) exit 1 ;; *) echo ran "$*" ;; esac',
    }
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def check(fakes: Path, *arguments: str) -> Finished:
    command = [fakes / "scripts" / "gpu_check.sh", *arguments]
    return run(*command, cwd=fakes, PATH=f"{fakes}/bin:/usr/bin:/bin")


def test_without_a_gpu_there_is_nothing_to_check(fakes: Path) -> None:
    (fakes / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    ended = check(fakes)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "lists no GPU" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_the_report_has_all_parts_although_one_failed(fakes: Path) -> None:
    ended = check(fakes, "--data-dir", "my data")
    assert ended.returncode == 1, ended.text
    assert "Failed: Tests; \n" in ended.stderr
    (report,) = fakes.glob("runs/gpu-check-*/report.md")
    titles = [line[3:] for line in report.read_text().splitlines() if line.startswith("## ")]
    assert titles == [
        *("Driver", "Topology", "Doctor", "Tests", "Benchmark", "One GPU"),
        *("DataParallel", "DistributedDataParallel", "Time to 99 %"),
    ]
    assert report.read_text().count("```") == 2 * len(titles)
    assert "ran train_single.py --dataset mnist --data-dir my data" in report.read_text()
    assert str(report.relative_to(fakes)) in ended.stderr


@pytest.mark.slow
def test_the_check_runs_every_test_marked_gpu(fakes: Path) -> None:
    (line,) = [line for line in check(fakes, "--dry-run").stdout.splitlines() if " pytest " in line]
    arguments = shlex.split(line)[1:]
    ended = run(sys.executable, *arguments, "--collect-only", "-q", real=True, timeout=120)
    assert ended.returncode == 0, ended.text
    marked = {"tests/test_commands.py::test_commands_run[gpus]"}
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "mark.gpu" in ast.unparse(mark) for mark in node.decorator_list
            ):
                marked.add(f"tests/{path.name}::{node.name}")
    assert len(marked) > 10
    assert [name for name in marked if name not in ended.stdout] == []
    scripts = [word for word in arguments if word.endswith(".py")]
    assert not scripts, "a list of files would miss the next one"


def test_other_tests_see_no_gpu() -> None:
    assert not torch.cuda.is_available()
    code = "import torch; print(torch.cuda.device_count())"
    assert run(sys.executable, "-c", code, real=True).stdout == "0\n"


# One GPU


@pytest.mark.gpu
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_script_trains_on_a_gpu(technique: str, synthetic_dir: Path, tmp_path: Path) -> None:
    extra = [*SHORT, "--devices", 0]
    succeed(run(*script(f"train_{technique}.py", *flags(synthetic_dir, tmp_path / "run", *extra))))
    facts = summary(tmp_path / "run")
    assert (facts["device"], facts["num_devices"]) == ("cuda", 1)
    assert facts["backend"] == ("nccl" if technique == "ddp" else None)
    assert facts["test_count"] == 10_000
    assert facts["test_accuracy"] > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("technique", ["single", "ddp"])
@pytest.mark.parametrize(
    "extra",
    [["--amp", "bf16"], ["--amp", "fp16", "--max-grad-norm", 5], ["--compile"]],
    ids=lambda extra: extra[-1] if len(extra) < 3 else extra[1],
)
def test_precision_and_compilation(
    extra: list[Any], technique: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    words = flags(synthetic_dir, tmp_path / "run", *SHORT, "--devices", 0, *extra)
    succeed(run(*script(f"train_{technique}.py", *words), timeout=280))
    assert summary(tmp_path / "run")["test_accuracy"] > 0.5
    state = torch.load(
        tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True, map_location="cpu"
    )
    assert ("scale" in state["scaler"]) == ("fp16" in extra)
    assert all(tensor.dtype == torch.float32 for tensor in state["model"].values())


@pytest.mark.gpu
def test_data_on_the_device_trains_the_same_and_takes_its_memory(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    """``peak_memory_bytes`` is the GPU's: it grows by what the data takes there."""
    found = []
    for name, extra in (("off", []), ("on", ["--data-on-device"])):
        words = flags(synthetic_dir, tmp_path / name, *SHORT, "--devices", 0, *extra)
        succeed(run(*script("train_single.py", *words)))
        found.append(summary(tmp_path / name))
    images = 60_000 * 28 * 28
    assert 0 < found[0]["peak_memory_bytes"][0] < images * 40, "2 GB: is that the process's?"
    assert found[1]["peak_memory_bytes"][0] - found[0]["peak_memory_bytes"][0] > images // 2
    assert found[1]["test_accuracy"] == pytest.approx(found[0]["test_accuracy"], abs=0.02)


@pytest.mark.gpu
def test_a_run_goes_from_cpu_to_gpu_and_back(synthetic_dir: Path, tmp_path: Path) -> None:
    for i, kind in enumerate(("cpu", "cuda", "cpu"), start=1):
        extra = ["--model", "mlp", "--device", kind, "--max-steps", 10 * i, "--amp", "fp16"]
        words = flags(synthetic_dir, tmp_path / "run", *extra, *(["--resume"] if i > 1 else []))
        succeed(run(*script("train_single.py", *words)))
        facts = summary(tmp_path / "run")
        assert (facts["device"], facts["global_step"]) == (kind, 10 * i)
        assert facts["resumed_from"] == (10 * (i - 1) or None)


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_does(synthetic_dir: Path, tmp_path: Path) -> None:
    """In float64, in which no prediction hangs on a rounding."""
    weights, scores = [], []
    for kind in ("cpu", "cuda"):
        folder = tmp_path / kind
        weights.append(train("single", "mlp", synthetic_dir, folder, "--device", kind))
        scores.append([summary(folder)[name] for name in ("test_correct", "test_count")])
    assert distance(*weights) < 1e-9
    assert scores[0] == scores[1]
    assert scores[0][1] == 10_000


@pytest.mark.gpu
def test_a_loss_that_is_not_a_number_is_never_saved(synthetic_dir: Path, tmp_path: Path) -> None:
    """A GPU's loss is looked at every 50 steps; a checkpoint is looked at before it is written."""
    extra = ["--model", "linear", "--max-steps", 30, "--save-every-steps", 3, "--device", "cuda"]
    ended = dying("single", "nan", *flags(synthetic_dir, tmp_path / "run", *extra))
    assert ended.returncode == 1, ended.text
    assert "not finite at step 6: nothing saved" in ended.stderr
    state = torch.load(
        tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True, map_location="cpu"
    )
    assert state["progress"]["global_step"] == 3
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.mark.gpu
def test_two_ranks_share_a_gpu_over_gloo_alone(synthetic_dir: Path, tmp_path: Path) -> None:
    extra = [*SHORT, "--devices", 0, "--nprocs", 2]
    refused = run(*script("train_ddp.py", *flags(synthetic_dir, tmp_path / "nccl", *extra)))
    assert refused.returncode == 2, refused.text
    assert "have the same GPU" in refused.stderr
    words = flags(synthetic_dir, tmp_path / "gloo", *extra, "--backend", "gloo")
    succeed(run(*script("train_ddp.py", *words)))
    assert summary(tmp_path / "gloo")["world_size"] == 2


# Two GPUs


def train(
    technique: str, model: str, data_dir: Path, folder: Path, *extra: Any, dtype: str = "float64"
) -> dict[str, torch.Tensor]:
    """Train 20 steps without what would enlarge a rounding, and return the weights."""
    devices = 1 if technique == "single" else 2
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [
        *(launcher if technique == "ddp" else [sys.executable]),
        *(ROOT / "tests" / "instrumented.py", f"train_{technique}.py", *PLAIN, "--no-augment"),
        *("--no-tensorboard", "--no-progress", "--threads", 1, "--max-steps", 20),
        *("--model", model, "--batch-size", GLOBAL_BATCH // devices, *extra),
        *flags(data_dir, folder),
    ]
    succeed(run(*command, timeout=200, TEST_DTYPE=dtype))
    path = folder / "checkpoints" / "last.pt"
    return torch.load(path, weights_only=True, map_location="cpu")["model"]


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
def test_dp_and_ddp_end_in_the_weights_of_one_gpu(
    dtype: str, tolerance: float, synthetic_dir: Path, tmp_path: Path
) -> None:
    """The real nn.DataParallel, gathering on either GPU, and DDP over NCCL."""
    single = train("single", "mlp", synthetic_dir, tmp_path / "0", "--devices", 0, dtype=dtype)
    for i, (technique, extra) in enumerate(
        [("dp", ["--output-device", 0]), ("dp", ["--output-device", 1]), ("ddp", [])], start=1
    ):
        folder = tmp_path / str(i)
        two = train(technique, "mlp", synthetic_dir, folder, "--devices=0,1", *extra, dtype=dtype)
        assert distance(single, two) <= tolerance, (technique, extra)
        facts = summary(folder)
        assert (facts["device"], facts["num_devices"]) == ("cuda", 2)
        assert facts["backend"] == ("nccl" if technique == "ddp" else None)


@pytest.mark.gpu(2)
def test_sync_bn_normalises_over_the_batch_of_both(synthetic_dir: Path, tmp_path: Path) -> None:
    """Running statistics included, which are in the state."""
    single = train("single", "convnet", synthetic_dir, tmp_path / "0", "--devices", 0)
    synced = train("ddp", "convnet", synthetic_dir, tmp_path / "1", "--devices=0,1", "--sync-bn")
    assert distance(single, synced) < 1e-9
    plain = train("ddp", "convnet", synthetic_dir, tmp_path / "2", "--devices=0,1")
    assert distance(single, plain) > 1e-4


@pytest.mark.gpu(2)
@pytest.mark.parametrize("first", TECHNIQUES)
@pytest.mark.parametrize("second", TECHNIQUES)
def test_any_script_resumes_any_other_on_gpus(
    first: str, second: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    for i, technique in enumerate((first, second), start=1):
        extra = ["--model", "mlp", "--max-steps", 10 * i, *(["--resume"] if i == 2 else [])]
        extra += ["--devices", "0"] if technique == "single" else ["--devices", "0,1"]
        extra += ["--nprocs", 2] if technique == "ddp" else []
        words = flags(synthetic_dir, tmp_path / "run", *extra)
        succeed(run(*script(f"train_{technique}.py", *words), timeout=120))
    facts = summary(tmp_path / "run")
    assert (facts["technique"], facts["global_step"], facts["resumed_from"]) == (second, 20, 10)
    assert facts["test_count"] == 10_000


@pytest.mark.gpu(2)
def test_a_killed_rank_is_named_over_nccl(synthetic_dir: Path, tmp_path: Path) -> None:
    extra = ["--model", "mlp", "--max-steps", 4000, "--save-every-steps", 2, "--timeout", 20]
    words = flags(synthetic_dir, tmp_path / "run", *extra, "--devices", "0,1", "--nprocs", 2)
    command = [sys.executable, ROOT / "tests" / "faulty.py", *words, "--threads", 1]
    ended = run(*command, timeout=120, FAULT="kill", FAULT_RANK="1", FAULT_STEP="7")
    assert ended.returncode == 1, ended.text
    assert "rank 1 (pid " in ended.stderr
    assert "was killed by SIGKILL" in ended.stderr
    assert "lost rank 0" not in ended.stderr
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] != "complete"
