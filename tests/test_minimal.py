"""scripts/minimal: each file alone in an empty folder, as somebody who copies it has it."""

import difflib
import os
import re
import runpy
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

from tests.helpers import ended, fork_ranks
from tests.processes import ROOT, succeed, torchrun, without_gloo
from tests.test_scripts import changes, code_lines

FOLDER = ROOT / "scripts" / "minimal"
EPOCH = re.compile(r"epoch (\d+): lr (\S+), (\S+)% correct\n")


@pytest.fixture
def alone(tmp_path):
    """Return a function that copies a script into an empty folder, and returns its path there."""

    def copy(name, folder="alone"):
        (tmp_path / folder).mkdir()
        return Path(shutil.copy(FOLDER / f"{name}.py", tmp_path / folder))

    return copy


@pytest.fixture
def run_ranks(capfd):
    """Return a function that runs a script in its folder: the exit statuses and the output.

    The ranks are forked, which is quicker than a real start. ``prepare`` is called in each of them
    before the script.
    """

    def run(script, ranks, *flags, prepare=int):
        def execute(rank):
            os.chdir(script.parent)
            sys.argv = [script.name, *map(str, flags)]
            prepare()
            runpy.run_path(script.name, run_name="__main__")

        capfd.readouterr()
        statuses = ended(*fork_ranks(execute, ranks))
        return statuses, without_gloo(capfd.readouterr().out)

    return run


def text_of(name):
    return (FOLDER / f"{name}.py").read_text()


@pytest.mark.parametrize("name", ["single", "dp", "ddp", "ddp_resume", "fsdp"])
def test_a_copied_file_needs_pytorch_alone(name):
    imported = re.findall(r"^(?:from|import) (\w+)", text_of(name), re.M)
    assert {*imported} - sys.stdlib_module_names == {"torch", "torchvision"}


@pytest.mark.parametrize(
    ("old", "new", "removed", "added", "word"),
    [
        ("single", "dp", 3, 4, "DP"),
        ("single", "ddp", 7, 25, "DDP"),
        ("ddp", "ddp_resume", 5, 44, "RESUME|STOP"),
        ("ddp", "fsdp", 5, 18, "FSDP"),
    ],
)
def test_a_diff_is_small_and_each_difference_has_its_reason(old, new, removed, added, word):
    hunks = [*changes(code_lines(text_of(old)), code_lines(text_of(new)))]
    assert sum(len(before) for before, _ in hunks) <= removed
    assert sum(len(after) for _, after in hunks) <= added

    texts = [text_of(name).splitlines() for name in (old, new)]
    lines = texts[1]
    for tag, *_, begin, end in difflib.SequenceMatcher(None, *texts, False).get_opcodes():
        code = [x for x in lines[begin:end] if x.startswith("    ") and x.lstrip()[:1] != "#"]
        if tag != "equal" and begin > lines.index("def main() -> None:") and code:
            near = "\n".join(lines[begin - 4 : end])
            assert re.search(rf"# ({word}): ", near), f"no reason near {code}"


# Training on drawn digits


def check_result(output, path, data_dir):
    """The accuracy in the last line is that of the saved model."""
    *_, (_, _, accuracy) = EPOCH.findall(output)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10)),
    ).eval()
    model.load_state_dict(torch.load(path / "model.pt", map_location="cpu", weights_only=True))
    test_set = MNIST(data_dir, train=False, transform=ToTensor())
    images = torch.stack([image for image, _ in test_set])
    labels = torch.tensor([label for _, label in test_set])
    with torch.no_grad():
        correct = int((model(images).argmax(1) == labels).sum())
    assert f"{accuracy}%" == f"{correct / len(labels):.2%}"
    assert float(accuracy) > 80


