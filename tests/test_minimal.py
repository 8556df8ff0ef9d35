"""scripts/minimal: each file alone in an empty folder, as somebody who copies it has it."""

import difflib
import os
import re
import shutil
import signal
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

from tests.processes import ROOT, finish, free_port, run, start, succeed, torchrun
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


def run_ranks(world_size, script, *flags, **environment):
    """Run a script once for each rank, without torchrun, so that the tests know the processes."""
    common = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank in range(world_size):
        variables = common | {"RANK": rank, "LOCAL_RANK": rank} | environment
        variables = {name: str(value) for name, value in variables.items()}
        command = [sys.executable, script, *flags]
        processes.append(start(*command, cwd=os.path.dirname(script), **variables))
    return [finish(process) for process in processes]


# The files, and what they differ in


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
    """Return the accuracy in percent, which has to be that of the saved model, as the loss is."""
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
    return float(accuracy)


@pytest.mark.slow
def test_dp_without_gpus_trains_as_single_does(alone, digits_dir, tmp_path):
    for name in ("single", "dp"):
        script = alone(name, name)
        flags = ["--data-dir", digits_dir, "--epochs", 2]
        ended = succeed(sys.executable, script, *flags, cwd=tmp_path / name)
        assert [line[:2] for line in EPOCH.findall(ended.stdout)] == [("1", "0.03"), ("2", "0.03")]
        assert check_result(ended, tmp_path / name, digits_dir) > 80
    weights = [torch.load(tmp_path / name / "model.pt") for name in ("single", "dp")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_three_ranks_evaluate_the_saved_model_exactly(name, alone, digits_dir, tmp_path):
    """500 images do not divide by 3. One rank prints, and the rate follows the number of ranks."""
    flags = ["--data-dir", digits_dir, "--epochs", 2, "--batch-size", 32]
    ended = succeed(*torchrun(3, alone(name), *flags), cwd=tmp_path / "alone")
    assert [line[:2] for line in EPOCH.findall(ended.stdout)] == [("1", "0.045"), ("2", "0.045")]
    assert check_result(ended, tmp_path / "alone", digits_dir) > 80
    assert name == "ddp" or "rank 0 holds" in ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_an_epoch_of_mnist_is_enough(name, ranks, alone, mnist_dir, tmp_path):
    command = torchrun(ranks, alone(name), "--data-dir", mnist_dir)
    command = command[-3:] if name == "single" else command
    command = [sys.executable, *command] if name == "single" else command
    ended = succeed(*command, cwd=tmp_path / "alone", timeout=250)
    assert check_result(ended, tmp_path / "alone", mnist_dir) >= 98


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["dp", "ddp", "fsdp"])
def test_two_gpus_train(name, alone, digits_dir, tmp_path):
    words = [alone(name), "--data-dir", digits_dir, "--epochs", 2]
    words = [sys.executable, *words] if name == "dp" else torchrun(2, *words)
    ended = succeed(*words, cwd=tmp_path / "alone")
    assert [line[:2] for line in EPOCH.findall(ended.stdout)] == [("1", "0.06"), ("2", "0.06")]
    assert check_result(ended, tmp_path / "alone", digits_dir) > 80


# What a person can do wrong


def test_a_mistake_is_answered_with_one_line(alone, digits_dir):
    single, ddp = alone("single", "single"), alone("ddp", "ddp")
    flags = ["--data-dir", digits_dir, "--batch-size"]
    ended = run(sys.executable, single, *flags, 1921)
    assert (ended.status, ended.text) == (2, "only 1920 images: lower --batch-size\n")
    ranks = run_ranks(2, ddp, *flags, 961)
    assert [ended.status for ended in ranks] == [2, 2]
    assert [ended.text for ended in ranks] == ["only 1920 images: lower --batch-size\n", ""]
    ended = run(sys.executable, ddp)
    command = f"torchrun --standalone --nproc_per_node 2 {ddp}"
    assert (ended.status, ended.text) == (2, f"start it with: {command}\n")


