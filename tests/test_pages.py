"""The pages: links, commands, diffs and snippets are right, and the Chinese ones have the same."""

import argparse
import json
import re
import runpy
import shlex
import sys

import pytest
import torch
from torch.distributed.run import get_args_parser
from torch.utils.data import Subset, TensorDataset
from torchvision.transforms.functional import to_pil_image

import train_ddp
from tests.helpers import in_group, train_of
from tests.processes import ROOT

EXAMPLES = ROOT / "docs" / "examples"
PATHS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
PAGES = {str(p.relative_to(ROOT)): p.read_text() for p in PATHS}
CHINESE = [page for page in PAGES if page.endswith(".zh-CN.md")]
FENCE = re.compile(r"(?ms)^ *```(\w*)\n(.*?)^ *```$")


def blocks(page, *languages):
    """Return the code blocks of a page in one of the languages."""
    return [text for language, text in FENCE.findall(PAGES[page]) if language in languages]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(\s*([^)\s]+)\s*\)", FENCE.sub("", PAGES[page]))
    for link in (each for each in links if not each.startswith("http")):
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), link
        if anchor:  # as GitHub makes it from a heading
            headings = re.findall(r"(?m)^#+ (.*)$", FENCE.sub("", path.read_text()))
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, link


@pytest.mark.parametrize("page", CHINESE)
def test_a_chinese_page_has_the_parts_and_the_code_of_the_english_one(page):
    """By the code without its comments, and by the headings: their levels, and what they quote."""

    def find(text):
        code = [re.sub(r"(?m) *(#|@@|<--).*", "", block) for _, block in FENCE.findall(text)]
        headings = re.findall(r"(?m)^(#+) (.*)$", FENCE.sub("", text))
        return code, [(level, re.findall("`.+?`", heading)) for level, heading in headings]

    assert find(PAGES[page]) == find(PAGES[page.replace(".zh-CN", "")])


class ParsedError(Exception):
    """A script has parsed its command line, and is stopped there."""


def commands():
    """Yield the commands of the blocks, those quoted in the text, and those of the notebook."""
    for page, text in PAGES.items():
        for block in blocks(page, "bash", "sh"):
            yield from (line.strip() for line in block.splitlines() if line.strip())
        quoted = re.findall(r"`((?:python|torchrun|sbatch)\s[^`]+)`", FENCE.sub("", text))
        yield from (" ".join(each.split()) for each in quoted)
    notebook = json.loads((ROOT / "docs" / "two_gpus.ipynb").read_text())
    lines = [line.strip() for cell in notebook["cells"] for line in cell["source"]]
    yield from (line[1:] for line in lines if line.startswith("!"))


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_a_command_is_understood(command, monkeypatch):
    for path in re.findall(r"(?<![\w~/])(?:\./)?((?:scripts|docs|tests)/[\w./]+\w)", command):
        assert (ROOT / path).exists(), path
    words = shlex.split(re.sub(r"\$(NODE|PORT)", "0", command), comments=True)
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    if words and words[0].lstrip("!") == "torchrun":
        args = get_args_parser().parse_args(words[1:])
        words = ["python", args.training_script, *args.training_script_args]
    if not words or words[0] != "python" or not re.match(r"(train_|scripts/tools|docs)", words[1]):
        return
    original = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self, *args):
        unknown = original(self, *args)[1]
        assert not unknown, f"unrecognized arguments: {unknown}"
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(sys, "argv", words[1:])
    with pytest.raises(ParsedError):
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")


@pytest.mark.parametrize(
    ("page", "before", "after", "mark"),
    [
        ("README.md", "single", "ddp", "= DDP(model)"),
        ("docs/convert.md", "ddp", "ddp_resume", "broadcast_object_list"),
    ],
)
def test_a_diff_of_two_minimal_scripts_is_theirs(page, before, after, mark):
    folder = ROOT / "scripts" / "minimal"
    old, new = ((folder / f"{x}.py").read_text().splitlines() for x in (before, after))
    (diff,) = (text for text in blocks(page, "diff") if mark in text)
    for line in diff.splitlines():
        if line[0] != "@":
            here = (line[0] in " -", line[0] in " +")
            assert (line[1:] in old, line[1:] in new) == here, line


