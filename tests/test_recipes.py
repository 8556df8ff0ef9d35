"""Each recipe of docs/recipes.md runs as it is printed, and does what it says."""

import json
import re
import runpy
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import data
from tests import documents
from tests.processes import ROOT, copy_project, metrics, run, shell_line, status, succeed, summary

TEXT = (ROOT / "docs" / "recipes.md").read_text()
HEAD, *PARTS = TEXT.split("\n## ")
RECIPES = dict(part.split("\n", 1) for part in PARTS)
NEW = {"python": r"^ *[^\s#].*", "diff": r"^\+ *\S.*", "bash": "(?!)"}  # lines of code in a block
QUIET = "--threads 1 --no-progress --no-tensorboard"
TRACKER = """import json

def log(values, step=None):
    with open("tracked.jsonl", "a") as file:
        print(json.dumps([values, step]), file=file)

def init(**given):
    log(given["id"])
"""


def blocks(title):
    """Return a recipe's code. Without a command it has that of the page."""
    found = documents.blocks(RECIPES[title])
    return found if documents.commands_of(found) else found + documents.blocks(HEAD)


@pytest.fixture
def kitchen(short_dir, tmp_path):
    """A copy of the project, in which ``follow`` does what a recipe says."""

    def give(title, *flags):
        """Give a recipe's commands. The last one trains in runs/here, if it trains."""
        for command in documents.commands_of(blocks(title)):
            line = f"{command} {' '.join(flags)}"
            if re.search(r"train_\w+\.py", line):
                line += f" {QUIET}" + " --run-dir runs/here" * ("--run-dir" not in line)
            if here.exists() and "--resume" not in line:
                shutil.rmtree(here)
            words, variables = shell_line(line)
            ended = succeed(run(*words, cwd=tmp_path, timeout=120, **variables))
        return ended

    def follow(title, *flags):
        documents.follow(blocks(title), tmp_path)
        return give(title, *flags)

    here = tmp_path / "runs" / "here"
    copy_project(tmp_path, short_dir)
    return SimpleNamespace(folder=tmp_path, here=here, give=give, follow=follow)


def last(run_dir):
    return torch.load(run_dir / "checkpoints" / "last.pt")


def test_each_recipe_is_short_and_tested():
    assert len(RECIPES) == 11
    tested = (ROOT / "tests" / "test_recipes.py").read_text()
    for title in RECIPES:
        code = [re.findall(NEW[b.language], b.text, re.MULTILINE) for b in blocks(title)]
        assert sum(map(len, code)) <= 15, (title, code)
        assert f'"{title}"' in tested, title


def test_a_metric(kitchen):
    kitchen.follow("A metric of your own", "--max-steps 8")
    found = summary(kitchen.here)
    assert found["test_accuracy"] < found["test_top3"] < 1
    assert metrics(kitchen.here)[-1]["test_top3"] == found["test_top3"]


@pytest.mark.slow
def test_early_stopping(kitchen):
    """With a rate of nothing the first loss is the best. A resume trains nothing."""
    title, flags = "Early stopping, and the best checkpoint", "--model linear --lr 1e-12"
    kitchen.follow(title, flags)
    for _ in range(2):
        assert (summary(kitchen.here)["epochs"], status(kitchen.here)["state"]) == (3, "complete")
        best = torch.load(kitchen.here / "best.pt")
        assert best["progress"]["epoch"] == 1
        kitchen.give(title, flags, "--resume")


