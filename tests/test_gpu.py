"""What only GPUs show. On a machine without them these tests are skipped."""

import os
import re

import pytest
import torch

from tests.processes import Training, distance, recorded, run, said_by_ranks, torchrun

# A step of the fused SGD in float64, so that no rounding shows.
EXACT = ["--model", "tests.user_code:double_network", "--no-augment", "--lr", 0.1, "--momentum", 0]
EXACT += ["--max-steps", 20, "--no-tensorboard", "--max-grad-norm", 0.5, "--batch-size"]
SHORT = ["--model", "convnet", "--max-steps", 12, "--warmup-epochs", 0, "--no-tensorboard"]
LEGACY = ["--backend", "cpu:gloo,cuda:nccl-legacy"]
IS_PRETENDED = "libpretend" in os.environ.get("LD_PRELOAD", "")

pytestmark = pytest.mark.gpu(2)


def test_every_technique_computes_what_a_cpu_does(digits_dir, tmp_path):
    """DP on two GPUs, and DDP with both classes that PyTorch has for NCCL."""
    weights = {}
    for name, technique, flags in (
        ("cpu", "single", [48, "--device", "cpu"]),
        ("gpu", "single", [48, "--devices", 1]),
        ("dp", "dp", [24]),
        ("dp reversed", "dp", [24, "--devices", "1,0"]),
        ("ddp", "ddp", [12, "--grad-accum-steps", 2]),
        ("ddp legacy", "ddp", [24, *LEGACY]),
    ):
        training = Training(digits_dir, tmp_path / name)
        training.succeed(technique, *EXACT, *flags)
        weights[name], facts = training.checkpoint["model"], training.summary
        assert facts["device"] == ("cpu" if name == "cpu" else "cuda")
        assert facts["num_devices"] == (2 if technique != "single" else 1)
        assert facts["global_batch_size"] == 48
        assert distance(weights["cpu"], weights[name]) < 1e-10, name


@pytest.mark.parametrize("backend", [[], LEGACY], ids=["default", "legacy"])
def test_sync_bn_normalises_over_the_batch_of_both(backend, digits_dir, tmp_path):
    """The running statistics included, which are in the state."""
    states = []
    for name, technique, flags in (
        ("single", "single", ["--batch-size", 48, "--devices", 0]),
        ("sync", "ddp", ["--batch-size", 24, "--sync-bn", *backend]),
        ("own", "ddp", ["--batch-size", 24, *backend]),
    ):
        training = Training(digits_dir, tmp_path / name)
        flags += ["--model", "tests.user_code:double_convnet", "--max-steps", 3, "--no-augment"]
        training.succeed(technique, *SHORT, *flags, "--lr", 0.01, "--momentum", 0)
        states.append(training.checkpoint["model"])
    single, sync, own = states
    assert distance(single, sync) < 1e-9 < 1e-4 < distance(single, own)


def seen_by_both(technique, folder):
    """Return what was recorded. The replicas of DP write into the same file."""
    return [x for rank in range(2 if technique == "ddp" else 1) for x in recorded(folder, rank)]


