"""The check of anyone's DDP script: each mistake is found, and no right script is called wrong."""

import json
import re
import subprocess
import sys

import pytest

from tests.sources import ROOT

sys.path.insert(0, str(ROOT / "scripts/check"))
from check import Ranks
from verdict import TABLE

SCRIPT = (ROOT / "scripts/minimal/ddp.py").read_text()
DATA = """train_set, test_set = (
        torch.utils.data.TensorDataset(
            torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(count)),
            torch.arange(count) % 10,
        )
        for count in (600, 100)
    )"""
HEAD, *VARIANTS = (ROOT / "tests/check_variants.txt").read_text().split("\n= ")


def edits(lines):
    """Return texts by the names before their colons. A line of an indentation goes on."""
    return dict(re.findall(r"^((?:before |after )?\w+):[^\S\n]?(.*(?:\n .*)*)$", lines, re.M))


EDITED = edits(HEAD)
ALL = {title: edits(own) for title, _, own in (text.partition(" | ") for text in VARIANTS)}


def variants(level):
    """Return the edits of each variant of a level, by its name."""
    return {title.partition(": ")[2]: own for title, own in ALL.items() if title.startswith(level)}


def edited(own):
    """Return the minimal script with each edit made. What is edited has to be there."""
    own = {"root": f'"{ROOT}"', "data": DATA, **RIGHT.get(own.get("like"), {}), **own}
    text = SCRIPT
    for key in (key for key in own if key != "like"):
        place, _, name = key.rpartition(" ")
        before, old, after = text.rpartition(EDITED[name])
        assert old, f"scripts/minimal/ddp.py has no longer: {EDITED[name]}"
        indent = before[before.rindex("\n") :]
        added = {"before": own[key] + indent + old, "after": old + indent + own[key]}
        text = before + added.get(place, own[key].replace("{}", old)) + after
    return text


WRONG, WARN, NOTE, RIGHT = (variants(level) for level in ("WRONG", "WARN", "NOTE", "RIGHT"))
ON_TWO_HOSTS = {"device by global rank", "equal ranks"}
REENTRANT = """import torch, torch.distributed as dist
from torch.utils.checkpoint import checkpoint
dist.init_process_group("gloo")

class Checkpointed(torch.nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)

wrap = torch.nn.parallel.DistributedDataParallel
model = wrap(Checkpointed(2, 2), find_unused_parameters=True)
model(torch.rand(2, 2, requires_grad=True)).sum().backward()
"""
FAILS = {  # what the verdict says, and a script
    "it needs the package nowhere_at_all": "import nowhere_at_all",
    "it uses accelerate": "import accelerate",
    "it needs a real GPU": "from torch.utils import cpp_extension\n"
    "cpp_extension.CUDA_HOME = None\ncpp_extension.CUDAExtension('own', [])",
    "not done after 5 s (--limit): rank 0 at theirs.py:": "while True:\n    pass",
    "it makes no process group": "import torch",
    "ZeroDivisionError: division by zero, on rank 0 at theirs.py:1": "1 / 0",
    "it wraps no model": "import torch.distributed as dist\ndist.init_process_group('gloo')",
    "No such file or directory: '/no/such/file'": "open('/no/such/file')",
    "it ended with exit status 3": "import sys\nsys.exit(3)",
    "Expected to mark a variable ready only once": REENTRANT,
    "the process died": "import os\nos.abort()",
}
OPTIMIZERS = """import torch, torch.distributed as dist, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
for kind in vars(torch.optim).values():
    if not isinstance(kind, type) or kind in (torch.optim.Optimizer, torch.optim.SparseAdam):
        continue
    for amp in (None, torch.float16, torch.bfloat16):
        model = DistributedDataParallel(torch.nn.Linear(4, 3, bias=False).cuda())
        optimizer = kind(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda", enabled=amp == torch.float16)

        def closure():
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=amp, enabled=amp is not None):
                loss = F.mse_loss(model(torch.rand(2, 4, device="cuda")), torch.ones(2, 3).cuda())
            scaler.scale(loss).backward()
            return loss

        if kind is torch.optim.LBFGS:
            optimizer.step(closure)
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()
"""