def apply(diff, text):
    """Apply a diff whose hunks are found by their lines."""
    end = 0
    for hunk in re.split(r"(?m)^(?:@@|---).*\n", diff):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        if old:  # a hunk that only adds lines goes below the one before it
            assert text.count(f"\n{old}") == 1, f"is not there once:\n{old}"
            end = text.index(f"\n{old}") + 1
        text = text[:end] + new + text[end + len(old) :]
        end += len(new)
    return text


def regression(data_dir):
    images = torch.randn(600, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    whole = TensorDataset(images, images[:, 0, 0, :10])
    return Subset(whole, range(480)), Subset(whole, range(480, 600))


def test_a_patched_train_ddp_is_a_regression_that_keeps_its_best_and_resumes(train, monkeypatch):
    text = "import shutil\n" + (ROOT / "train_ddp.py").read_text()
    for page in ("docs/running.md", "docs/recipes.md"):
        [diff] = [each for each in blocks(page, "diff") if each.startswith("--- train_ddp.py")]
        text = apply(diff, text)
    monkeypatch.setattr(train_ddp, "train", train_of(text))
    flags = ["--no-tensorboard", "--batch-size", 48, "--model", "linear", "--max-grad-norm", 0]
    flags += ["--dataset", "tests.test_pages:regression"]
    train("run", *flags, script="ddp", ranks=2)
    run = train("run", *flags, "--epochs", 2, "--resume", script="ddp", ranks=2)
    assert len(run.rows) == 2
    assert run.summary["test_error"] < 0.9, "less than without training"
    assert (run.folder / "best.pt").exists()


OWN_SCRIPT = """
import torch
from torch.utils.data import DataLoader
from torch import nn
def my_data():
    inputs = torch.randn(643, 8)
    both = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    return torch.utils.data.random_split(both, [500, 143])
def MyModel():
    return nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2))
device = torch.device("cuda")
epochs = 3
batch_size = 16
torch.manual_seed(0)
train_set, test_set = my_data()
train_loader = DataLoader(train_set, batch_size, shuffle=True)
test_loader = DataLoader(test_set, 500)
model = MyModel().to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.3)
for epoch in range(epochs):
    for images, labels in train_loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
sums = evaluate(model, test_loader)
loss, correct, count = sums.tolist()
torch.save(model.state_dict(), "model.pt")
"""


def test_the_nine_changes_make_a_script_for_ddp(run_ranks, tmp_path):
    changes = PAGES["docs/convert.md"].partition("## Then")[0]
    diffs = re.findall(r"(?ms)^```diff\n(.*?)^```$", changes)
    workers, evaluate, mean_loss = re.findall(r"(?ms)^```python\n(.*?)^```$", changes)
    text = apply("@@\n".join(diffs), OWN_SCRIPT)
    text = text.replace("model = MyModel", f"{evaluate}{workers}model = MyModel")
    text += f"loss = torch.tensor(float(rank))\n{mean_loss}"
    text += "print([rank, count, correct / count > 0.9, len(train_loader), mean_loss.item()])\n"
    text = text.replace('"nccl"', '"gloo"').replace('device("cuda")', 'device("cpu")')
    text = re.sub(r"torch.cuda.set_device.*\n", "", text)
    script = tmp_path / "train.py"
    script.write_text(text)
    statuses, output = run_ranks(script, 2, cwd=tmp_path)
    assert statuses == [0, 0]
    results = [f"[{rank}, 143.0, True, 15, 0.5]" for rank in (0, 1)]
    # Two ranks may print their lines before one of them ends its line.
    assert sorted(re.findall(r"\[.*?\]", output)) == results
    assert {*torch.load(tmp_path / "model.pt")} > {"0.weight", "1.running_mean"}


# Files, what another test runs, a debugger, a compiler, and a loop for regression.
NO_SNIPPET = re.compile(r"^# my_|import data\b|def evaluate|breakpoint|\.compile\(|mse_loss")
ALL = [block for page in PAGES if page not in CHINESE for block in blocks(page, "python")]
# The names that a script has where a page shows some lines of it.
NAMES = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
rank = 0
local_rank = 0
world_size = 1
epoch = 0
epochs = 9
batch_size = 8
accumulation_steps = 3
device = torch.device("cpu")
images = torch.randn(320, 8)
labels = torch.randint(2, (320,))
train_set = TensorDataset(images, labels)
train_sampler = DistributedSampler(train_set)
train_loader = DataLoader(train_set, batch_size)
loader = train_loader
micro_batches = [(images, labels)]
weights = torch.ones(320)
samples = range(100)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss_function = F.cross_entropy
train_step = F.cross_entropy
loss = F.cross_entropy(model(images), labels)
losses = loss
sums = torch.ones(3)
prepare_data = list
"""


@pytest.mark.filterwarnings("ignore")  # autocast and GradScaler say that there is no GPU
@pytest.mark.parametrize("text", [block for block in ALL if not NO_SNIPPET.search(block)])
def test_a_snippet_runs(text, tmp_path, monkeypatch):
    """In a process of its own, because a later fork may not inherit a process group."""
    monkeypatch.chdir(tmp_path)
    assert in_group(lambda rank: exec(NAMES + text, {}), 1) == [None]


def test_own_model_and_data_and_a_prediction(train, run_ranks, tmp_path, monkeypatch):
    for text in (*blocks("docs/running.md", "python"), *blocks("docs/recipes.md", "python")):
        begin = re.match(r"# (my_\w+\.py)", text)
        if begin or "import data\n" in text:
            (tmp_path / (begin[1] if begin else "predict.py")).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--dataset", "my_data:load", "--no-tensorboard"]
    more = ["--model", "my_network:MyNetwork", "--epochs", 5]
    own = train("own", *flags, *more, script="ddp", ranks=2)
    assert own.summary["test_accuracy"] > 0.95
    run = train("run", *flags, "--epochs", 2)
    picture = torch.zeros(28, 28, dtype=torch.uint8)
    picture[4:12, 2:6] = 255  # with the data's labels, a spot at the top left is class 0
    to_pil_image(picture).save(tmp_path / "picture.png")
    paths = [run.folder / "checkpoints" / "last.pt", "picture.png"]
    _, output = run_ranks(tmp_path / "predict.py", 1, *paths, cwd=tmp_path)
    assert output == "class 0, 100%\n", "less sure if batch normalisation is still training"


@pytest.mark.slow
def test_the_example_of_sentences_learns(run_ranks, tmp_path):
    lines = [f"{number % 2}\ta {word} film" for number, word in enumerate(["good", "bad"] * 150)]
    (tmp_path / "test.txt").write_text("\n".join(lines))
    (tmp_path / "train.txt").write_text("\n".join([*lines, "", *["1\t"] * 40]))
    _, output = run_ranks(EXAMPLES / "text.py", 2, "--data-dir", ".", cwd=tmp_path)
    assert "epoch 5: accuracy 100.0% of 300" in output


@pytest.mark.slow
def test_the_example_of_pictures_learns_and_resumes(run_ranks, tmp_path):
    generator = torch.Generator().manual_seed(0)
    for channel, name in enumerate(("red", "green")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(60):
            picture = torch.randint(80, (3, 40, 40), dtype=torch.uint8, generator=generator)
            picture[channel] += 150
            to_pil_image(picture).save(tmp_path / "pictures" / name / f"{number}.png")
    script = EXAMPLES / "pictures.py"
    flags = ["--num-workers", 0, "--epochs", 8, "--batch-size", 8]
    _, first = run_ranks(script, 2, *flags, "--patience", 0, cwd=tmp_path)  # stops after an epoch
    _, rest = run_ranks(script, 2, *flags, "--resume", cwd=tmp_path)
    assert first.startswith("2 classes, 96 images to train\nepoch 1: ")
    assert "train\nepoch 2: " in rest
    assert "accuracy 100.0%" in rest
    assert {*torch.load(tmp_path / "best.pt")} > {"0.weight", "1.running_mean"}
