"""The three scripts as a user starts them: they train, count every test image, and resume."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Finished, finish, metrics, run, script, start, summary, torchrun

TECHNIQUES = ("single", "dp", "ddp")
# The first lines of the README's table of summary.json: others build on these names.
CONTRACT = {
    *("script", "technique", "dataset", "model", "parameters", "world_size", "num_devices"),
    *("device", "backend", "batch_size", "global_batch_size", "epochs", "global_step", "seed"),
    *("test_correct", "test_count", "test_accuracy", "test_loss", "train_images_per_second"),
    *("startup_seconds", "train_seconds", "total_seconds", "peak_memory_bytes"),
    *("weights_sha256", "torch_version", "resumed_from"),
}
# Dropout, momentum, augmentation and, at 0.25 MB, several gradient buckets.
HARD = ["--max-steps", 12, "--save-every-steps", 5, "--seed", 3]


def command(technique: str, processes: int, *flags: Any) -> list[Any]:
    """Return a training command on so many devices."""
    if technique == "ddp":
        return torchrun(processes, "train_ddp.py", *flags)
    if technique == "spawn":
        return script("train_ddp.py", "--nprocs", processes, *flags)
    if technique == "dp":
        return script("train_dp.py", "--replicas", processes, *flags)
    return script("train_single.py", *flags)


def flags(data_dir: Path, run_dir: Path, *extra: Any) -> list[Any]:
    return ["--dataset", "synthetic", "--data-dir", data_dir, "--run-dir", run_dir, *extra]


def succeed(result: Finished) -> Finished:
    assert result.returncode == 0, result.text
    assert "Traceback" not in result.text
    return result


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_a_model_is_compiled_once_for_training(
    technique: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    """DDP's warm-up comes with the first batch's size and strides, or it would be made anew."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: torch.compile writes C++ for a CPU")
    words = flags(synthetic_dir, tmp_path / "run", "--max-steps", 3)
    told = run(*command(technique, 2, *words, "--compile"), timeout=280, TORCH_LOGS="recompiles")
    assert succeed(told).stderr.count("GLOBAL_STATE changed: grad_mode"), "for the evaluation"
    assert "mismatch" not in told.stderr


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_a_script_trains_and_reports(technique: str, synthetic_dir: Path, tmp_path: Path) -> None:
    extra = ["--model", "mlp", "--max-steps", 30, "--batch-size", 32, "--warmup-epochs", 0]
    result = succeed(run(*command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *extra))))
    facts = summary(tmp_path / "run")
    assert facts.keys() >= CONTRACT
    devices = 1 if technique == "single" else 2
    processes = 2 if technique == "ddp" else 1
    assert facts["script"] == f"train_{technique}.py"
    assert (facts["world_size"], facts["num_devices"]) == (processes, devices)
    assert facts["global_batch_size"] == 32 * devices
    assert facts["global_step"] == 30
    assert facts["test_count"] == 10_000
    assert 0.5 < facts["test_accuracy"] < 1
    assert len(facts["peak_memory_bytes"]) == processes
    assert facts["backend"] == ("gloo" if technique == "ddp" else None)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "complete"
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"args.json", "metrics.jsonl", "checkpoints", "summary.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    row = metrics(tmp_path / "run")[-1]
    assert row["images"] == 30 * 32 * devices
    assert result.stdout.count("test accuracy") == 1, "one rank reports"
    assert "\r" not in result.text, "no progress bar in a log file"
    assert "destroy_process_group" not in result.stderr


def test_ddp_alone_is_a_world_of_one(synthetic_dir: Path, tmp_path: Path) -> None:
    extra = ["--model", "linear", "--max-steps", 5]
    succeed(run(*script("train_ddp.py", *flags(synthetic_dir, tmp_path / "run", *extra))))
    facts = summary(tmp_path / "run")
    assert (facts["technique"], facts["world_size"], facts["backend"]) == ("ddp", 1, "gloo")


@pytest.fixture(scope="module")
def trained(synthetic_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was left after the last step of its only epoch, before the evaluation."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    extra = [
        "--model",
        "mlp",
        "--batch-size",
        6000,
        "--save-every-steps",
        10,
        "--lr-scaling",
        "none",
    ]
    succeed(run(*script("train_single.py", *flags(synthetic_dir, folder, *extra)), timeout=120))
    os.replace(folder / "checkpoints" / "step-00000010.pt", folder / "checkpoints" / "last.pt")
    (folder / "status.json").write_text(json.dumps({"state": "stopped", "technique": "single"}))
    return folder


