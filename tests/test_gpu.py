"""What only GPUs show. Without them, ``make gpu-tests`` runs these tests on pretended ones."""

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.processes import (
    ROOT,
    distance,
    finish,
    free_port,
    recorded,
    run,
    said_by_ranks,
    start,
    succeed,
    torchrun,
    wait_until,
)

DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"
SHORT = ["--no-tensorboard", "--warmup-epochs", 0, "--max-steps"]
# These networks compute in float64, so that no rounding shows.
MLP = [*SHORT, 20, "--no-augment", "--max-grad-norm", 0.5]
MLP += ["--model", "tests.user_code:double_network", "--batch-size"]
CONVNET = [*SHORT, 3, "--no-augment"]
CONVNET += ["--model", "tests.user_code:double_convnet", "--batch-size"]
BOTH_CLASSES = pytest.mark.parametrize("backend", ["nccl", "nccl-legacy"])
IS_PRETENDED = "PRETEND_GPUS" in os.environ
ONLY_PRETENDED = pytest.mark.skipif(
    not IS_PRETENDED, reason="needs pretended GPUs, which write down what they are asked for"
)

pytestmark = pytest.mark.gpu(2)


@pytest.mark.parametrize(
    ("technique", "flags", "environment"),
    [
        pytest.param("single", [48], {"CUDA_VISIBLE_DEVICES": "1"}, id="the second GPU"),
        pytest.param("dp", [24], {}, id="dp"),
        pytest.param("dp", [24, "--devices", "1,0"], {}, id="dp from GPU 1"),
        pytest.param("ddp", [12, "--grad-accum-steps", 2], {}, id="ddp with accumulation"),
    ],
)
def test_each_technique_computes_on_gpus_what_a_cpu_does(
    technique, flags, environment, train, training
):
    """And it reports how much memory each GPU needed."""
    on_cpu = train("cpu", *MLP, 48, "--device", "cpu").checkpoint["model"]
    training.succeed(technique, *MLP, *flags, **environment)
    facts = training.summary
    assert facts["device"] == "cuda"
    assert facts["num_devices"] == (1 if technique == "single" else 2)
    assert facts["global_batch_size"] == 48
    assert len(facts["peak_memory_mb"]) == (2 if technique == "dp" else 1)
    assert min(facts["peak_memory_mb"]) > 0
    assert distance(on_cpu, training.checkpoint["model"]) < 1e-9


@BOTH_CLASSES
def test_sync_bn_normalises_over_the_batch_of_both_ranks(backend, train, training):
    """The running statistics are compared, too."""
    on_cpu = train("cpu", *CONVNET, 48, "--device", "cpu").checkpoint["model"]
    training.succeed("ddp", *CONVNET, 24, "--sync-bn", "--backend", backend)
    assert distance(on_cpu, training.checkpoint["model"]) < 1e-9


def test_without_sync_bn_each_rank_normalises_its_own_batch(train, training):
    on_cpu = train("cpu", *CONVNET, 48, "--device", "cpu").checkpoint["model"]
    training.succeed("ddp", *CONVNET, 24)
    assert distance(on_cpu, training.checkpoint["model"]) > 1e-4


def seen_by_both(technique, folder):
    """Return what was recorded. The replicas of DP write into the same file."""
    return [x for rank in range(2 if technique == "ddp" else 1) for x in recorded(folder, rank)]


@pytest.mark.parametrize(
    ("technique", "amp", "dtype"), [("dp", "bf16", "bfloat16"), ("ddp", "fp16", "float16")]
)
def test_mixed_precision_reaches_both_gpus_and_clips_the_true_gradient(
    technique, amp, dtype, training
):
    """The gradient has the length that clipping leaves, although fp16 scales it by 65,536."""
    flags = ["--model", "tests.user_code:linear_network", "--amp", amp, "--batch-size", 48]
    folder = training.folder.parent
    training.succeed(technique, *flags, *SHORT, 1, "--max-grad-norm", 0.01, RECORD=str(folder))
    torch.manual_seed(0)
    before = torch.nn.Linear(784, 10).state_dict()
    after = training.checkpoint["model"]
    moved = [after[f"inner.1.{name}"] - before[name] for name in before]
    length = torch.cat([part.flatten() for part in moved]).norm()
    # The rate is 0.1, and Nesterov's first step 1.9 times as long as the gradient.
    assert float(length) == pytest.approx(0.1 * 1.9 * 0.01, rel=0.05)
    assert [seen["dtype"] for seen in seen_by_both(technique, folder)] == [f"torch.{dtype}"] * 2
    assert ("scale" in training.checkpoint["scaler"]) == (amp == "fp16")


@pytest.mark.parametrize("technique", ["dp", "ddp"])
def test_two_gpus_draw_different_dropout(technique, training):
    folder = training.folder.parent
    flags = ["--model", "tests.user_code:dropout_network", "--grad-accum-steps", 2]
    training.succeed(technique, *flags, *SHORT, 2, RECORD=str(folder))
    # Pretended GPUs draw from the CPU's generator, so the masks alone would not show equal seeds.
    for name in ("mask", "seed"):
        found = [seen[name] for seen in seen_by_both(technique, folder)]
        assert len(found) == len({*found}) == 8, name


def test_a_gpu_that_is_not_there_is_one_line(training):
    """So is a second rank on one GPU. Over gloo, two ranks can share one."""
    ended = training.run("dp", *SHORT, 2, "--devices", "0,5")
    assert ended.status == 2
    (line,) = said_by_ranks(ended)
    assert "--devices 5: there are 2 GPUs" in line
    ended = training.run("ddp", *SHORT, 2, CUDA_VISIBLE_DEVICES="1")
    assert ended.status == 1
    assert any("start as many processes as there are GPUs" in x for x in said_by_ranks(ended))
    training.folder = training.folder.with_name("over gloo")
    flags = ["--model", "mlp", "--backend", "gloo"]
    training.succeed("ddp", *flags, *SHORT, 2, CUDA_VISIBLE_DEVICES="1")


