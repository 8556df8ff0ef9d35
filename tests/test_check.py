"""The check of anyone's DDP script: each mistake is found, and no right script is called wrong."""

import contextlib
import json
import os
import re
import subprocess
import sys
from importlib import util

import pytest
import torch

from models import build_model
from tests.processes import ROOT, run

sys.path.insert(0, str(ROOT / "scripts/check"))
import bounds
import check as tool
from verdict import TABLE

CHECK = ROOT / "scripts/check"
SCRIPT = (ROOT / "scripts/minimal/ddp.py").read_text()
DATA = """train_set, test_set = (
        torch.utils.data.TensorDataset(
            torch.randint(
                256, (count, 1, 28, 28), generator=torch.Generator().manual_seed(count)
            ).float(),
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


def variants(*levels):
    """Return a parameter for each variant of these levels."""
    found = []
    for title, own in ALL.items():
        level, _, name = title.removeprefix("SLOW ").partition(": ")
        if level in levels:
            marks = [pytest.mark.slow] if title.startswith("SLOW") else []
            if "torchvision" in str(own) and not util.find_spec("torchvision"):
                marks.append(pytest.mark.skip(reason="needs torchvision"))
            found.append(pytest.param(level, name, own, id=f"{level}: {name}", marks=marks))
    return found


def edited(own):
    """Return the minimal script with each edit made. What is edited has to be there."""
    own = {"root": f'"{ROOT}"', "data": DATA, **own}
    text = SCRIPT
    for key in own:
        place, _, name = key.rpartition(" ")
        before, old, after = text.rpartition(EDITED[name])
        assert old, f"scripts/minimal/ddp.py has no longer: {EDITED[name]}"
        indent = before[before.rindex("\n") :]
        added = {"before": own[key] + indent + old, "after": old + indent + own[key]}
        text = before + added.get(place, own[key].replace("{}", old)) + after
    return text


LEVELS = ["WRONG", "WARN", "NOTE"]
ON_TWO_HOSTS = {"device by global rank", "equal ranks", "every rank saves by each host"}
ON_TWO_HOSTS |= {"equal shares by the local rank"}
FAILS = {  # what the verdict says, and a script
    "it needs the package nowhere_at_all": "import nowhere_at_all",
    "it needs a real GPU": "from torch.utils import cpp_extension\n"
    "cpp_extension.CUDA_HOME = None\ncpp_extension.CUDAExtension('own', [])",
    "it makes no process group": "import torch",
    "ZeroDivisionError: division by zero, on rank 0 at theirs.py:1": "1 / 0",
    "it wraps no model": "import torch.distributed as dist\ndist.init_process_group('gloo')",
    "the process died": "import os\nos.abort()",
    "not done after 5 s (--limit): rank 0 at theirs.py:2": "import time\ntime.sleep(99)",
}
OUTSIDE = """import os, shutil, sys
from importlib import util
from pathlib import Path
os.environ["RANK"] == "0" or sys.exit(0)
other = Path("OTHER")
(other / "new").mkdir()
(other / "new/y").write_text("2")
assert (other / "new/y").read_text() == "2"
with (other / "logs/x").open("a") as file:
    file.write("3")
