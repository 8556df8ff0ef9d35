"""What only GPUs show, and the script that has it run where there are some.

Tests marked ``gpu`` see the GPUs that the user lets them see; no other test does.
"""

import shutil
import sys

import pytest
import torch

from tests.processes import (
    ROOT,
    command,
    error_line,
    flags,
    run,
    script,
    status,
    succeed,
    summary,
    through,
)
from tests.test_training import distance, state, train

SHORT = ["--model", "mlp", "--max-steps", 30, "--batch-size", 48, "--warmup-epochs", 0]
TECHNIQUES = ("single", "dp", "ddp")


# The script, on any machine


@pytest.fixture
def fakes(tmp_path):
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


def check(fakes, *arguments):
    words = [fakes / "scripts" / "gpu_check.sh", *arguments]
    return run(*words, cwd=fakes, PATH=f"{fakes}/bin:/usr/bin:/bin")


def test_without_a_gpu_there_is_nothing_to_check(fakes):
    (fakes / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    assert "lists no GPU" in error_line(check(fakes))


def test_the_report_has_all_parts_although_one_failed(fakes):
    ended = check(fakes, "--data-dir", "my data")
    assert ended.returncode == 1, ended.text
    assert "Failed: Tests; \n" in ended.stderr
    (report,) = fakes.glob("runs/gpu-check-*/report.md")
    titles = [line for line in report.read_text().splitlines() if line.startswith("## ")]
    assert len(titles) > 5
    assert report.read_text().count("```") == 2 * len(titles)
    assert "ran train_single.py --dataset mnist --data-dir my data" in report.read_text()
    assert str(report.relative_to(fakes)) in ended.stderr


# One GPU


@pytest.mark.gpu
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("extra", [[], ["--amp", "bf16"], ["--amp", "fp16", "--max-grad-norm", 5]])
def test_a_script_trains_on_a_gpu(extra, technique, synthetic_dir, tmp_path):
    words = flags(synthetic_dir, tmp_path / "run", *SHORT, "--devices", 0, *extra)
    succeed(run(*script(f"train_{technique}.py", *words)))
    facts, saved = summary(tmp_path / "run"), state(tmp_path / "run")
    assert (facts["device"], facts["num_devices"]) == ("cuda", 1)
    assert facts["backend"] == ("nccl" if technique == "ddp" else None)
    assert facts["test_count"] == 10_000
    assert facts["test_accuracy"] > 0.5
    assert ("scale" in saved["scaler"]) == ("fp16" in extra)
    assert all(tensor.dtype == torch.float32 for tensor in saved["model"].values())


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_a_compiled_model_trains_on_a_gpu(technique, synthetic_dir, tmp_path):
    words = flags(synthetic_dir, tmp_path / "run", *SHORT, "--devices", 0, "--compile")
    succeed(run(*script(f"train_{technique}.py", *words), timeout=280))
    assert summary(tmp_path / "run")["test_accuracy"] > 0.5


@pytest.mark.gpu
def test_data_on_the_device_trains_the_same_and_takes_its_memory(synthetic_dir, tmp_path):
    """``peak_memory_bytes`` is the GPU's: it grows by what the data takes there."""
    found = []
    for name, extra in (("off", []), ("on", ["--data-on-device"])):
        words = flags(synthetic_dir, tmp_path / name, *SHORT, "--devices", 0, *extra)
        succeed(run(*script("train_single.py", *words)))
        found.append(summary(tmp_path / name))
    images, memory = 60_000 * 28 * 28, [facts["peak_memory_bytes"][0] for facts in found]
    assert 0 < memory[0] < images * 40, "2 GB: is that the process's?"
    assert memory[1] - memory[0] > images // 2
    assert found[1]["test_accuracy"] == pytest.approx(found[0]["test_accuracy"], abs=0.02)


@pytest.mark.gpu
def test_a_run_goes_from_cpu_to_gpu_and_back(synthetic_dir, tmp_path):
    for i, kind in enumerate(("cpu", "cuda", "cpu"), start=1):
        extra = ["--model", "mlp", "--device", kind, "--max-steps", 10 * i, "--amp", "fp16"]
        words = flags(synthetic_dir, tmp_path / "run", *extra, *(["--resume"] if i > 1 else []))
        succeed(run(*script("train_single.py", *words)))
        facts = summary(tmp_path / "run")
        assert (facts["device"], facts["global_step"]) == (kind, 10 * i)
        assert facts["resumed_from"] == (10 * (i - 1) or None)


def train_20(technique, devices, model, folder, data_dir, *extra, dtype="float64"):
    """Train 20 steps without what would enlarge a rounding, and return the weights."""
    extra = ["--max-steps", 20, *extra]
    return train((technique, devices, 1), model, folder, data_dir, *extra, dtype=dtype)[0]


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_does(synthetic_dir, tmp_path):
    """In float64, in which no prediction hangs on a rounding."""
    cpu, gpu = (
        train_20("single", 1, "mlp", tmp_path / kind, synthetic_dir, "--device", kind)
        for kind in ("cpu", "cuda")
    )
    assert distance(cpu, gpu) < 1e-9
    scores = [summary(tmp_path / kind)["test_correct"] for kind in ("cpu", "cuda")]
    assert scores[0] == scores[1]


@pytest.mark.gpu
def test_a_loss_that_is_not_a_number_is_never_saved(synthetic_dir, tmp_path):
    """A GPU's loss is looked at every 50 steps; a checkpoint is looked at before it is written."""
    extra = ["--model", "linear", "--max-steps", 30, "--save-every-steps", 3, "--device", "cuda"]
    words = command("single", 1, *flags(synthetic_dir, tmp_path / "run", *extra))
    assert (
        "not finite at step 6, which is not saved"
        in run(*through("dies.py", words), DIES="nan").stderr
    )
    assert state(tmp_path / "run")["progress"]["global_step"] == 3
    assert all(tensor.isfinite().all() for tensor in state(tmp_path / "run")["model"].values())


@pytest.mark.gpu
def test_two_ranks_share_a_gpu_over_gloo_alone(synthetic_dir, tmp_path):
    extra = [*SHORT, "--devices", 0, "--nprocs", 2]
    refused = run(*script("train_ddp.py", *flags(synthetic_dir, tmp_path / "nccl", *extra)))
    assert refused.returncode in (1, 2), refused.text
    assert "same GPU" in refused.stderr
    words = flags(synthetic_dir, tmp_path / "gloo", *extra, "--backend", "gloo")
    succeed(run(*script("train_ddp.py", *words)))
    assert summary(tmp_path / "gloo")["world_size"] == 2


# Two GPUs


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
def test_dp_and_ddp_end_in_the_weights_of_one_gpu(dtype, tolerance, synthetic_dir, tmp_path):
    """The real nn.DataParallel, gathering on either GPU, and DDP over NCCL."""
    single = train_20("single", 1, "mlp", tmp_path / "0", synthetic_dir, "--devices=0", dtype=dtype)
    for i, (technique, extra) in enumerate(
        [("gpus", ["--output-device", 0]), ("gpus", ["--output-device", 1]), ("ddp", [])], start=1
    ):
        folder, both = tmp_path / str(i), ["--devices=0,1", *extra]
        two = train_20(technique, 2, "mlp", folder, synthetic_dir, *both, dtype=dtype)
        assert distance(single, two) <= tolerance, (technique, extra)
        facts = summary(folder)
        assert (facts["device"], facts["num_devices"]) == ("cuda", 2)
        assert facts["backend"] == ("nccl" if technique == "ddp" else None)


@pytest.mark.gpu(2)
def test_sync_bn_normalises_over_the_batch_of_both(synthetic_dir, tmp_path):
    """Running statistics included, which are in the state."""
    arguments = ("convnet", tmp_path / "0", synthetic_dir, "--devices=0")
    single = train_20("single", 1, *arguments)
    both = [("convnet", tmp_path / name, synthetic_dir, "--devices=0,1") for name in "12"]
    assert distance(single, train_20("ddp", 2, *both[0], "--sync-bn")) < 1e-9
    assert distance(single, train_20("ddp", 2, *both[1])) > 1e-4


@pytest.mark.gpu(2)
def test_any_script_resumes_any_other_on_gpus(synthetic_dir, tmp_path):
    chain = ["single", "gpus", "spawn", "gpus", "single", "spawn", "single"]
    for i, technique in enumerate(chain):
        extra = ["--model", "mlp", "--max-steps", 10 * (i + 1), *(["--resume"] if i else [])]
        extra += ["--devices", "0" if technique == "single" else "0,1"]
        succeed(run(*command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *extra))))
        facts = summary(tmp_path / "run")
        assert (facts["global_step"], facts["resumed_from"]) == (10 * (i + 1), 10 * i or None)
        assert facts["test_count"] == 10_000