@pytest.mark.parametrize("technique", ["dp", "ddp"])
@pytest.mark.parametrize(("amp", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_mixed_precision_with_clipping(technique, amp, dtype, training):
    """The gradient has the length that clipping leaves, although fp16 scales it by 65,536."""
    flags = ["--model", "tests.user_code:linear_network", "--amp", amp, "--max-steps", 1]
    flags += ["--max-grad-norm", 0.01, "--lr-scaling", "none", "--weight-decay", 0]
    folder = training.folder.parent
    training.succeed(technique, *SHORT, *flags, RECORD=str(folder))
    torch.manual_seed(0)
    before, after = torch.nn.Linear(784, 10).state_dict(), training.checkpoint["model"]
    moved = [after[f"inner.1.{name}"] - before[name] for name in before]
    length = torch.cat([part.flatten() for part in moved]).norm()
    assert float(length) == pytest.approx(0.1 * 1.9 * 0.01, rel=0.05)
    assert [seen["dtype"] for seen in seen_by_both(technique, folder)] == [f"torch.{dtype}"] * 2
    assert ("scale" in training.checkpoint["scaler"]) == (amp == "fp16")


@pytest.mark.parametrize("technique", ["dp", "ddp"])
def test_two_gpus_draw_different_dropout(technique, training):
    folder = training.folder.parent
    flags = ["--model", "tests.user_code:dropout_network", "--max-steps", 2]
    training.succeed(technique, *SHORT, *flags, "--grad-accum-steps", 2, RECORD=str(folder))
    # Pretended GPUs draw from the CPU's generator, so the masks alone would not show equal seeds.
    for name in ("mask", "seed"):
        found = [seen[name] for seen in seen_by_both(technique, folder)]
        assert len(found) == len({*found}) == 8, name


def test_the_gpus_that_a_user_chooses(training):
    """A GPU that is not there is one line, and so is a second rank on one GPU."""
    training.succeed("single", *SHORT, CUDA_VISIBLE_DEVICES="1")
    assert training.summary["num_devices"] == 1
    ended = training.run("dp", *SHORT, "--devices", "0,5")
    assert ended.status == 2
    assert said_by_ranks(ended) == [
        "train_dp.py: error: --devices 5: there are 2 GPUs to use, numbered from 0"
    ]
    training.folder = training.folder.with_name("other")
    ended = training.run("ddp", *SHORT, CUDA_VISIBLE_DEVICES="1")
    assert ended.status == 1
    assert any("start as many processes as there are GPUs" in x for x in said_by_ranks(ended))
    training.folder = training.folder.with_name("over gloo")
    training.succeed("ddp", *SHORT, "--backend", "gloo", CUDA_VISIBLE_DEVICES="1")


@pytest.mark.parametrize("backend", [[], LEGACY], ids=["default", "legacy"])
def test_a_rank_that_is_killed_ends_the_job(backend, training):
    flags = ["--model", "tests.user_code:network", "--epochs", 99, "--save-every-steps", 2]
    flags += ["--no-tensorboard", "--timeout", 20, *backend]
    ended = training.run("ddp", *flags, FAULT="1:8:SIGKILL", timeout=150)
    assert ended.status == 1
    assert "(exitcode: -9) local_rank: 1" in ended.stderr
    # On pretended GPUs nothing waits for the lost rank's share of step 8.
    assert training.checkpoint["position"]["step"] in ((6, 8) if IS_PRETENDED else (6,))
    training.succeed("ddp", *flags, "--epochs", 1, "--max-steps", 9, "--resume")


# One step of DDP with four buckets. The pretended GPUs print each wait of the compute stream, and
# each call of NCCL.
OVERLAP = """
import ctypes, os, sys, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group(sys.argv[1], device_id=device)
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
os._exit(0)  # gloo's threads abort one plain end in a hundred (pytorch/pytorch#179291)
"""


@pytest.mark.skipif(not IS_PRETENDED, reason="needs pretended GPUs, which print waits")
@pytest.mark.parametrize(("backend", "waits"), [("nccl", True), ("nccl-legacy", False)])
def test_gradients_travel_while_the_backward_computes(backend, waits, tmp_path):
    """With the default class of torch 2.15, the compute stream waits for each bucket."""
    (tmp_path / "overlap.py").write_text(OVERLAP)
    ended = run(*torchrun(2, tmp_path / "overlap.py", backend))
    assert ended.status == 0, ended.text
    told = re.findall(r"^(NCCL|WAIT stream \(nil\))", ended.stderr, re.MULTILINE)
    sends = [index for index, line in enumerate(told) if line == "NCCL"]
    assert len(sends) == 4, ended.stderr
    assert ("WAIT stream (nil)" in told[sends[0] : sends[-1]]) == waits
    assert "WAIT stream (nil)" in told[sends[-1] :], "before the optimizer's step"
