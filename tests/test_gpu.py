"""What only GPUs show, and the script that has it run where there are some.

Tests marked ``gpu`` see the GPUs that the user lets them see; no other test does. Those marked
``nccl`` are worth a second run with NCCL's other class (TORCH_DIST_USE_NCCL2=1).
"""

import re
import shutil
import sys

import pytest
import torch

from tests import minimal
from tests.layouts import distance, state, train
from tests.processes import (
    PRETENDED,
    ROOT,
    STANDALONE,
    Training,
    error_line,
    run,
    succeed,
    summary,
)

SHORT = ["--model", "mlp", "--max-steps", 30, "--batch-size", 48, "--warmup-epochs", 0]
DDP = pytest.param("ddp", "fp16", marks=pytest.mark.nccl)
LESSONS = sorted((ROOT / "scripts" / "lessons").glob("[a-z]*.py"))


@pytest.fixture
def training(synthetic_dir, tmp_path):
    return Training(synthetic_dir, tmp_path / "run")


# The script, on any machine


# A Python that has torch and the modules that are not in $LACKS. It runs nothing: pytest fails.
FAKE_PYTHON = """case "$*" in
    -c*find_spec*) for name in $LACKS; do case " $* " in *" $name "*) echo "$name" ;; esac; done ;;
    -c*device_count*) echo "${GPUS:-2}" ;;
    -\\ *) [ -z "$LACKS" ] && exit || exit 1 ;;
    *pytest*) exit 1 ;;
esac
case "$*" in -*) ;; *) echo "ran $*" ;; esac"""