@pytest.mark.slow
def test_a_folder_of_images(kitchen, short_dir):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pytest.importorskip("torchvision", reason="needs torchvision")
    sets = data.load_dataset("synthetic", str(short_dir))
    for part, digits in zip(("train", "test"), sets, strict=True):
        for number in range(480):
            pixels, label = digits[number]
            path = kitchen.folder / "pictures" / part / str(int(label)) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(pixels.numpy()).resize((40, 40)).save(path)
    kitchen.follow("A folder of images", "--epochs 6", "--batch-size 24")
    assert summary(kitchen.here)["test_count"] == 480
    assert summary(kitchen.here)["test_accuracy"] > 0.5
    # Random transforms go by the position in the run. So the weights are the same, whatever ranks
    # and workers there are, and after an interruption within an epoch.
    code = (kitchen.folder / "data.py").read_text()
    code = code.replace("import Compose", "import Compose, RandomRotation")
    code = code.replace("Compose([", "Compose([RandomRotation(30), ")
    assert code.count("RandomRotation") == 2
    (kitchen.folder / "data.py").write_text(code)
    commands = {
        "single": "python train_single.py --batch-size 48",
        "dp": "python train_dp.py --batch-size 24 --replicas 2",
        "ddp": "torchrun --standalone --nproc_per_node 2 train_ddp.py --batch-size 24",
    }
    for name, command in commands.items():
        for steps in ("5", "14 --resume") if name == "ddp" else ("14",):
            more = "--dataset folder --data-dir pictures --num-workers 2 --model mlp"
            more += f" --run-dir runs/{name} {QUIET} --max-steps {steps}"
            words, variables = shell_line(f"{command} {more}")
            succeed(run(*words, cwd=kitchen.folder, timeout=120, **variables))
    weights = [last(kitchen.folder / "runs" / name)["model"] for name in commands]
    torch.testing.assert_close(weights[1], weights[0])
    torch.testing.assert_close(weights[2], weights[0])


@pytest.mark.slow
def test_a_stream(kitchen):
    ended = kitchen.follow("An IterableDataset", "--epochs 2")
    assert re.search(r"^epoch 2: loss \d\.\d+, [89]\d\.\d+% of 500$", ended.stdout, re.MULTILINE)
    stream = runpy.run_path(str(kitchen.folder / "my_stream.py"))["Stream"]
    loaders = [DataLoader(stream(range(14), rank, 2), 1, num_workers=2) for rank in range(2)]
    shares = [[int(batch) for batch in loader] for loader in loaders]
    assert [sorted(share) for share in shares] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "flags", "optimizer"),
    [
        ("Weights for the samples", "--epochs 2", "SGD"),
        ("AdamW with groups", "--epochs 2", "AdamW"),
        ("An average of the weights", "--epochs 4 --batch-size 16", "SGD"),
    ],
)
def test_it_learns(title, flags, optimizer, kitchen):
    kitchen.follow(title, flags)
    assert summary(kitchen.here)["test_accuracy"] > 0.8
    saved = last(kitchen.here)
    assert saved["identity"]["optimizer"] == optimizer
    if "average" in title:
        ema, weights = saved["extra"]["ema"], saved["model"]
        assert {name.removeprefix("module.") for name in ema} - {"n_averaged"} == {*weights}
        assert not ema["module.classifier.bias"].equal(weights["classifier.bias"])


def test_a_tracker_logs_once_on_rank_0(kitchen):
    (kitchen.folder / "wandb.py").write_text(TRACKER)
    kitchen.follow("Weights & Biases or MLflow", "--epochs 2")
    first, *rows = map(json.loads, (kitchen.folder / "tracked.jsonl").read_text().splitlines())
    assert first == ["here", None]
    assert [step for _, step in rows] == [1920, 3840]
    assert rows[-1][0]["accuracy"] == summary(kitchen.here)["test_accuracy"]


@pytest.mark.slow
def test_inference(kitchen):
    ended = kitchen.follow("Inference in a script of its own")
    found, labels = map(json.loads, re.findall(r"\[.*?\]", ended.stdout))
    assert sum(a == b for a, b in zip(found, labels, strict=True)) >= 3


@pytest.mark.slow
def test_frozen_layers(kitchen):
    ended = kitchen.follow("Frozen layers")
    assert "running statistics" not in ended.stdout
    before, after = (last(kitchen.folder / "runs" / name)["model"] for name in ("digits", "here"))
    changed = {name.partition(".")[0] for name in before if not before[name].equal(after[name])}
    assert changed == {"classifier"}


def test_spawn(kitchen):
    """The ranks' gradients are 0 and 2."""
    ended = kitchen.follow("mp.spawn")
    mean = [[1.0] * 4]
    for rank in range(2):  # whose lines may mix
        assert f"rank {rank}: {mean}" in ended.stdout
