"""scripts/minimal: each file alone in an empty folder, as somebody who copies it has it."""

import difflib
import os
import re
import runpy
import shutil
import signal
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

from tests.helpers import ended, fork_ranks
from tests.processes import ROOT, succeed, torchrun, without_gloo
from tests.test_scripts import changes, code_lines

FOLDER = ROOT / "scripts" / "minimal"
EPOCH = re.compile(r"epoch (\d+): learning rate (\S+), loss (\S+), (\S+)% of (\d+) correct\n")


@pytest.fixture
def alone(tmp_path):
    """Return a function that copies a script into an empty folder, and returns its path there."""

    def copy(name, folder="alone"):
        (tmp_path / folder).mkdir()
        return shutil.copy(FOLDER / f"{name}.py", tmp_path / folder)

    return copy


def text_of(name):
    return (FOLDER / f"{name}.py").read_text()


@pytest.mark.parametrize(
    ("name", "most"),
    [("single", 45), ("dp", 46), ("ddp", 63), ("ddp_resume", 106), ("fsdp", 76)],
)
def test_a_file_stays_a_screen_long_and_imports_pytorch_alone(name, most):
    assert len(code_lines(text_of(name))) <= most
    imported = re.findall(r"^(?:from|import) (\w+)", text_of(name), re.M)
    assert {*imported} - sys.stdlib_module_names == {"torch", "torchvision"}