@pytest.mark.slow
def test_dp_without_gpus_trains_as_single_does(alone, run_ranks, digits_dir, tmp_path):
    for name in ("single", "dp"):
        _, output = run_ranks(alone(name, name), 1, "--data-dir", digits_dir, "--epochs", 2)
        assert [line[:2] for line in EPOCH.findall(output)] == [("1", "0.03"), ("2", "0.03")]
        check_result(output, tmp_path / name, digits_dir)
    weights = [torch.load(tmp_path / name / "model.pt") for name in ("single", "dp")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_three_ranks_evaluate_the_saved_model_exactly(name, alone, run_ranks, digits_dir, tmp_path):
    """500 images do not divide by 3. One rank prints, and the rate follows the number of ranks."""
    flags = ["--data-dir", digits_dir, "--epochs", 2, "--batch-size", 32]
    statuses, output = run_ranks(alone(name), 3, *flags)
    assert statuses == [0, 0, 0]
    assert [line[:2] for line in EPOCH.findall(output)] == [("1", "0.045"), ("2", "0.045")]
    check_result(output, tmp_path / "alone", digits_dir)
    assert name == "ddp" or "rank 0 holds" in output


@pytest.mark.slow
def test_the_first_epoch_reaches_98_percent(alone, mnist_dir, tmp_path):
    command = torchrun(2, alone("ddp"), "--data-dir", mnist_dir)
    output = succeed(*command, cwd=tmp_path / "alone").stdout
    [(_, _, accuracy)] = EPOCH.findall(output)
    assert float(accuracy) >= 98


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["dp", "ddp", "fsdp"])
def test_two_gpus_train(name, alone, digits_dir, tmp_path):
    words = [alone(name), "--data-dir", digits_dir, "--epochs", 2]
    words = [sys.executable, *words] if name == "dp" else torchrun(2, *words)
    output = succeed(*words, cwd=tmp_path / "alone").stdout
    assert [line[:2] for line in EPOCH.findall(output)] == [("1", "0.06"), ("2", "0.06")]
    check_result(output, tmp_path / "alone", digits_dir)


@pytest.mark.parametrize("name", ["ddp", "ddp_resume", "fsdp"])
def test_a_start_without_torchrun_says_how_to_start(name, alone, monkeypatch):
    script = alone(name)
    monkeypatch.setattr(sys, "argv", [script.name])
    with pytest.raises(SystemExit, match=r"^start it with: torchrun .*\.py$"):
        runpy.run_path(str(script), run_name="__main__")


# Scripts of DDP with other data: a folder named torchvision beside the script has a data set that
# tells what is read, and can send a signal to its process.

DATA_SET = """
import os, time
import torch

RANK = os.environ["RANK"]


class MNIST:
    def __init__(self, root, train=True, transform=None, download=False):
        self.train, self.number = train, 0
        if download and not os.path.exists("downloaded"):
            open(f"downloaded_by_{RANK}", "w").close()
            time.sleep(1)
            open("downloaded", "w").close()

    def __len__(self):
        return 960 if self.train else 50

    def __getitem__(self, index):
        if self.train:
            self.number += 1
            print(index, file=open(f"read_by_{RANK}", "a"))
            if [RANK, str(self.number)] == os.environ.get("WHEN", "").split():
                os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        return torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(index)), index % 10
"""


@pytest.fixture
def with_data_set(alone, tmp_path):
    """Return a function that copies a script into a folder with such a data set."""

    def copy(name, folder="alone"):
        script = alone(name, folder)
        package = tmp_path / folder / "torchvision"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "datasets.py").write_text(DATA_SET)
        (package / "transforms.py").write_text("ToTensor = object\n")
        return script

    return copy


@pytest.fixture
def resume(with_data_set, run_ranks, tmp_path, monkeypatch):
    """Return a function that runs ddp_resume.py with this data set, as ``run_ranks`` does."""

    def run(folder, ranks, *flags, when="", signal=0, prepare=int):
        script = tmp_path / folder / "ddp_resume.py"
        if not script.exists():
            with_data_set("ddp_resume", folder)
        monkeypatch.setenv("WHEN", when)
        monkeypatch.setenv("SIGNAL", str(int(signal)))

        def forget_torchvision():
            sys.path.insert(0, str(script.parent))
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
            prepare()

        return run_ranks(script, ranks, *flags, prepare=forget_torchvision)

    return run


