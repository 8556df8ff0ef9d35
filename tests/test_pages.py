"""The pages: links, commands, diffs and snippets are right, and the Chinese ones have the same."""

import argparse
import re
import runpy
import shlex
import sys

import pytest
import torch
import torch.distributed as dist  # noqa: F401  for the snippets
import torch.nn.functional as F
from torch import nn
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.transforms.functional import to_pil_image

from tests.helpers import in_group
from tests.processes import ROOT, succeed, torchrun

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
def test_a_chinese_page_has_the_code_of_the_english_one(page):
    def find(text):
        return [re.sub(r"(?m) *(#|@@|<--).*", "", block) for _, block in FENCE.findall(text)]

    assert find(PAGES[page]) == find(PAGES[page.replace(".zh-CN", "")])


@pytest.mark.parametrize("page", CHINESE)
def test_a_chinese_page_answers_what_the_english_one_does_in_the_same_order(page):
    """By its headings: their number, their levels, and the messages that they quote."""

    def find(text):
        headings = re.findall(r"(?m)^(#+) (.*)$", FENCE.sub("", text))
        return [(level, re.findall("`.+?`", heading)) for level, heading in headings]

    assert find(PAGES[page]) == find(PAGES[page.replace(".zh-CN", "")])


class ParsedError(Exception):
    """A script has parsed its command line, and is stopped there."""


def commands():
    """Yield the commands in the blocks, and those that are quoted in the text."""
    for page, text in PAGES.items():
        for block in blocks(page, "bash", "sh"):
            yield from (line.strip() for line in block.splitlines() if line.strip())
        quoted = re.findall(r"`((?:python|torchrun|sbatch)\s[^`]+)`", FENCE.sub("", text))
        yield from (" ".join(each.split()) for each in quoted)


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
        old, new = ("".join(x[1:] for x in lines if x[0] in kinds) for kinds in (" -", " +"))
        if old:  # a hunk that only adds lines goes below the one before it
            assert text.count(f"\n{old}") == 1, f"is not there once:\n{old}"
            end = text.index(f"\n{old}") + 1
        text = text[:end] + new + text[end + len(old) :]
        end += len(new)
    return text


REGRESSION = """
import torch
from torch.utils.data import TensorDataset
def load(data_dir):
    x = torch.randn(600, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    y = x[:, 0, 0, :10]
    return TensorDataset(x[:480], y[:480]), TensorDataset(x[480:], y[480:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("page", ["docs/running.md", "docs/recipes.md"])
def test_a_patched_train_ddp_trains_and_resumes(page, tmp_path, digits_dir):
    diffs = [text for text in blocks(page, "diff") if text.startswith("--- train_ddp.py")]
    assert sum("--- train_ddp.py" in text for text in PAGES.values()) == 2
    diff = "".join(diffs)  # the recipes work together
    for name in ("data.py", "models.py", "utils"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = apply(diff, (ROOT / "train_ddp.py").read_text())
    (tmp_path / "train_ddp.py").write_text(f"import shutil\n{text}")
    (tmp_path / "my_data.py").write_text(REGRESSION)
    command = torchrun(2, "train_ddp.py", "--no-tensorboard", "--run-dir", "run")
    command += ["--batch-size", 48, "--data-dir", digits_dir]
    if "mse_loss" in diff:
        command += ["--dataset", "my_data:load", "--model", "linear", "--max-grad-norm", 0]
    first = succeed(*command, cwd=tmp_path).text
    again = succeed(*command, "--epochs=2", "--resume", cwd=tmp_path).text
    assert "epoch   1" in first, first
    assert "epoch   2" in again, again
    assert ("mse_loss" in diff) == (" error 0." in again), again
    assert ("best.pt" in diff) == (tmp_path / "run" / "best.pt").exists()


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
epochs, batch_size = 3, 16
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


@pytest.mark.slow
def test_the_nine_changes_make_a_script_for_ddp(tmp_path):
    changes = PAGES["docs/convert.md"].partition("## Then")[0]
    diffs = re.findall(r"(?ms)^```diff\n(.*?)^```$", changes)
    text = apply("@@\n".join(diffs), OWN_SCRIPT)
    workers, evaluate, mean_loss = re.findall(r"(?ms)^```python\n(.*?)^```$", changes)
    text = text.replace("model = MyModel", f"{evaluate}{workers}model = MyModel")
    text += f"loss = torch.tensor(float(rank))\n{mean_loss}"
    text += "shown = rank, count, correct / count > 0.9, len(train_loader), mean_loss.item()\n"
    text += "open(f'{rank}.txt', 'w').write(str(shown))\n"
    text += "dist.destroy_process_group()\n"
    text = text.replace('"nccl"', '"gloo"').replace('device("cuda")', 'device("cpu")')
    text = re.sub(r"torch.cuda.set_device.*\n", "", text)
    (tmp_path / "train.py").write_text(text)
    succeed(*torchrun(2, "train.py"), cwd=tmp_path)
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.txt").read_text() == f"({rank}, 143.0, True, 15, 0.5)"
    assert {*torch.load(tmp_path / "model.pt")} > {"0.weight", "1.running_mean"}


# Files, what another test runs, a debugger and a compiler.
NO_SNIPPET = re.compile(r"^# my_|import data\b|def evaluate|breakpoint|\.compile\(")
ALL = [block for page in PAGES if page not in CHINESE for block in blocks(page, "python")]


@pytest.mark.filterwarnings("ignore")  # autocast and GradScaler say that there is no GPU
@pytest.mark.parametrize("text", [block for block in ALL if not NO_SNIPPET.search(block)])
def test_a_snippet_runs(text, tmp_path, monkeypatch):
    """In a process of its own, because a later fork may not inherit a process group."""
    monkeypatch.chdir(tmp_path)
    assert in_group(lambda rank: run_snippet(text), 1) == [None]


def run_snippet(text):
    """Run a page's code among the names that a script has there."""
    images, labels = torch.randn(320, 8), torch.randint(2, (320,))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train_set, batch_size, device = TensorDataset(images, labels), 8, torch.device("cpu")
    train_loader = DataLoader(train_set, batch_size)
    train_sampler: DistributedSampler = DistributedSampler(train_set)
    rank, local_rank, world_size, epoch, accumulation_steps, prepare_data = 0, 0, 1, 0, 3, list
    sums, epochs = torch.ones(3), 9
    loss_function, micro_batches = F.cross_entropy, [(images, labels)]
    weights, samples, train_step = torch.ones(320), range(100), F.cross_entropy
    loss = losses = F.cross_entropy(model(images), labels)
    is_regression = "mse_loss(model(inputs), targets)" in text
    loader = [(images, torch.zeros(320, 2))] if is_regression else train_loader
    exec(text, {**globals(), **locals()})