@pytest.mark.parametrize(
    ("technique", "processes"),
    [
        ("dp", 2),
        ("ddp", 3),
        pytest.param("ddp", 7, marks=pytest.mark.slow),
        pytest.param("dp", 3, marks=pytest.mark.slow),
        pytest.param("ddp", 1, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("ddp", 6, marks=pytest.mark.slow),
    ],
)
def test_every_test_image_counts_once_at_any_world_size(
    technique: str, processes: int, trained: Path, synthetic_dir: Path, tmp_path: Path
) -> None:
    """10,000 divides by neither 3, 6 nor 7; the same checkpoint has to get the same score."""
    expected = summary(trained)["test_correct"]
    shutil.copytree(trained, tmp_path / "run")
    arguments = flags(synthetic_dir, tmp_path / "run", "--model", "mlp", "--resume")
    succeed(run(*command(technique, processes, *arguments)))
    facts = summary(tmp_path / "run")
    assert (facts["test_correct"], facts["test_count"]) == (expected, 10_000)
    assert facts["global_step"] == 10, "nothing was trained on the way"


def resume_chain(chain: list[str], synthetic_dir: Path, folder: Path) -> None:
    """Let each technique continue what the one before it left, in the middle of an epoch."""
    for i, technique in enumerate(chain):
        extra = ["--model", "mlp", "--max-steps", 10 * (i + 1), *(["--resume"] if i else [])]
        succeed(run(*command(technique, 2, *flags(synthetic_dir, folder, *extra))))
        facts = summary(folder)
        assert facts["technique"] == technique
        assert facts["global_step"] == 10 * (i + 1)
        assert facts["resumed_from"] == (10 * i or None)
        rows = metrics(folder)
        assert [row["epoch"] for row in rows] == [1], "the unfinished epoch's line is replaced"


@pytest.mark.slow
def test_a_checkpoint_goes_through_all_scripts(synthetic_dir: Path, tmp_path: Path) -> None:
    resume_chain(["single", "dp", "ddp", "single"], synthetic_dir, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("first", TECHNIQUES)
@pytest.mark.parametrize("second", TECHNIQUES)
def test_any_script_resumes_any_other(
    first: str, second: str, synthetic_dir: Path, tmp_path: Path
) -> None:
    resume_chain([first, second], synthetic_dir, tmp_path / "run")


def final_state(run_dir: Path) -> tuple[str, list[dict[str, Any]]]:
    rows = metrics(run_dir)
    for row in rows:
        del row["seconds"], row["images_per_second"]
    return summary(run_dir)["weights_sha256"], rows


@pytest.mark.parametrize(
    ("technique", "processes", "model"),
    [
        ("single", 1, "convnet"),
        pytest.param("single", 1, "basic", marks=pytest.mark.slow),
        pytest.param("ddp", 2, "basic", marks=pytest.mark.slow),
    ],
)
def test_a_run_stopped_in_mid_epoch_ends_as_if_undisturbed(
    technique: str, processes: int, model: str, short_dir: Path, tmp_path: Path
) -> None:
    hard = ["--model", model, *HARD, *(["--bucket-cap-mb", 0.25] if technique == "ddp" else [])]
    succeed(run(*command(technique, processes, *flags(short_dir, tmp_path / "a", *hard))))

    process = start(*command(technique, processes, *flags(short_dir, tmp_path / "b", *hard)))
    checkpoint = tmp_path / "b" / "checkpoints" / "last.pt"
    deadline = time.monotonic() + 60
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    stopped = finish(process, timeout=60)
    assert stopped.returncode == (143 if technique == "single" else 1), stopped.text
    status = json.loads((tmp_path / "b" / "status.json").read_text())
    assert (status["state"], status["signal"]) == ("stopped", "SIGTERM")
    assert 5 <= status["global_step"] < 12
    assert f"--run-dir {tmp_path / 'b'} --resume" in status["continue"]
    launcher = "torchrun --standalone --nproc_per_node 2" if processes == 2 else "python"
    assert status["continue"].startswith(f"{launcher} train_{technique}.py --threads 1 ")

    again = [*flags(short_dir, tmp_path / "b", *hard), "--resume"]
    succeed(run(*command(technique, processes, *again)))
    assert final_state(tmp_path / "b") == final_state(tmp_path / "a")


def test_what_is_not_needed_is_not_loaded(synthetic_dir: Path, tmp_path: Path) -> None:
    arguments = script("x", *flags(synthetic_dir, tmp_path / "run", "--no-tensorboard"))[2:]
    code = (
        "import sys, train_single\n"
        f"sys.argv[1:] = {[str(a) for a in [*arguments, '--model', 'linear', '--max-steps', 2]]}\n"
        "assert train_single.main() == 0\n"
        "print('loaded:', [m for m in ('torchvision', 'tensorboard', 'PIL') if m in sys.modules])"
    )
    assert "loaded: []" in succeed(run(sys.executable, "-c", code, real=True)).stdout


def test_a_run_directory_is_not_overwritten(synthetic_dir: Path, tmp_path: Path) -> None:
    arguments = script(
        "train_single.py",
        *flags(synthetic_dir, tmp_path / "run", "--model", "linear", "--max-steps", 3),
    )
    succeed(run(*arguments))
    before = (tmp_path / "run" / "summary.json").read_bytes()
    again = run(*arguments)
    assert again.returncode == 2
    assert "--resume" in again.stderr
    assert len(again.stderr.splitlines()) == 1
    complete = run(*arguments, "--resume")
    assert complete.returncode == 0
    assert "is complete" in complete.stdout
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_resume_without_a_folder_takes_the_latest_run(synthetic_dir: Path, tmp_path: Path) -> None:
    common = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--model", "linear"]
    succeed(run(*script("train_single.py", *common, "--max-steps", 3), cwd=tmp_path))
    succeed(run(*script("train_single.py", *common, "--max-steps", 6, "--resume"), cwd=tmp_path))
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 1
    assert summary(runs[0])["resumed_from"] == 3


def test_sync_bn_on_a_cpu_is_refused(synthetic_dir: Path, tmp_path: Path) -> None:
    result = run(*script("train_ddp.py", *flags(synthetic_dir, tmp_path / "run", "--sync-bn")))
    assert result.returncode == 2
    assert "SyncBatchNorm works on GPUs only" in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["train_single.py", "train_dp.py --replicas 2", "torchrun 2 train_ddp.py"]
)
def test_the_defaults_reach_99_percent_of_real_mnist(
    line: str, mnist_dir: Path, tmp_path: Path
) -> None:
    words = line.split()
    batch = 96 if words[0] == "train_single.py" else 48
    own = ["--data-dir", mnist_dir, "--run-dir", tmp_path / "run", "--batch-size", batch]
    if words[0] == "torchrun":
        succeed(run(*torchrun(2, "train_ddp.py", *own), timeout=250))
    else:
        succeed(run(*script(*words, *own), timeout=250))
    assert summary(tmp_path / "run")["test_accuracy"] >= 0.99