def test_a_stopped_run_goes_on_with_more_epochs_and_another_number_of_ranks(resume, tmp_path):
    folder = tmp_path / "run"
    flags = ["--batch-size", 24]
    statuses, output = resume("run", 2, *flags, when=f"1 {4 * 24 + 1}", signal=signal.SIGTERM)
    assert statuses == [0, 0]
    assert "stopped after 240 images of epoch 1" in output
    assert [path.name for path in folder.glob("downloaded_by_*")] == ["downloaded_by_0"]
    assert not (folder / "model.pt").exists()
    statuses, output = resume("run", 3, "--batch-size", 8, "--epochs", 2)
    assert statuses == [0, 0, 0]
    assert "resume after 0 of 2 epochs, and 240 images\n" in output
    # The rates of a run of two epochs on three ranks, in the last step of each epoch.
    rates = [float(rate) for _, rate, _ in EPOCH.findall(output)]
    assert rates == pytest.approx([0.01125 * (960 + 24) / 1920, 0.01125 * 24 / 1920])
    reads = [path.read_text().split() for path in sorted(folder.glob("read_by_*"))]
    times = Counter(int(index) for each in reads for index in each)
    assert times == dict.fromkeys(range(960), 2), "each image once in an epoch"
    # Rank 0 has read the first image of each epoch.
    assert reads[0][0] != reads[0][240 // 2 + 720 // 3], "each epoch has its own order"


def test_every_parameter_group_gets_the_rate(resume, with_data_set, tmp_path):
    script = Path(with_data_set("ddp_resume", "run"))
    groups = "SGD([{'params': [p]} for p in model.parameters()]"
    script.write_text(script.read_text().replace("SGD(model.parameters()", groups))
    resume("run", 2, "--batch-size", 96)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt")["optimizer"]["param_groups"]
    assert len(saved) > 1
    assert [group["lr"] for group in saved] == pytest.approx([0.09 / 5] * len(saved))


def test_a_killed_run_ends_in_the_weights_of_one_that_was_never_killed(resume, tmp_path):
    """It is saved at steps 100 and 200 of an epoch, and is killed in step 150."""
    resume("calm", 2, "--batch-size", 2)
    statuses, _ = resume("killed", 2, "--batch-size", 2, when="0 299", signal=signal.SIGKILL)
    assert statuses[0] == -signal.SIGKILL
    _, output = resume("killed", 2, "--batch-size", 2)
    assert "resume after 0 of 1 epochs, and 400 images\n" in output
    for name in ("model.pt", "checkpoint.pt"):
        weights = [torch.load(tmp_path / folder / name) for folder in ("calm", "killed")]
        torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert (weights[0]["epoch"], weights[0]["seen"]) == (1, 0)


def test_a_run_that_is_killed_while_it_saves_keeps_the_checkpoint_before(resume, tmp_path):
    save = torch.save

    def save_half(state, path):
        if "seen" not in state or state["seen"] == 400:
            save(state, path)
        else:
            Path(path).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    def prepare():
        torch.save = save_half

    statuses, _ = resume("run", 2, "--batch-size", 2, prepare=prepare)
    assert statuses[0] == -signal.SIGKILL
    assert torch.load(tmp_path / "run" / "checkpoint.pt")["seen"] == 400


# The end

THREADS = """
import os, runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
print(f"\\nthreads at the end: {names}\\n", end="")
"""


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("ddp", ""),
        pytest.param("ddp_resume", "", marks=pytest.mark.slow),
        pytest.param("ddp_resume", "0 97", marks=pytest.mark.slow),
    ],
)
def test_no_thread_is_left_that_could_abort_the_end(name, when, with_data_set):
    script = with_data_set(name)
    (script.parent / "threads.py").write_text(THREADS)
    command = torchrun(1, "threads.py", script.name, "--batch-size", 96)
    variables = {"WHEN": when, "SIGNAL": str(int(signal.SIGTERM)), "PYTHONPATH": "."}
    ended = succeed(*command, cwd=script.parent, **variables)
    assert ("stopped after 192 images" in ended.stdout) == bool(when)
    [names] = re.findall(r"^threads at the end: (.*)", ended.stdout, re.M)
    assert names.count("'") == 2, f"{names}, but the main thread alone was expected"