def names_of_threads(process):
    files = Path(f"/proc/{process.pid}/task").glob("*/comm")
    return [file.read_text().strip() for file in files]


@BOTH_CLASSES
def test_a_stopped_run_resumes_and_nccl_alone_connects_its_ranks(backend, training):
    """gloo beside NCCL would need an address of its own, and often finds a wrong one."""
    flags = ["--model", "mlp", "--no-tensorboard", "--save-every-steps", 5, "--backend", backend]
    process = training.start("ddp", *flags, "--epochs", 9999)
    wait_until((training.folder / "checkpoints" / "last.pt").exists, process)
    ranks = psutil.Process(process.pid).children()
    threads = [name for rank in ranks for name in names_of_threads(rank)]
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert len(ranks) == 2
    assert not [name for name in threads if "gloo" in name]
    step = training.checkpoint["position"]["step"]
    assert "stopped and saved" in ended.stdout, ended.text
    flags += ["--epochs", 9999, "--max-steps", step + 3]
    training.succeed("ddp", *flags, "--resume")
    assert training.summary["resumed_from"] == step
    assert training.summary["global_step"] == step + 3


@BOTH_CLASSES
def test_a_rank_that_is_killed_ends_the_job(backend, training):
    flags = ["--model", "tests.user_code:network", "--epochs", 99, "--save-every-steps", 2]
    flags += ["--no-tensorboard", "--timeout", 20, "--backend", backend]
    ended = training.run("ddp", *flags, FAULT="1:8:SIGKILL", timeout=150)
    assert ended.status == 1
    assert "(exitcode: -9) local_rank: 1" in ended.stderr
    # On pretended GPUs nothing waits for the lost rank's share of step 8.
    assert training.checkpoint["position"]["step"] in ((6, 8) if IS_PRETENDED else (6,))


@ONLY_PRETENDED
def test_a_step_waits_for_its_gpu_only_to_report_and_to_vote(training, tmp_path):
    """Else the GPU would wait for Python. And no rank uses memory of another rank's GPU."""
    steps = 120
    flags = ["--model", "linear", "--batch-size", 16, "--epochs", 2, "--log-every", 60]
    trace = tmp_path / "trace"
    training.succeed("ddp", *flags, *SHORT, steps, timeout=200, PRETEND_TRACE=str(trace))
    lines = trace.read_text().splitlines()
    for rank in (0, 1):
        told = [line.partition(" ")[2] for line in lines if line.startswith(f"{rank} ")]
        assert {line for line in told if line.startswith("context")} == {f"context {rank}"}
        assert told.count("copy pinned to gpu") >= steps
        assert told.count("wait for a stream") < steps
        assert told.count("copy pageable to gpu") < steps


def test_the_doctor_measures_two_gpus_over_nccl():
    lines = succeed(*torchrun(2, DOCTOR, "--pairs")).stdout.splitlines()
    assert lines[-3].startswith("nccl all-reduce 268,435,456 B")
    assert " and rank 1 on " in lines[-2]
    assert lines[-1] == "OK"


def test_the_doctor_says_that_a_rank_does_not_answer_over_nccl():
    """NCCL's watchdog would abort it without a word."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, DOCTOR, "--timeout", 10]
    first, second = (start(*command, RANK=rank, LOCAL_RANK=rank, **job) for rank in "01")
    while "all-reduce" not in first.stdout.readline():
        assert first.poll() is None, finish(first).text
    second.send_signal(signal.SIGSTOP)
    ended = finish(first)
    second.kill()
    second.wait()
    assert ended.status == 1, ended.text
    assert "a rank does not answer: is there a firewall?" in ended.stderr


# A few steps of DDP with four buckets.
FOUR_BUCKETS = """
import os, sys, torch, torch.distributed as dist
device = torch.device("cuda", int(os.environ["RANK"]))
torch.cuda.set_device(device)
dist.init_process_group(sys.argv[1], device_id=device)
layers = [torch.nn.Linear(600, 600) for _ in range(8)]
model = torch.nn.Sequential(*layers).to(device)
model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)
for step in range(6):  # the buckets are made after the first one
    model(torch.ones(4, 600, device=device)).sum().backward()
    torch.cuda.synchronize()
os._exit(0)  # the thread of the backward still frees its graph: Python's shutdown would abort it
"""


@ONLY_PRETENDED
@pytest.mark.parametrize(("backend", "waits"), [("nccl", True), ("nccl-legacy", False)])
def test_gradients_travel_while_the_backward_computes(backend, waits, tmp_path):
    """With the default class of torch 2.15, the compute stream waits for each bucket.

    It leaves the wait out where the collective has ended already, so one step is not enough.
    """
    (tmp_path / "script.py").write_text(FOUR_BUCKETS)
    trace = tmp_path / "trace"
    command = torchrun(2, tmp_path / "script.py", backend)
    ended = run(*command, timeout=200, PRETEND_TRACE=str(trace))
    assert ended.status == 0, ended.text
    of_rank_0 = "\n".join(re.findall("^0 .*", trace.read_text(), re.M))
    steps = of_rank_0.split("wait for the GPU")
    between = [x.partition("nccl all_reduce")[2].rpartition("nccl all_reduce")[0] for x in steps]
    behind = [x.rpartition("nccl all_reduce")[2] for x in steps if "nccl all_reduce" in x]
    assert any("the compute stream waits" in text for text in between) == waits
    assert any("the compute stream waits" in text for text in behind), "before the optimizer's step"
