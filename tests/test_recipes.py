"""Each recipe of docs/recipes.md runs as it is printed, and does what it says."""

import json
import os
import re
import runpy
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import data
from tests import documents
from tests.processes import (
    ROOT,
    copy_project,
    finish,
    metrics,
    ranks,
    run,
    shell_line,
    start,
    status,
    succeed,
    summary,
    wait_until,
)

TEXT = (ROOT / "docs" / "recipes.md").read_text()
HEAD, *PARTS = TEXT.split("\n## ")
RECIPES = dict(part.split("\n", 1) for part in PARTS)
QUIET = "--threads 1 --no-progress --no-tensorboard"
TRACKER = """import json

def log(values, step=None):
    with open("tracked.jsonl", "a") as file:
        print(json.dumps([values, step]), file=file)

def init(**given):
    log(given["id"])

def finish():
    log("finished")
"""


def blocks(title):
    """Return a recipe's code. Without a command it has that of the page."""
    found = documents.blocks(RECIPES[title])
    return found if documents.commands_of(found) else found + documents.blocks(HEAD)


@pytest.fixture
def kitchen(short_dir, tmp_path):
    """A copy of the project, in which ``follow`` does what a recipe says."""

    def follow(title, *flags):
        """Make a recipe's changes, and give its commands. The last one trains in runs/here."""
        documents.follow(blocks(title), tmp_path)
        for command in documents.commands_of(blocks(title)):
            line = f"{command} {' '.join(flags)}"
            if re.search(r"^(python|torchrun) .*train_\w+\.py", line):
                line += f" {QUIET}" + " --run-dir runs/here" * ("--run-dir" not in line)
            words, variables = shell_line(line)
            ended = succeed(run(*words, cwd=tmp_path, timeout=120, **variables))
        return ended

    copy_project(tmp_path, short_dir)
    return SimpleNamespace(folder=tmp_path, here=tmp_path / "runs" / "here", follow=follow)