@pytest.fixture
def check(tmp_path):
    """Return what runs a copy of the script among programs that only say what they were asked."""
    for folder in ("scripts", "tests", "bin"):
        (tmp_path / folder).mkdir()
    for name in ("gpu_check.sh", "quickstart.sh", "environment.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "tests" / "test_one.py").write_text("@pytest.mark.gpu")
    for name, text in ("nvidia-smi", "echo GPU 0: Fake"), ("python3", FAKE_PYTHON):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    words, path = [tmp_path / "scripts" / "gpu_check.sh"], f"{tmp_path}/bin:/usr/bin:/bin"
    return lambda *more, **variables: run(*words, *more, cwd=tmp_path, PATH=path, **variables)


def read_report(folder):
    """Return the report and, by the name of each part that is not complete, its state."""
    (path,) = folder.glob("runs/gpu-check-*/report.md")
    text = path.read_text()
    rows = re.findall(r"^- (\w+): (.*) \(\d+ s\)$", text, re.MULTILINE)
    return text, {name: state for name, state in rows if state != "complete"}


def test_without_a_gpu_there_is_nothing_to_check(check):
    assert "torch can use no GPU" in error_line(check(GPUS="0"))


def test_the_report_has_all_parts_although_some_failed(check, tmp_path):
    ended = check("--data-dir", "my data")
    assert ended.returncode == 1, ended.text
    text, other = read_report(tmp_path)
    assert [*other] == ["tests", "nccl"]
    for line in check("--list").stdout.splitlines():
        assert f"\n## {line.split()[0].title()}\n" in text
    assert "scripts/tools/doctor.py --dataset mnist --data-dir my data" in text
    assert re.search(r"env TORCH_DIST_USE_NCCL2=1 \S*python3 -m pytest .*-m nccl", text)


def test_what_a_machine_lacks_is_skipped_and_told(check, tmp_path):
    succeed(check(LACKS="psutil torchvision", GPUS="1"))
    _, skipped = read_report(tmp_path)
    assert [*skipped] == ["overlap", "quickstart", "tests", "nccl"]
    assert "skipped: it takes two GPUs" in skipped["overlap"]
    assert "skipped: the tests need psutil" in skipped["tests"]


# One GPU


@pytest.mark.gpu
@pytest.mark.parametrize(("technique", "amp"), [("single", "bf16"), ("gpus", "fp16"), DDP])
def test_a_script_trains_on_a_gpu(technique, amp, training):
    """It goes on with what a CPU has begun."""
    succeed(training.run("single", *SHORT, "--device", "cpu", "--max-steps", 10))
    flags = [*SHORT, "--devices", 0, "--amp", amp, "--resume"]
    succeed(training.run(technique, *flags, processes=1))
    facts, saved = training.summary, state(training.folder)
    assert (facts["device"], facts["num_devices"]) == ("cuda", 1)
    assert facts["backend"] == ("nccl" if technique == "ddp" else None)
    assert facts["resumed_from"] == 10
    assert facts["test_accuracy"] > 0.5
    assert ("scale" in saved["scaler"]) == (amp == "fp16")
    assert all(tensor.dtype == torch.float32 for tensor in saved["model"].values())


@pytest.mark.gpu
@pytest.mark.skipif(PRETENDED or not shutil.which("cc"), reason="needs a GPU and a C compiler")
@pytest.mark.nccl
def test_a_compiled_model_trains_on_a_gpu(training):
    succeed(training.run("ddp", *SHORT, "--devices", 0, "--compile", processes=1, timeout=280))
    assert training.summary["test_accuracy"] > 0.5


@pytest.mark.gpu
def test_data_on_the_device_trains_the_same_and_takes_its_memory(synthetic_dir, tmp_path):
    """``peak_memory_bytes`` is the GPU's: it grows by what the data takes there."""
    found = []
    for name, extra in (("off", ["--no-data-on-device"]), ("on", [])):
        training = Training(synthetic_dir, tmp_path / name)
        succeed(training.run("single", *SHORT, "--devices", 0, *extra))
        found.append(training.summary)
    images, memory = 60_000 * 28 * 28, [facts["peak_memory_bytes"][0] for facts in found]
    assert 0 < memory[0] < images * 40, "2 GB: is that the process's?"
    assert memory[1] - memory[0] > images // 2
    assert found[1]["test_accuracy"] == pytest.approx(found[0]["test_accuracy"], abs=0.02)


def train_20(technique, devices, model, folder, data_dir, *extra):
    """Train 20 steps without what would enlarge a rounding, and return the weights."""
    return train((technique, devices, 1), model, folder, data_dir, "--max-steps", 20, *extra)[0]


@pytest.mark.gpu
def test_a_gpu_computes_what_a_cpu_does(synthetic_dir, tmp_path):
    """In float64, in which no prediction hangs on a rounding."""
    kinds = ("cpu", "cuda")
    weights = [
        train_20("single", 1, "mlp", tmp_path / kind, synthetic_dir, "--device", kind)
        for kind in kinds
    ]
    assert distance(*weights) < 1e-9
    assert len({summary(tmp_path / kind)["test_correct"] for kind in kinds}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", [p.name for p in LESSONS if "cuda" in p.read_text()])
def test_a_lesson_that_names_cuda_shows_the_same_on_a_gpu(name):
    ended = run(sys.executable, ROOT / "scripts" / "lessons" / name, timeout=150)
    assert "NOT SHOWN" not in succeed(ended).stdout


@pytest.mark.gpu
@pytest.mark.nccl
def test_two_ranks_share_a_gpu_over_gloo_alone(training):
    refused = training.run("spawn", *SHORT, "--devices", 0)
    assert refused.returncode in (1, 2), refused.text
    assert "same GPU" in refused.stderr
    succeed(training.run("spawn", *SHORT, "--devices", 0, "--backend", "gloo"))
    assert training.summary["world_size"] == 2


# Two GPUs


@pytest.mark.gpu(2)
def test_dp_and_ddp_end_in_the_weights_of_one_gpu(synthetic_dir, tmp_path):
    """The real nn.DataParallel, gathering on either GPU, and DDP over NCCL."""
    single = train_20("single", 1, "mlp", tmp_path / "0", synthetic_dir, "--devices=0")
    for i, (technique, extra) in enumerate(
        [("gpus", ["--output-device", 0]), ("gpus", ["--output-device", 1]), ("ddp", [])], start=1
    ):
        folder, both = tmp_path / str(i), ["--devices=0,1", *extra]
        two = train_20(technique, 2, "mlp", folder, synthetic_dir, *both)
        assert distance(single, two) <= 1e-12, (technique, extra)
        facts = summary(folder)
        assert (facts["device"], facts["num_devices"]) == ("cuda", 2)
        assert facts["backend"] == ("nccl" if technique == "ddp" else None)


@pytest.mark.gpu(2)
@pytest.mark.nccl
def test_sync_bn_normalises_over_the_batch_of_both(synthetic_dir, tmp_path):
    """Running statistics included, which are in the state."""
    arguments = ("convnet", tmp_path / "0", synthetic_dir, "--devices=0")
    single = train_20("single", 1, *arguments)
    both = [("convnet", tmp_path / name, synthetic_dir, "--devices=0,1") for name in "12"]
    assert distance(single, train_20("ddp", 2, *both[0], "--sync-bn")) < 1e-9
    assert distance(single, train_20("ddp", 2, *both[1])) > 1e-4


@pytest.mark.gpu(2)
def test_replicas_compute_in_the_dtype_that_was_asked_for(synthetic_dir, tmp_path):
    """PyTorch's threads forget it, and take float16."""
    extra = ["--devices=0,1", "--amp", "bf16", "--max-steps", 2]
    train(("gpus", 2, 1), "mlp", tmp_path / "run", synthetic_dir, *extra, dtype="float32")


# DDP itself waits for the device in its first ten steps, SyncBN in every step, and the run at every
# 50th, when it looks at the loss. Nothing can interrupt that wait, but who is killed is noticed
# long before --timeout. An evaluation ends with a sum over the ranks.
@pytest.mark.gpu(2)
@pytest.mark.nccl
@pytest.mark.parametrize(
    ("fault", "step", "extra"),
    [
        ("SIGSTOP", 7, []),
        ("SIGKILL", 60, ["--sync-bn", "--model", "convnet", "--timeout", 300]),
        ("SIGKILL", "evaluate", ["--max-steps", 60]),
    ],
)
def test_a_lost_rank_is_named_over_nccl(fault, step, extra, training):
    common = ["--model", "mlp", "--max-steps", 4000, "--save-every-steps", 2, "--timeout", 20]
    how = {"ALTER": fault, "ALTER_RANK": "1", "ALTER_AT": str(step)}
    ended = training.run("spawn", *common, "--devices", "0,1", *extra, timeout=150, **how)
    assert ended.returncode == 1, ended.text
    assert "rank 0 lost rank 1 (" in ended.stderr
    assert training.is_saved()
    assert (training.status["state"], training.status["ranks"]) == ("failed", [1])


@pytest.mark.gpu(2)
@pytest.mark.skipif(not PRETENDED, reason="needs pretended GPUs, which count")
@pytest.mark.parametrize(("technique", "ranks"), [("single", "0"), ("gpus", "01"), ("ddp", "01")])
def test_a_step_never_waits_for_a_gpu(technique, ranks, training):
    """Between two looks at the loss. A rank opens its own GPU alone, DataParallel opens both."""
    extra = [*SHORT, "--max-steps", 45, "--devices", ",".join(ranks)]
    ended = succeed(training.run(technique, *extra, ALTER="watched", ALTER_AT="20:45"))
    told = re.findall(r"rank (\d) waited (\d+) times, on GPUs (\[.*\])", ended.stdout)
    alone = [(rank, "0", f"[{rank}]") for rank in (ranks if technique == "ddp" else "0")]
    assert sorted(told) == ([("0", "0", "[0, 1]")] if technique == "gpus" else alone), ended.text


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["minimal/ddp.py", "minimal/ddp_complete.py", "tools/scaling.py"])
def test_two_processes_on_one_gpu_are_told_how_to_use_the_cpu(name, tmp_path):
    command = [*STANDALONE, 2, ROOT / "scripts" / name]
    ended = run(*command, cwd=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert ended.returncode == 1, "of torchrun"
    told = [line for line in ended.stderr.splitlines() if "CUDA_VISIBLE_DEVICES= torchrun" in line]
    assert told
    assert "NCCL" not in ended.text


# All else that trains or measures


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", minimal.SCRIPTS)
def test_a_minimal_script_takes_the_gpus(name, short_dir, tmp_path):
    ended = minimal.train(name, 2, tmp_path, "--data-dir", short_dir, "--epochs", 2)
    assert minimal.result(ended)[1] > 50
    assert b"cuda:0" in (tmp_path / "model.pt").read_bytes()


# One step of DDP with four buckets, after the choice of a script, or with what torch chooses. The
# pretended GPUs print each wait of a stream, and each call of NCCL.
OVERLAP = """
import ctypes, os, runpy, sys
os.environ.pop("TORCH_DIST_USE_NCCL2", None)
if sys.argv[1] != "torch":
    sys.path.insert(0, os.path.dirname(sys.argv[1]))
    runpy.run_path(sys.argv[1], run_name="imported")
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
layers = [torch.nn.Linear(600, 600) for _ in range(8)]
model = torch.nn.Sequential(*layers).to(device)
model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)
library = ctypes.CDLL(None)
for step in range(3):  # the buckets are made after the first one
    if (rank, step) == (0, 2):
        library.setenv(b"PRETEND_WAITS", b"1", 1)
    model(torch.ones(4, 600, device=device)).sum().backward()
library.unsetenv(b"PRETEND_WAITS")
torch.cuda.synchronize()
dist.destroy_process_group()
"""


@pytest.mark.gpu(2)
@pytest.mark.skipif(not PRETENDED, reason="needs pretended GPUs, which print waits")
@pytest.mark.parametrize(
    ("chosen_by", "waits"),
    [("train_ddp.py", False), ("scripts/minimal/ddp.py", False), ("torch", True)],
)
def test_gradients_travel_while_the_backward_computes(chosen_by, waits, tmp_path):
    """Where "torch" has no wait any more, PyTorch has cured it: the scripts' line can go."""
    (tmp_path / "overlap.py").write_text(OVERLAP)
    where = chosen_by if chosen_by == "torch" else ROOT / chosen_by
    ended = succeed(run(*STANDALONE, 2, tmp_path / "overlap.py", where, real=True, timeout=120))
    told = re.findall(r"^(NCCL|WAIT stream \(nil\))", ended.stderr, re.MULTILINE)
    sends = [index for index, line in enumerate(told) if line == "NCCL"]
    assert len(sends) == 4, ended.stderr
    # One for each bucket but the last. Another thread asks for them, so one may come late.
    assert ("WAIT stream (nil)" in told[sends[0] : sends[-1]]) == waits
    assert told[sends[-1] :].count("WAIT stream (nil)") >= 4, "before the optimizer's step"
