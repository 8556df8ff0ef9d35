"""Data parallelism is an identity: the same global batch gives the same weights.

SGD without momentum at a small learning rate, no dropout, no augmentation: what is left is the
order in which floats are summed. With momentum and a larger learning rate that last bit grows to
whole digits within some fifty steps, so nothing is claimed there.
"""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, metrics, run

GLOBAL_BATCH = 96
PLAIN = ["--lr", 0.01, "--lr-scaling", "none", "--warmup-epochs", 0, "--momentum", 0]
# technique, devices, gradient accumulation
LAYOUTS = [("dp", 2, 1), ("dp", 3, 1), ("ddp", 2, 1), ("ddp", 3, 1), ("ddp", 4, 1)]
ACCUMULATED = [("single", 1, 2), ("ddp", 2, 2)]


def train(
    technique: str,
    devices: int,
    accumulation: int,
    model: str,
    dtype: str,
    data_dir: Path,
    to: Path,
    steps: int = 50,
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Train some steps; return the weights and the hashes that the ranks hold."""
    launcher = [sys.executable]
    if technique == "ddp":
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", devices]
    name = f"{technique}-{devices}-{accumulation}-{model}"
    command = [
        *launcher,
        ROOT / "tests" / "instrumented.py",
        f"train_{technique}.py",
        *(["--replicas", devices] if technique == "dp" else []),
        *[*PLAIN, "--no-augment", "--no-tensorboard", "--threads", 1],
        *[
            "--max-steps",
            steps,
            "--model",
            model,
            "--batch-size",
            GLOBAL_BATCH // devices // accumulation,
        ],
        *["--grad-accum-steps", accumulation],
        *["--dataset", "synthetic", "--data-dir", data_dir, "--run-dir", to / name],
    ]
    result = run(*command, timeout=120, TEST_DTYPE=dtype)
    assert result.returncode == 0, result.text
    hashes = re.findall(r"rank \d+ holds ([0-9a-f]{64})", result.stdout)
    assert len(hashes) == (devices if technique == "ddp" else 1)
    weights = torch.load(to / name / "checkpoints" / "last.pt", weights_only=True)["model"]
    return weights, set(hashes)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float64", 1e-12), ("float32", 1e-6)],
)
def test_every_layout_ends_in_the_same_weights(
    dtype: str, tolerance: float, synthetic_dir: Path, tmp_path: Path
) -> None:
    single, _ = train("single", 1, 1, "mlp", dtype, synthetic_dir, tmp_path)
    assert single["1.weight"].dtype == getattr(torch, dtype)
    assert metrics(tmp_path / "single-1-1-mlp")[0]["test_accuracy"] > 0.2, "nothing was learnt"
    for technique, devices, accumulation in LAYOUTS + ACCUMULATED:
        weights, hashes = train(
            technique, devices, accumulation, "mlp", dtype, synthetic_dir, tmp_path
        )
        apart = distance(single, weights)
        print(f"{technique} on {devices}, accumulation {accumulation}: {apart:.1e} apart")
        assert len(hashes) == 1, f"the ranks of {technique} on {devices} differ"
        assert apart <= tolerance, (technique, devices, accumulation, apart)


def test_batch_normalisation_sees_the_batch_of_its_device(
    synthetic_dir: Path, tmp_path: Path
) -> None:
    """Without SyncBN each replica normalises with the statistics of its own share.

    A share of 48 has another mean and variance than the batch of 96 that it was cut from, so the
    gradients are those of another function: DP and DDP agree neither with a single device, nor,
    in their running statistics, with a larger world.
    """
    single, _ = train("single", 1, 1, "convnet", "float32", synthetic_dir, tmp_path, steps=10)
    for technique in ("dp", "ddp"):
        weights, hashes = train(
            technique, 2, 1, "convnet", "float32", synthetic_dir, tmp_path, steps=10
        )
        assert distance(single, weights) > 1e-4
    assert len(hashes) == 1, "buffers are those of rank 0 on every rank after an evaluation"