def test_all_ranks_skip_a_batch_that_is_bad_on_one_rank():
    (text,) = (each for each in blocks("docs/problems.md", "python") if "is_good" in each)

    def train(rank):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        before = model.module.weight.item()
        names = globals() | {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}
        for inputs in ([1.0, float("nan")], [2.0, 4.0]):  # one for each rank
            exec(text, names | {"loss": model(torch.tensor([inputs[rank]]))})
        return before - model.module.weight.item()

    assert in_group(train, 2) == [pytest.approx(0.3)] * 2


@pytest.mark.slow
def test_own_model_and_data_and_a_prediction(tmp_path):
    for name in ("data.py", "models.py", "utils"):
        (tmp_path / name).symlink_to(ROOT / name)
    for text in (*blocks("docs/running.md", "python"), *blocks("docs/recipes.md", "python")):
        begin = re.match(r"# (my_\w+\.py)", text)
        if begin or "import data\n" in text:
            (tmp_path / (begin[1] if begin else "predict.py")).write_text(text)
    flags = ["--dataset", "my_data:load", "--no-tensorboard", "--epochs", 5, "--run-dir"]
    own = ["--model", "my_network:MyNetwork"]
    ended = succeed(*torchrun(2, ROOT / "train_ddp.py", *own, *flags, "first"), cwd=tmp_path)
    assert float(re.findall(r"test .*accuracy (\S+)", ended.text)[-1]) > 0.95, ended.text
    # With the data's labels, a spot at the top left is class 0.
    succeed(sys.executable, ROOT / "train_single.py", *flags, "second", cwd=tmp_path)
    picture = torch.zeros(28, 28, dtype=torch.uint8)
    picture[4:12, 2:6] = 255
    to_pil_image(picture).save(tmp_path / "picture.png")
    command = [sys.executable, "predict.py", "second/checkpoints/last.pt", "picture.png"]
    assert "class 0" in succeed(*command, cwd=tmp_path).text


@pytest.mark.slow
def test_the_examples_learn(tmp_path):
    lines = [f"{n % 2}\ta {word} film" for n, word in enumerate(["good", "bad"] * 150)]
    for part in ("train", "test"):
        (tmp_path / f"{part}.txt").write_text("\n".join(lines))
    (tmp_path / "train.txt").write_text("\n".join([*lines, "", *["1\t"] * 40]))
    examples = ROOT / "docs" / "examples"
    ended = succeed(*torchrun(2, examples / "text.py", "--data-dir", "."), cwd=tmp_path)
    assert "epoch 5: accuracy 100.0% of 300" in ended.text, ended.text
    generator = torch.Generator().manual_seed(0)
    for channel, name in enumerate(("red", "green")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(60):
            picture = torch.randint(80, (3, 40, 40), dtype=torch.uint8, generator=generator)
            picture[channel] += 150
            to_pil_image(picture).save(tmp_path / "pictures" / name / f"{number}.png")
    command = torchrun(2, examples / "pictures.py", "--num-workers", 0, "--epochs", 8)
    command += ["--batch-size", 8]
    first = succeed(*command, "--patience", 0, cwd=tmp_path).stdout  # which stops after an epoch
    rest = succeed(*command, "--resume", cwd=tmp_path).stdout
    assert first.startswith("2 classes, 96 images to train\nepoch 1: "), first
    assert "train\nepoch 2: " in rest
    assert "accuracy 100.0%" in rest
    assert {*torch.load(tmp_path / "best.pt")} > {"0.weight", "1.running_mean"}