assert (other / "logs/x").read_text() == Path("../other/logs/x").read_text() == "13"
(other / "logs/x").unlink()
shutil.rmtree(other / "logs")
"""


@pytest.fixture(scope="module")
def ranks():
    with tool.Ranks() as ranks:
        yield ranks


def check(ranks, folder, text, **options):
    write(folder, {"theirs.py": text})
    verdict = ranks.check(folder / "theirs.py", [], folder=folder, **options)
    assert [path.name for path in folder.iterdir()] == ["theirs.py"]
    return verdict


def kinds_of(name):
    """Return what a variant shows: a finding, and by what; or several findings."""
    return {
        next(kind for kind in TABLE if f"{part} by ".startswith(f"{kind} by "))
        for part in name.split(" + ")
    }


@pytest.mark.parametrize(("level", "name", "own"), variants(*LEVELS))
def test_a_mistake_is_found_and_nothing_else_is(ranks, tmp_path, level, name, own):
    """What may be a mistake is no more than a warning."""
    verdict = check(ranks, tmp_path, edited(own), nodes=1 + (name in ON_TWO_HOSTS))
    levels = LEVELS[: LEVELS.index(level) + 1]
    found = [finding for finding in verdict.findings if finding.level in levels]
    assert sorted(finding.kind for finding in found) == sorted(kinds_of(name)), verdict
    assert verdict.status == (level == "WRONG"), verdict
    assert level != "WRONG" or all(x.line.startswith("theirs.py:") for x in found), verdict


@pytest.mark.parametrize(("level", "name", "own"), variants("RIGHT"))
def test_a_right_script_is_clean(ranks, tmp_path, level, name, own):
    found = check(ranks, tmp_path, edited(own))
    assert (found.findings, found.could_not) == ([], ""), found


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


@pytest.mark.parametrize(
    "script", ["minimal/ddp_complete.py", pytest.param("../train_ddp.py", marks=pytest.mark.slow)]
)
def test_the_scripts_of_this_collection_are_right(ranks, script, short_dir):
    flags = ["--dataset", "synthetic", "--data-dir", str(short_dir)]
    found = ranks.check(ROOT / "scripts" / script, flags, folder=ROOT)
    assert (found.findings, found.could_not) == ([], ""), found


def test_each_finding_of_the_table_is_shown_listed_and_names_a_lesson_that_exists(tmp_path):
    shown = [p.values[1] for p in variants(*LEVELS) if "slow" not in {m.name for m in p.marks}]
    assert set(TABLE) == set.union(*map(kinds_of, shown)), "each by a quick variant"
    done = command("--list", folder=tmp_path)
    assert done.returncode == 0
    for row in TABLE.values():
        assert not row.lesson or (ROOT / f"scripts/lessons/{row.lesson}.py").exists()
        assert f"{row.level:5}  {row.kind}\n" in done.stdout


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def command(*arguments, folder, **variables):
    """Run the command as a user does, with his variables, and return how it ended."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/check/check.py"), *arguments],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_starts_a_module_speaks_json_and_ends_with_its_status(
    ranks, tmp_path, monkeypatch, capsys
):
    write(tmp_path, {"own/beside.py": "package = 'nowhere_at_all'"})
    write(tmp_path, {"own/__main__.py": "from .beside import package\n__import__(package)"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool, "Ranks", lambda: contextlib.nullcontext(ranks))
    monkeypatch.setattr(sys, "argv", ["check.py", "--json", "-m", "own"])
    assert tool.main() == 3
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == 3
    assert "it needs the package nowhere_at_all" in told["could_not"]


PLAIN = """import os, sys
import env.own  # a package that is called as an environment often is
told = [os.environ["WORLD_SIZE"], os.environ.get("MY_LOCAL_DATA"), sys.argv[1:], os.getcwd()[-3:]]
sys.exit(" ".join(map(str, told)) if os.environ["RANK"] == "2" else 0)
"""


def test_the_command_starts_a_script_by_path_as_the_user_would(tmp_path):
    write(tmp_path, {"theirs.py": PLAIN, "env/own.py": "", "venv/pyvenv.cfg": "", "exp/x": ""})
    options = ["--ranks", "3", "--nodes", "3"]
    named = {"MY_LOCAL_DATA": "kept", "WORLD_SIZE": "7"}
    passed = ["--node", "{node}", "--epochs", "90"]
    done = command(*options, "../theirs.py", *passed, folder=tmp_path / "exp", **named)
    assert "ended with exit status 3 kept ['--node', '2', '--epochs', '2'] exp" in done.stdout
    assert "theirs.py: 3 ranks on 3 hosts" in done.stdout, done.stderr


def test_a_command_that_cannot_work_says_why(tmp_path):
    assert "there is no file nowhere.py" in command("nowhere.py", folder=tmp_path).stderr
    assert command(folder=tmp_path).returncode == 2
    assert command("--ranks", "9", "x", folder=tmp_path).returncode == 2
    write(tmp_path, {"theirs.py": ""})
    alone = [sys.executable, "-S", str(CHECK / "check.py"), "theirs.py"]  # without packages
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "has no torch: use the Python of your script" in done.stderr
    assert done.returncode == 2


@pytest.mark.slow
def test_a_torch_that_lacks_a_name_is_named(tmp_path):
    name = "will_sync_module_buffers"
    lacks = f"import sys, torch\ndel torch.nn.parallel.DistributedDataParallel.{name}\n"
    lacks += "sys.path.insert(0, sys.argv[1])\nimport probe\nprint(probe.MISSING)"
    told = run(sys.executable, "-c", lacks, CHECK, cwd=tmp_path).text
    assert re.search(rf"this torch \(\S+\) has no {name}: the check knows 2.9 to", told), told


BESIDE = {
    "pyproject.toml": "",
    "above/__init__.py": "epochs = 300",
    "settings/a.yaml": "epochs: 90  # of them\nnum_steps: 1000\n",
    "settings/a.json": '{"max_steps": 1e3, "epochs": 90.0, "lr": 0.1}',
    "src/theirs.py": """import json, pathlib, sys
sys.path.append("..")
import above
settings = pathlib.Path("../settings")
found = json.loads((settings / "a.json").read_text())
sys.exit(f"{above.epochs} {found} {(settings / 'a.yaml').read_text().split()}")
""",
}


def test_a_package_and_settings_above_the_script_are_bounded(ranks, tmp_path):
    write(tmp_path, BESIDE)
    found = ranks.check(tmp_path / "src/theirs.py", [], folder=tmp_path / "src")
    said = "2 {'max_steps': 1000.0, 'epochs': 2.0, 'lr': 0.1} ['epochs:', '2', '#', 'of', 'them', "
    assert said + "'num_steps:', '1000']" in found.could_not


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("epochs", 1, 2),
        ("num_train_epochs", 90.0, 2.0),
        ("num_steps", 1000, 1000),  # of a diffusion, perhaps
        ("steps_per_epoch", 500, 4),
        ("grad_accum_steps", 8, 2),
        ("per_device_batch_size", 64, 8),
        ("save_every", 10, 1),
        ("hidden", 512, 512),
    ],
)
def test_a_number_is_bounded_by_its_name(name, value, bound):
    assert (bounds.bounded(name, value), type(bounds.bounded(name, value))) == (bound, type(value))