def tracked(kitchen):
    lines = (kitchen.folder / "tracked.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def draw_pictures(folder, classes, count, parts=("",)):
    """Make pictures of one colour each, which is the class, with some noise."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pytest.importorskip("torchvision", reason="needs torchvision")
    generator = torch.Generator().manual_seed(0)
    levels = torch.tensor([30, 80, 130, 180, 230])
    for part in parts:
        for number in range(classes):
            path = folder / part / f"{number:03}"
            path.mkdir(parents=True)
            colour = levels[[number // 25, number // 5 % 5, number % 5]]
            for i in range(count):
                noise = torch.randint(-12, 13, (40, 40, 3), generator=generator)
                image.fromarray((colour + noise).byte().numpy()).save(path / f"{i}.png")


def last(run_dir):
    return torch.load(run_dir / "checkpoints" / "last.pt")


def test_each_recipe_is_tested():
    tested = (ROOT / "tests" / "test_recipes.py").read_text()
    assert {title for title in RECIPES if f'"{title}"' not in tested} == set()


def test_a_metric(kitchen):
    kitchen.follow("A metric of your own", "--max-steps 8")
    found = summary(kitchen.here)
    assert found["test_accuracy"] < found["test_top3"] < 1
    assert metrics(kitchen.here)[-1]["test_top3"] == found["test_top3"]


@pytest.mark.slow
def test_early_stopping(kitchen):
    """With a rate of nothing the first loss is the best."""
    title = "Early stopping, and the best checkpoint"
    kitchen.follow(title, "--model linear --lr 1e-12")
    assert (summary(kitchen.here)["epochs"], status(kitchen.here)["state"]) == (3, "complete")
    assert torch.load(kitchen.here / "best.pt")["progress"]["global_step"] == 10


@pytest.mark.slow
def test_a_project_of_ones_own_begins_with_a_copy(kitchen):
    title = "Start a project from it"
    documents.follow(blocks(title), kitchen.folder)
    copy, train = documents.commands_of(blocks(title))
    succeed(run(*shell_line(copy)[0], cwd=kitchen.folder))
    # What the page says to leave out, nothing else needs.
    for name in ("train_single.py", "train_dp.py", "utils/data_parallel.py"):
        (kitchen.folder / name).unlink()
    for name in ("docs", "scripts"):
        shutil.rmtree(kitchen.folder / name)
    words, variables = shell_line(f"{train} --max-steps 4 {QUIET} --run-dir runs/here")
    succeed(run(*words, cwd=kitchen.folder, timeout=120, **variables))
    assert json.loads((kitchen.here / "args.json").read_text())["image_size"] == 28


@pytest.mark.slow
def test_a_whole_project_is_killed_and_goes_on_with_another_number_of_ranks(kitchen):
    draw_pictures(kitchen.folder / "pictures", 100, 12)
    (kitchen.folder / "wandb.py").write_text(TRACKER)
    early = documents.blocks(RECIPES["Early stopping, and the best checkpoint"])
    documents.follow([b for b in early if b.language == "python"], kitchen.folder)
    documents.follow([b for b in blocks("A whole project") if b.language != "bash"], kitchen.folder)
    [command] = documents.commands_of(blocks("A whole project"))
    line = f"{command} {QUIET} --batch-size 12 --max-steps 160"
    words, variables = shell_line(line)
    process = start(*words, cwd=kitchen.folder, **variables)
    here = kitchen.folder / "runs" / "birds"
    wait_until(lambda: (here / "best.pt").exists())
    for pid in ranks().values():
        os.kill(pid, signal.SIGKILL)
    assert finish(process).returncode != 0
    assert status(here)["state"] == "running"
    more, variables = shell_line(f"{line} --resume".replace("nproc_per_node 2", "nproc_per_node 3"))
    succeed(run(*more, cwd=kitchen.folder, timeout=300, **variables))
    found, rows = summary(here), metrics(here)
    assert found["val_count"] == 240
    assert 0.1 < found["val_accuracy"] < found["val_top3"] <= 1
    assert not [name for name in {**found, **rows[-1]} if name.startswith("test")]
    losses = [row["val_loss"] for row in rows]
    assert last(here)["extra"]["history"]["losses"] == losses
    best = torch.load(here / "best.pt")
    step = next(row["global_step"] for row in rows if row["val_loss"] == min(losses))
    assert best["progress"]["global_step"] == step
    assert [tracked(kitchen)[at][0] for at in (0, -1)] == ["birds", "finished"]


@pytest.mark.slow
def test_a_symbol_weighs_the_same_in_any_batch(kitchen):
    """So two processes compute what one computes."""
    texts = kitchen.folder / "texts"
    texts.mkdir()
    for name, count in (("train", 240), ("test", 50)):
        rows = ["abc" * 20 if number % 5 == 0 else "cad" for number in range(count)]
        (texts / f"{name}.txt").write_text("\n".join(rows))
    title, flags = "Sentences of different length", "--epochs 3 --momentum 0.5 --lr 1"
    kitchen.follow(title, flags, "--num-workers 1")
    symbols = sum(map(len, (texts / "test.txt").read_text().splitlines()))
    assert summary(kitchen.here)["test_count"] == symbols
    assert summary(kitchen.here)["test_accuracy"] > 0.5
    two = last(kitchen.here)["model"]
    [command] = documents.commands_of(blocks(title))
    alone = command.replace("nproc_per_node 2", "nproc_per_node 1").replace("size 12", "size 24")
    words, variables = shell_line(f"{alone} {flags} {QUIET} --run-dir runs/alone")
    succeed(run(*words, cwd=kitchen.folder, timeout=120, **variables))
    one = last(kitchen.folder / "runs" / "alone")["model"]
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_gan(kitchen):
    kitchen.follow("Two optimizers: a GAN", "--max-steps 12 --log-every 1")
    assert [*last(kitchen.here)["extra"]] == ["judge", "judge_optimizer"]
    assert metrics(kitchen.here)[-1]["train_judge_loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "flags", "least"),
    [
        ("One file: a hundred classes", "--epochs 4", 10),
        ("One file: a model of characters", "--epochs 2", 30),
    ],
)
def test_one_file(title, flags, least, kitchen):
    draw_pictures(kitchen.folder / "pictures", 100, 6, ("train", "test"))
    (kitchen.folder / "texts").mkdir()
    (kitchen.folder / "texts" / "text.txt").write_text("the quick brown fox jumps. " * 1500)
    shown = re.findall(
        r"^epoch .* (\d+\.\d+)% of", kitchen.follow(title, flags).stdout, re.MULTILINE
    )
    assert float(shown[-1]) > least, shown


@pytest.mark.slow
def test_a_folder_of_images(kitchen):
    draw_pictures(kitchen.folder / "pictures", 10, 24, ("train", "test"))
    kitchen.follow("A folder of images", "--epochs 6", "--batch-size 24")
    assert summary(kitchen.here)["test_count"] == 240
    assert summary(kitchen.here)["test_accuracy"] > 0.2


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
        ("An average of the weights", "--max-steps 60 --batch-size 16", "SGD"),
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
    first, *rows, end = tracked(kitchen)
    assert (first, end) == (["here", None], ["finished", None])
    assert [step for _, step in rows] == [1920, 3840]
    assert rows[-1][0]["accuracy"] == summary(kitchen.here)["test_accuracy"]


@pytest.mark.slow
def test_inference(kitchen, short_dir):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    pixels, label = data.load_dataset("synthetic", str(short_dir))[1][0]
    image.fromarray(pixels.numpy()).resize((56, 56)).save(kitchen.folder / "picture.png")
    told = kitchen.follow("Inference in a script of its own").stdout
    assert re.fullmatch(rf"class {int(label)}, \d+%\n", told)
    saved = last(kitchen.folder / "runs" / "digits")
    average = {f"module.{name}": value for name, value in saved["model"].items()}
    torch.save({"model": {}, "extra": {"ema": average}}, kitchen.folder / "other.pt")
    words = [sys.executable, "my_inference.py", "other.pt", "picture.png"]
    assert succeed(run(*words, cwd=kitchen.folder)).stdout == told


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