AUTOCAST = """
import torch
from torch import nn
from utils.data_parallel import keep_autocast_dtype
from utils.device import Precision
model = nn.Linear(4, 4).cuda()
parallel = nn.DataParallel(model, device_ids=[0, 1])
precision = Precision(torch.device("cuda", 0), "bf16")
for keep in (False, True):
    if keep:
        keep_autocast_dtype(model, precision)
    with precision.autocast():
        print(parallel(torch.zeros(4, 4, device="cuda")).dtype)
"""


@pytest.mark.gpu(2)
def test_replicas_compute_in_the_dtype_that_was_asked_for():
    """PyTorch's threads forget it: if this fails, a newer PyTorch needs the hook no more."""
    ended = run(sys.executable, "-c", AUTOCAST)
    assert ended.stdout.split() == ["torch.float16", "torch.bfloat16"], ended.text


@pytest.mark.gpu(2)
@pytest.mark.parametrize("fault", ["kill", "stall"])
def test_a_lost_rank_is_named_over_nccl(fault, synthetic_dir, tmp_path):
    extra = ["--model", "mlp", "--max-steps", 4000, "--save-every-steps", 2, "--timeout", 20]
    words = flags(synthetic_dir, tmp_path / "run", *extra, "--devices", "0,1", "--nprocs", 2)
    faulty = [sys.executable, ROOT / "tests" / "faulty.py", *words, "--threads", 1]
    ended = run(*faulty, timeout=150, FAULT=fault, FAULT_RANK="1", FAULT_STEP="7")
    assert ended.returncode == 1, ended.text
    assert "rank 0 lost rank 1 (" in ended.stderr
    assert (tmp_path / "run" / "checkpoints" / "last.pt").exists()
    found = status(tmp_path / "run")
    assert (found["state"], found["ranks"]) == ("failed", [1])