@pytest.mark.parametrize(
    ("old", "new", "removed", "added", "word"),
    [
        ("single", "dp", 3, 4, "DP"),
        ("single", "ddp", 8, 26, "DDP"),
        ("ddp", "ddp_resume", 6, 46, "RESUME|STOP"),
        ("ddp", "fsdp", 6, 18, "FSDP"),
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


def check_result(ended, path, data_dir):
    """The accuracy and the loss in the last line are those of the saved model."""
    *_, (_, _, loss, accuracy, count) = EPOCH.findall(ended.stdout)
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
        outputs = model(images)
    correct = int((outputs.argmax(1) == labels).sum())
    assert (int(count), f"{accuracy}%") == (len(labels), f"{correct / len(labels):.2%}")
    assert float(loss) == pytest.approx(float(F.cross_entropy(outputs, labels)), abs=1e-4)
    assert float(accuracy) > 80


@pytest.mark.slow
def test_dp_without_gpus_trains_as_single_does(alone, digits_dir, tmp_path):
    for name in ("single", "dp"):
        script = alone(name, name)
        flags = ["--data-dir", digits_dir, "--epochs", 2]
        ended = succeed(sys.executable, script, *flags, cwd=tmp_path / name)
        assert [line[:2] for line in EPOCH.findall(ended.stdout)] == [("1", "0.03"), ("2", "0.03")]
        check_result(ended, tmp_path / name, digits_dir)
    weights = [torch.load(tmp_path / name / "model.pt") for name in ("single", "dp")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_three_ranks_evaluate_the_saved_model_exactly(name, alone, digits_dir, tmp_path):
    """500 images do not divide by 3. One rank prints, and the rate follows the number of ranks."""
    flags = ["--data-dir", digits_dir, "--epochs", 2, "--batch-size", 32]
    ended = succeed(*torchrun(3, alone(name), *flags), cwd=tmp_path / "alone")
    assert [line[:2] for line in EPOCH.findall(ended.stdout)] == [("1", "0.045"), ("2", "0.045")]
    check_result(ended, tmp_path / "alone", digits_dir)
    assert name == "ddp" or "rank 0 holds" in ended.stdout


@pytest.mark.slow
def test_the_first_epoch_reaches_98_percent(alone, mnist_dir, tmp_path):
    command = torchrun(2, alone("ddp"), "--data-dir", mnist_dir)
    ended = succeed(*command, cwd=tmp_path / "alone", timeout=200)
    ((*_, accuracy, count),) = EPOCH.findall(ended.stdout)
    assert count == "10000"
    assert float(accuracy) >= 98


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["dp", "ddp", "fsdp"])
def test_two_gpus_train(name, alone, digits_dir, tmp_path):
    words = [alone(name), "--data-dir", digits_dir, "--epochs", 2]
    words = [sys.executable, *words] if name == "dp" else torchrun(2, *words)
    ended = succeed(*words, cwd=tmp_path / "alone")
    assert [line[:2] for line in EPOCH.findall(ended.stdout)] == [("1", "0.06"), ("2", "0.06")]
    check_result(ended, tmp_path / "alone", digits_dir)


# What a person can do wrong


@pytest.fixture
def refusal(monkeypatch, capsys):
    """Return a function that starts a script, which has to end: its status, and what it printed."""

    def start(script, *flags):
        monkeypatch.chdir(os.path.dirname(script))
        monkeypatch.setattr(sys, "argv", [script, *map(str, flags)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(script, run_name="__main__")
        return caught.value.code, capsys.readouterr().err

    return start


@pytest.mark.parametrize("name", ["single", "dp"])
def test_a_batch_that_is_too_large_is_one_line(name, alone, digits_dir, refusal):
    found = refusal(alone(name), "--data-dir", digits_dir, "--batch-size", 1921)
    assert found == (2, "only 1920 images: lower --batch-size\n")


@pytest.mark.parametrize("name", ["ddp", "ddp_resume", "fsdp"])
def test_a_script_of_ddp_says_how_to_start_it(name, alone, refusal):
    script = alone(name)
    command = f"torchrun --standalone --nproc_per_node 2 {script}"
    assert refusal(script) == (2, f"start it with: {command}\n")


def test_a_damaged_checkpoint_is_named_and_kept(alone, tmp_path, refusal, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    script, path = alone("ddp_resume"), tmp_path / "alone" / "checkpoint.pt"
    torch.save({"model": {"weight": torch.zeros(1000)}}, path)
    flipped = bytearray(path.read_bytes())
    flipped[flipped.index(bytes(2000)) + 1000] ^= 1  # a bit of a weight
    path.write_bytes(flipped)
    status, text = refusal(script)
    assert status == 1
    assert text == "checkpoint.pt is damaged (wrong checksum): is there a previous.pt?\n"
    assert path.read_bytes() == flipped


# ddp_resume.py with other data: a folder named torchvision beside the script has a data set that
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
def resume(alone, tmp_path, monkeypatch, capfd):
    """Return a function that trains in a folder, in forked processes: their statuses and output."""

    def run(folder, world_size, *flags, when="", signal=0):
        folder = tmp_path / folder
        if not folder.exists():
            alone("ddp_resume", folder)
            (folder / "torchvision").mkdir()
            (folder / "torchvision" / "__init__.py").touch()
            (folder / "torchvision" / "datasets.py").write_text(DATA_SET)
            (folder / "torchvision" / "transforms.py").write_text("ToTensor = object\n")
        monkeypatch.setenv("WHEN", when)
        monkeypatch.setenv("SIGNAL", str(int(signal)))

        def execute(rank):
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
            sys.argv = ["ddp_resume.py", *map(str, flags)]
            runpy.run_path("ddp_resume.py", run_name="__main__")

        capfd.readouterr()
        statuses = ended(*fork_ranks(execute, world_size))
        return statuses, without_gloo(capfd.readouterr().out)

    return run


def test_a_batch_that_is_too_large_ends_all_ranks(resume):
    assert resume("run", 2, "--batch-size", 481)[0] == [2, 2]


def test_an_epoch_of_few_steps_is_stopped_at_its_end(resume):

    flags = ["--batch-size", 96, "--epochs", 9]
    stopped = resume("run", 2, *flags, when="1 97", signal=signal.SIGINT)
    assert stopped == ([0, 0], "stopped after 960 images of epoch 1: see checkpoint.pt\n")
    assert [line[0] for line in EPOCH.findall(resume("run", 2, "--epochs", 2)[1])] == ["1", "2"]


def test_all_ranks_stop_after_a_signal_to_one_and_another_number_goes_on(resume, tmp_path):
    """Steps 5 to 10 of rank 1 see the signal, so the run stops after step 10, in mid-epoch."""
    folder = tmp_path / "run"
    flags = ["--batch-size", 24]
    stopped = resume("run", 2, *flags, when=f"1 {4 * 24 + 1}", signal=signal.SIGTERM)
    assert stopped == ([0, 0], "stopped after 480 images of epoch 1: see checkpoint.pt\n")
    assert [path.name for path in folder.glob("downloaded_by_*")] == ["downloaded_by_0"]
    assert not (folder / "model.pt").exists()
    statuses, output = resume("run", 3, "--batch-size", 8, "--epochs", 2)
    assert statuses == [0, 0, 0]
    assert "resume after 0 of 2 epochs, and 480 images\n" in output
    assert [line[:2] for line in EPOCH.findall(output)] == [("1", "0.01125"), ("2", "0.01125")]
    reads = [path.read_text().split() for path in sorted(folder.glob("read_by_*"))]
    times = Counter(int(index) for each in reads for index in each)
    assert times == dict.fromkeys(range(960), 2), "each image once in an epoch"
    # Rank 0 has read the first image of each epoch.
    assert reads[0][0] != reads[0][480 // 2 + 480 // 3], "each epoch has its own order"
    names = {"checkpoint.pt", "previous.pt", "model.pt"}
    assert {path.name for path in folder.glob("*.pt*")} == names


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
