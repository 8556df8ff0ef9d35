"""The three scripts as a user starts them: they train, count every test image, and resume."""

import itertools
import shutil
import signal
import sys

import pytest

from tests import processes
from tests.processes import command, final_state, flags, run, script, succeed, summary
from tests.test_docs import CONTRACT

# Dropout, momentum, augmentation and, at 0.25 MB, several gradient buckets.
HARD = ["--max-steps", 12, "--save-every-steps", 5, "--seed", 3]


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["single", "ddp"])
def test_a_model_is_compiled_once_for_training(technique, synthetic_dir, tmp_path):
    """DDP's warm-up has the first batch's size and strides, or it would be compiled again."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler: torch.compile writes C++ for a CPU")
    words = flags(synthetic_dir, tmp_path / "run", "--max-steps", 3)
    told = run(*command(technique, 2, *words, "--compile"), timeout=280, TORCH_LOGS="recompiles")
    assert succeed(told).stderr.count("GLOBAL_STATE changed: grad_mode"), "for the evaluation"
    assert "mismatch" not in told.stderr


@pytest.mark.parametrize("technique", ["single", "dp", "ddp"])
def test_a_script_trains_and_reports(technique, synthetic_dir, tmp_path):
    extra = ["--model", "mlp", "--max-steps", 30, "--batch-size", 32, "--warmup-epochs", 0]
    result = succeed(run(*command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *extra))))
    facts = summary(tmp_path / "run")
    assert facts.keys() >= {*CONTRACT}
    devices, processes = 1 + (technique != "single"), 1 + (technique == "ddp")
    assert facts["script"] == f"train_{technique}.py"
    assert (facts["world_size"], facts["num_devices"]) == (processes, devices)
    assert (facts["global_batch_size"], facts["global_step"]) == (32 * devices, 30)
    assert facts["test_count"] == 10_000
    assert 0.5 < facts["test_accuracy"] < 1
    assert len(facts["peak_memory_bytes"]) == processes
    assert facts["backend"] == ("gloo" if technique == "ddp" else None)
    assert processes.status(tmp_path / "run")["state"] == "complete"
    names = {path.name.partition(".tfevents")[0] for path in (tmp_path / "run").iterdir()}
    assert {"args.json", "metrics.jsonl", "checkpoints", "summary.json", "events.out"} <= names
    assert processes.metrics(tmp_path / "run")[-1]["images"] == 30 * 32 * devices
    assert result.stdout.count("test accuracy") == 1, "one rank reports"
    assert "\r" not in result.text, "no progress bar in a log file"
    assert "destroy_process_group" not in result.stderr


@pytest.fixture(scope="module")
def trained(synthetic_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    extra = ["--model", "mlp", "--batch-size", 6000, "--lr-scaling", "none"]
    succeed(run(*script("train_single.py", *flags(synthetic_dir, folder, *extra)), timeout=120))
    return folder


@pytest.mark.parametrize(
    ("technique", "processes"),
    [
        ("dp", 2),
        ("ddp", 3),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in (("ddp", 7), ("ddp", 1))),
    ],
)
def test_every_test_image_counts_once_at_any_world_size(
    technique, processes, trained, synthetic_dir, tmp_path
):
    """10,000 divides by neither 3 nor 7; the same weights have to get the same score."""
    extra = ["--model", "mlp", "--init-weights", trained / "checkpoints" / "last.pt"]
    extra += ["--max-steps", 1, "--lr", "1e-30", "--lr-scaling", "none"]  # changes no weight
    words = flags(synthetic_dir, tmp_path / "run", *extra)
    succeed(run(*command(technique, processes, *words), timeout=120))
    facts = summary(tmp_path / "run")
    assert facts["weights_sha256"] == summary(trained)["weights_sha256"]
    assert facts["test_correct"] == summary(trained)["test_correct"]
    assert facts["test_count"] == 10_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_any_script_resumes_any_other(synthetic_dir, tmp_path):
    """One chain has all nine pairs; each script continues in the middle of the epoch."""
    chain = ["single", "single", "dp", "dp", "ddp", "ddp", "single", "ddp", "dp", "single"]
    assert len({*itertools.pairwise(chain)}) == 9
    for i, technique in enumerate(chain):
        extra = ["--model", "mlp", "--max-steps", 10 * (i + 1), *(["--resume"] if i else [])]
        succeed(run(*command(technique, 2, *flags(synthetic_dir, tmp_path / "run", *extra))))
        facts = summary(tmp_path / "run")
        assert (facts["technique"], facts["global_step"]) == (technique, 10 * (i + 1))
        assert facts["resumed_from"] == (10 * i or None)
        assert [row["epoch"] for row in processes.metrics(tmp_path / "run")] == [1], (
            "its line is replaced"
        )


@pytest.mark.parametrize(
    ("technique", "processes", "model"),
    [("single", 1, "convnet"), pytest.param("ddp", 2, "basic", marks=pytest.mark.slow)],
)
def test_a_run_stopped_in_mid_epoch_ends_as_if_undisturbed(
    technique, processes, model, short_dir, tmp_path
):
    hard = ["--model", model, *HARD, *(["--bucket-cap-mb", 0.25] if technique == "ddp" else [])]
    succeed(run(*command(technique, processes, *flags(short_dir, tmp_path / "a", *hard))))
    process = processes.start(
        *command(technique, processes, *flags(short_dir, tmp_path / "b", *hard))
    )
    processes.wait_until((tmp_path / "b" / "checkpoints" / "last.pt").exists)
    process.send_signal(signal.SIGTERM)
    stopped = processes.finish(process, timeout=60)
    assert stopped.returncode == (143 if technique == "single" else 1), stopped.text
    told = processes.status(tmp_path / "b")
    assert (told["state"], told["signal"]) == ("stopped", "SIGTERM")
    assert 5 <= told["global_step"] < 12
    assert f"--run-dir {tmp_path / 'b'} --resume" in told["continue"]
    launcher = "torchrun --standalone --nproc_per_node 2" if processes == 2 else "python"
    assert told["continue"].startswith(f"{launcher} train_{technique}.py --threads 1 ")
    again = [*flags(short_dir, tmp_path / "b", *hard), "--resume"]
    succeed(run(*command(technique, processes, *again)))
    assert final_state(tmp_path / "b") == final_state(tmp_path / "a")


def test_what_is_not_needed_is_not_loaded(synthetic_dir, tmp_path):
    words = script("x", *flags(synthetic_dir, tmp_path / "run", "--no-tensorboard"))[2:]
    code = (
        "import sys, train_single\n"
        f"sys.argv[1:] = {[str(a) for a in [*words, '--model', 'linear', '--max-steps', 2]]}\n"
        "assert train_single.main() == 0\n"
        "print('loaded:', [m for m in ('torchvision', 'tensorboard', 'PIL') if m in sys.modules])"
    )
    assert "loaded: []" in succeed(run(sys.executable, "-c", code, real=True)).stdout


def test_sync_bn_on_a_cpu_is_refused(synthetic_dir, tmp_path):
    words = flags(synthetic_dir, tmp_path / "run", "--sync-bn")
    line = processes.error_line(run(*script("train_ddp.py", *words)))
    assert "SyncBatchNorm works on GPUs only" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["single", "dp", "ddp"])
def test_the_defaults_reach_99_percent_of_real_mnist(technique, mnist_dir, tmp_path):
    batch = 96 if technique == "single" else 48
    own = ["--data-dir", mnist_dir, "--run-dir", tmp_path / "run", "--batch-size", batch]
    succeed(run(*command(technique, 2, *own), timeout=280))
    assert summary(tmp_path / "run")["test_accuracy"] >= 0.99