@pytest.mark.parametrize(
    ("text", "bounded"),
    [
        ("epochs: int = 90  # all", "epochs: int = 2  # all"),
        ("config = {'epochs': 90, 'lr': 0.1}", "config = {'epochs': 2, 'lr': 0.1}"),
        ("for epoch in range(90):", "for epoch in range(2):"),
        ("for step in range(90):", "for step in range(90):"),
    ],
)
def test_a_number_is_bounded_where_it_is_written(text, bounded):
    assert bounds.bounded_code(text) == bounded


GOES_ON = """found = torch.load("older.pt")
    raw_model.load_state_dict(found["model"])
    start = found["epoch"] + 1"""


def test_a_checkpoint_from_beyond_the_two_epochs_goes_on(ranks, tmp_path):
    own = {"before loop": GOES_ON, "loop": "for epoch in range(start, args.epochs):"}
    write(tmp_path, {"theirs.py": edited(own)})
    model = build_model("convnet")
    torch.save({"model": model.state_dict(), "epoch": 5}, tmp_path / "older.pt")
    found = ranks.check(tmp_path / "theirs.py", [], folder=tmp_path)
    assert (found.findings, found.could_not) == ([], ""), found


# The last test, since what runs for too long is ended together with its processes.
@pytest.mark.parametrize("said", FAILS)
def test_what_cannot_be_run_is_no_finding(ranks, tmp_path, said):
    found = check(ranks, tmp_path, FAILS[said], limit=5 if "--limit" in said else 60)
    assert (found.findings, found.status) == ([], 3)
    assert said in found.could_not.replace(", on rank 1 at", ", on rank 0 at"), "either is first"