OUTSIDE = """import contextlib, ctypes, os, shutil, sys
from pathlib import Path
os.environ["RANK"] == "0" or sys.exit(0)
other = Path("OTHER")
libc = ctypes.CDLL(None)
if libc.syscall(444, None, 0, 1) > 1:  # the kernel has Landlock
    assert libc.creat(b"OTHER/logs/x", 0o600) == libc.creat(b"../other/c", 0o600) == -1
(other / "new").mkdir()
(other / "new/y").write_text("2")
assert (other / "new/y").read_text() == "2"
with (other / "logs/x").open("a") as file:
    file.write("3")
assert (other / "logs/x").read_text() == Path("../other/logs/x").read_text() == "13"
(other / "logs/x").chmod(0)
(other / "logs/x").unlink()
shutil.rmtree(other / "logs")
with contextlib.suppress(PermissionError):
    os.remove("x", dir_fd=os.open(other / "logs", os.O_RDONLY))
with contextlib.suppress(PermissionError):
    os.rename(src=other / "logs/x", dst="x")
"""


@pytest.fixture(scope="module")
def ranks():
    with Ranks() as ranks:
        yield ranks


def check(ranks, folder, text, **options):
    folder.mkdir(exist_ok=True)
    (folder / "theirs.py").write_text(text)
    verdict = ranks.check(folder / "theirs.py", [], folder=folder, **options)
    assert [path.name for path in folder.iterdir()] == ["theirs.py"]
    return verdict


def kinds(verdict, *levels):
    return [finding.kind for finding in verdict.findings if finding.level in levels]


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_wrong_and_nothing_else_is(ranks, tmp_path, name):
    found = check(ranks, tmp_path, edited(WRONG[name]), nodes=1 + (name in ON_TWO_HOSTS))
    assert kinds(found, "WRONG") == [name.split(" by a ")[0]], found
    assert found.status == 1
    assert found.findings[0].line.startswith("theirs.py:"), found


@pytest.mark.parametrize("name", WARN | NOTE)
def test_what_may_be_a_mistake_is_no_more_than_a_warning(ranks, tmp_path, name):
    found = check(ranks, tmp_path, edited((WARN | NOTE)[name]))
    assert kinds(found, "WRONG", "WARN" if name in WARN else "NOTE") == [name.split(" by a ")[0]]
    assert name in WARN or not kinds(found, "WARN"), found
    assert found.status == 0, found


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_clean(ranks, tmp_path, name):
    found = check(ranks, tmp_path, edited(RIGHT[name]))
    assert (found.findings, found.could_not) == ([], ""), found


@pytest.mark.parametrize("said", FAILS)
def test_what_cannot_be_run_is_no_finding(ranks, tmp_path, said):
    found = check(ranks, tmp_path, FAILS[said], limit=5 if "--limit" in said else 60)
    assert (found.findings, found.status) == ([], 3)
    assert said in found.could_not.replace(", on rank 1 at", ", on rank 0 at"), "either is first"


def test_what_lies_outside_stays_as_it_is(ranks, tmp_path):
    other = tmp_path / "other"
    (other / "logs").mkdir(parents=True)
    (other / "logs/x").write_text("1")
    found = check(ranks, tmp_path / "own", OUTSIDE.replace("OTHER", str(other)))
    assert "it makes no process group" in found.could_not, found
    assert f"writing to {other}" in str(found)
    assert [(p.name, p.is_dir() or p.read_text()) for p in sorted(other.rglob("*"))] == [
        ("logs", True),
        ("x", "1"),
    ]


def test_every_optimizer_and_every_mode_of_amp_runs(ranks, tmp_path):
    found = check(ranks, tmp_path, OPTIMIZERS)
    assert (found.findings, found.could_not) == ([], ""), found


@pytest.mark.parametrize("script", ["minimal/ddp.py", "minimal/ddp_complete.py", "../train_ddp.py"])
def test_the_scripts_of_this_collection_are_right(ranks, script):
    found = ranks.check(ROOT / "scripts" / script, ["--dataset", "synthetic"], folder=ROOT)
    assert (found.findings, found.could_not) == ([], ""), found


def test_each_finding_of_the_table_is_shown_and_names_a_lesson_that_exists():
    assert set(TABLE) == {name.split(" by a ")[0] for name in WRONG | WARN | NOTE}
    for row in TABLE.values():
        assert not row.lesson or (ROOT / f"scripts/lessons/{row.lesson}.py").exists()


def test_the_command_starts_a_module_speaks_json_and_ends_with_its_status(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/beside.py").write_text("package = 'nowhere_at_all'")
    (tmp_path / "own/theirs.py").write_text("from .beside import package\n__import__(package)")
    command = [sys.executable, str(ROOT / "scripts/check/check.py"), "--json", "-m", "own.theirs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == json.loads(done.stdout)["status"] == 3, done.stderr
    assert "it needs the package nowhere_at_all" in done.stdout
    assert subprocess.run(command[:2], capture_output=True, timeout=60).returncode == 2