# With other data: a folder named torchvision beside the script has a data set that tells what is
# read, and can send a signal to its process.

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
def other_data(alone, tmp_path):
    """Like ``alone``, with the data set above beside the script."""

    def copy(name, folder="alone"):
        script = alone(name, folder)
        package = tmp_path / folder / "torchvision"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "datasets.py").write_text(DATA_SET)
        (package / "transforms.py").write_text("ToTensor = object\n")
        return script

    return copy


def test_one_rank_downloads_and_the_epochs_differ(other_data, tmp_path):
    ranks = run_ranks(2, other_data("ddp"), "--epochs", 2)
    assert [ended.status for ended in ranks] == [0, 0], ranks
    folder = tmp_path / "alone"
    assert [path.name for path in folder.glob("downloaded_by_*")] == ["downloaded_by_0"]
    order = (folder / "read_by_0").read_text().split()
    assert order[: len(order) // 2] != order[len(order) // 2 :]


def resume(world_size, script, *flags, **environment):
    """Run ddp_resume.py to its end, and return rank 0's output."""
    ranks = run_ranks(world_size, script, "--batch-size", 48 // world_size, *flags, **environment)
    assert [ended.status for ended in ranks] == [0] * world_size, "\n".join(x.text for x in ranks)
    assert not any(ended.text for ended in ranks[1:]), "another rank than 0 has printed"
    return ranks[0].stdout


def test_all_ranks_stop_after_a_signal_to_one_and_another_number_goes_on(other_data, tmp_path):
    """Steps 5 to 10 of rank 1 see the signal, so the run stops after step 10, in mid-epoch."""
    script, folder = other_data("ddp_resume"), tmp_path / "alone"
    when = {"WHEN": f"1 {4 * 24 + 1}", "SIGNAL": signal.SIGTERM.value}
    output = resume(2, script, **when)
    assert output == "stopped after 480 images of epoch 1: see checkpoint.pt\n"
    assert not (folder / "model.pt").exists()
    output = resume(3, script, "--batch-size", 8)
    assert "checkpoint.pt has 0 epochs, and 480 images of the next one\n" in output
    optimizer = torch.load(folder / "checkpoint.pt")["optimizer"]
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(0.03 * 24 / 64)
    read = [x for path in folder.glob("read_by_*") for x in path.read_text().split()]
    assert sorted(map(int, read)) == [*range(960)], "each image once in the epoch"
    names = {"checkpoint.pt", "previous.pt", "model.pt"}
    assert {path.name for path in folder.glob("*.pt*")} == names


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_ends_in_the_weights_of_one_that_was_never_killed(ranks, other_data, tmp_path):
    """It is saved at steps 100 and 200 of an epoch, and is killed in step 150 of the second."""
    flags, epochs = ["--batch-size", 4 // ranks], ["--epochs", 2]
    calm, killed = other_data("ddp_resume", "calm"), other_data("ddp_resume", "killed")
    resume(ranks, calm, *epochs, *flags)
    when = {"WHEN": f"0 {(240 + 149) * 4 // ranks + 1}", "SIGNAL": signal.SIGKILL.value}
    ended = run_ranks(ranks, killed, *epochs, *flags, **when)
    assert ended[0].status == -signal.SIGKILL
    output = resume(ranks, killed, *epochs, *flags)
    assert "checkpoint.pt has 1 epochs, and 400 images of the next one\n" in output
    assert [line[0] for line in EPOCH.findall(output)] == ["2"]
    for name in ("model.pt", "checkpoint.pt"):
        weights = [torch.load(tmp_path / folder / name) for folder in ("calm", "killed")]
        torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert (weights[0]["epoch"], weights[0]["seen"]) == (2, 0)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_kept(alone, tmp_path):
    script, path = alone("ddp_resume"), tmp_path / "alone" / "checkpoint.pt"
    torch.save({"model": {"weight": torch.zeros(1000)}}, path)
    flipped = bytearray(path.read_bytes())
    flipped[flipped.index(bytes(2000)) + 1000] ^= 1  # a bit of a weight
    path.write_bytes(flipped)
    (ended,) = run_ranks(1, script)
    line = r"checkpoint\.pt is damaged \(\w+\): mv previous\.pt checkpoint\.pt\n"
    assert ended.status == 1
    assert re.fullmatch(line, ended.text)
    assert path.read_bytes() == flipped
