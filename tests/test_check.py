"""The check of anyone's DDP script: each mistake is found on its line, and a right script is clean.

The folder check_variants holds the scripts. A comment "finds: A + B" says what is wrong in a line.
"""

import json
import shutil
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.processes import ROOT, run, succeed

CHECK = ROOT / "scripts/check"
VARIANTS = ROOT / "tests/check_variants"
sys.path.insert(0, str(CHECK))
import project  # noqa: E402
import reading  # noqa: E402
import verdict  # noqa: E402

needs_torchvision = pytest.mark.skipif(not find_spec("torchvision"), reason="needs torchvision")


def checked(folder, script, *arguments, options=()):
    """Check a variant in a folder, which has to stay as it is, and return what is printed."""
    for name in ("common.py", script):
        shutil.copy(VARIANTS / name, folder)
    before = sorted(folder.rglob("*"))
    command = [sys.executable, CHECK / "check.py", "--json", *options, script, *arguments]
    ended = run(*command, cwd=folder, timeout=150)
    assert sorted(folder.rglob("*")) == before
    found = json.loads(ended.stdout)
    assert found["status"] == ended.status, ended.text
    return found


def expected(script):
    """Return the findings that a variant's comments announce, each with its line.

    One line of a finding is its own, and the others are those at which it was seen, too.
    """
    lines = enumerate((VARIANTS / script).read_text().splitlines(), start=1)
    found = [(number, *line.split("  # finds: ")[1:]) for number, line in lines]
    return {
        (kind, f"{script}:{at}") for at, *kinds in found for k in kinds for kind in k.split(" + ")
    }


def is_right(found):
    return (found["status"], found["findings"], found["could_not"]) == (0, [], "")


@pytest.mark.parametrize(
    ("script", "nodes"),
    [
        ("wrong_training.py", 1),
        ("unreached.py", 1),
        ("fails.py", 1),
        pytest.param("wrong_data.py", 1, marks=needs_torchvision),
        pytest.param("wrong_evaluation.py", 1, marks=pytest.mark.slow),
        pytest.param("wrong_results.py", 1, marks=pytest.mark.slow),
        pytest.param("two_models.py", 1, marks=pytest.mark.slow),
        pytest.param("streams.py", 1, marks=pytest.mark.slow),
        pytest.param("workers.py", 1, marks=pytest.mark.slow),
        pytest.param("seeded.py", 1, marks=pytest.mark.slow),
        pytest.param("hangs.py", 1, marks=pytest.mark.slow),
        pytest.param("stops_alone.py", 1, marks=pytest.mark.slow),
        pytest.param("by_hand.py", 1, marks=pytest.mark.slow),
        pytest.param("device_by_rank.py", 2, marks=pytest.mark.slow),
        pytest.param("equal_ranks.py", 2, marks=pytest.mark.slow),
    ],
)
def test_mistakes_are_found_on_their_lines_and_nothing_else_is(tmp_path, script, nodes):
    found = checked(tmp_path, script, options=["--nodes", nodes, "--limit", 40])
    seen = {
        (item["kind"], line) for item in found["findings"] for line in (item["line"], *item["also"])
    }
    assert seen == expected(script), found
    for item in found["findings"]:
        levels = [verdict.TABLE[item["kind"]].level, item["level"]]
        assert levels == sorted(levels, key=verdict.LEVELS.index), item
        assert item["level"] != "WRONG" or script != "unreached.py"
    is_wrong = any(item["level"] == "WRONG" for item in found["findings"])
    assert found["status"] == is_wrong
    text = str(found)
    if script == "wrong_training.py":
        assert "(only rank 0 loads a checkpoint)" in text
    if script == "wrong_evaluation.py":
        assert "192 of 203 samples" in text
    if script == "two_models.py":
        assert "gradients of G_AB.0.weight" in text


def test_a_right_script_is_clean_from_any_folder_and_what_is_not_seen_is_said(tmp_path):
    """It is started by the name of the check's folder, from a folder beside the script's."""
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    for name in ("common.py", "right.py"):
        shutil.copy(VARIANTS / name, own)
    text = succeed(sys.executable, CHECK, "../own/right.py", cwd=other).text
    assert "OK     nothing wrong was seen" in text
    assert "autocast (it computed in float32)" in text
    assert "a run with smaller numbers, which failed" not in text
    assert sorted(path.name for path in own.iterdir()) == ["common.py", "right.py"]


@pytest.mark.slow
def test_a_module_that_pythonpath_names_is_part_of_the_project(tmp_path):
    """So its numbers are made small, and the script ends at once."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "setup.py").write_text("")
    (tmp_path / "settings.py").write_text("epochs = 90")
    (tmp_path / "tools/own.py").write_text("import settings; assert settings.epochs == 2")
    ended = run(sys.executable, CHECK, "tools/own.py", cwd=tmp_path, PYTHONPATH=".")
    assert "it makes no process group" in ended.stdout, ended.text


def test_a_command_that_cannot_work_says_why(tmp_path):
    (tmp_path / "own.py").write_text("")
    for words, said in {
        ("nowhere.py",): "there is no file nowhere.py",
        (): "give the script that you want to check",
        ("--ranks", "9", "own.py"): "--ranks is 2 to 8",
    }.items():
        ended = run(sys.executable, CHECK, *words, cwd=tmp_path)
        assert said in ended.stderr
        assert ended.status == 2
    alone = run(sys.executable, "-S", CHECK, "own.py", cwd=tmp_path)  # without packages
    assert "has no torch: use the Python of your script" in alone.stderr
    assert succeed("sh", "-c", f"{sys.executable} {CHECK} --help | head -1").stderr == ""


def test_each_finding_is_shown_by_a_variant_and_names_a_lesson_that_exists():
    shown = {kind for path in VARIANTS.glob("*.py") for kind, _ in expected(path.name)}
    assert shown == set(verdict.TABLE)
    for row in verdict.TABLE.values():
        assert not row.lesson or (ROOT / f"scripts/lessons/{row.lesson}.py").exists(), row.lesson


LOOP = """
for images in loader:
    optimizer.zero_grad()
    loss_value = loss.item()
    {}
    loss.backward()
"""


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (LOOP.format("if isnan(loss_value): sys.exit(1)"), {"a rank stops alone"}),
        (LOOP.format("if isnan(loss_value): continue"), {"leaves a batch out"}),
        (LOOP.format("if mask.sum() == 0: continue"), {"leaves a batch out"}),
        (
            "def step():\n    if not mask.any(): return\n    loss.backward()\nstep()",
            {"leaves a batch out"},
        ),
        (LOOP.format("pass") + "    if not mask.any(): continue\n", set()),
        (LOOP.format("dist.all_reduce(loss_value)\n    if isnan(loss_value): break"), set()),
        (
            LOOP.format("mean = reduced(loss_value)\n    if isnan(loss_value): break"),
            {"a rank stops alone"},
        ),
        (LOOP.format("if rank == 0: continue"), {"a rank stops alone"}),
        (LOOP.format("pass") + "    if rank != 0: continue\n", set()),
        ("kind = DistributedSampler if many else RandomSampler", {"no set_epoch"}),
        ("if rank == 0: model.load_state_dict(torch.load(path))", set()),
        ("if distributed: pass\nelse: model.load_state_dict(torch.load(path))", set()),
        ("if args.gpu is None: model.load_state_dict(torch.load(path))", set()),
        ("if rank != 0: model.load_state_dict(torch.load(path))", {"loads onto one GPU"}),
        ("model.load_state_dict(np.array(torch.load(path)))", set()),
        ("MNIST(download=True)", {"every rank downloads"}),
        ("torch.manual_seed(0)", {"equal random numbers"}),
        ("torch.manual_seed(0)\nmp.spawn(train)", set()),
        ("if rank != 0: barrier()\nMNIST(download=True)\nif rank == 0: barrier()", set()),
        ("model.load_state_dict(torch.load(path, map_location={'cuda:0': 'cpu'}))", set()),
        ("work = dist.barrier(async_op=True)\nwork.wait()", set()),
        ("def unused():\n    MNIST(download=True)", set()),
        ("def made():\n    MNIST(download=True)\nif rank == 0: made()", set()),
        (
            "from own import made as make\nmake()\ndef made():\n    MNIST(download=True)\n"
            "if rank == 0: made()",
            {"every rank downloads"},
        ),
        (
            "DistributedSampler(x, shuffle=False)\nsteps = len(train_set) // batch_size",
            {"steps of all ranks"},
        ),
        (
            "DistributedSampler(x, shuffle=False)\nbatch_size = args.batch_size // world_size\n"
            "steps = len(train_set) // batch_size",
            {"steps of all ranks"},
        ),
        (
            "DistributedSampler(x, shuffle=False)\nbatch_size = args.batch_size // world_size\n"
            "steps = len(train_set) // args.batch_size",
            set(),
        ),
        ("DistributedSampler(x, shuffle=False)\nsteps = len(loader) // batch_size", set()),
        ("steps = len(train_set) // batch_size", set()),
    ],
)
def test_what_a_run_does_not_reach_is_read_in_the_code(tmp_path, text, kinds):
    (tmp_path / "own.py").write_text(text)
    assert {event["kind"] for event in reading.read(tmp_path, ["own.py"])} == kinds


@pytest.mark.parametrize(("has_run", "levels"), [(False, ["NOTE"]), (True, [])])
def test_a_seed_that_an_option_sets_is_a_note_where_the_run_sets_none(tmp_path, has_run, levels):
    """A run that has set it says what is drawn then."""
    (tmp_path / "own.py").write_text("if args.seed: torch.manual_seed(args.seed)")
    told = {"rank": 0, "clock": 0, "line": "own.py:1"}
    events = [*reading.read(tmp_path, ["own.py"]), told | {"kind": "step", "line": "own.py:2"}]
    events += [told | {"kind": "seeded"}] if has_run else []
    report = {"events": events, "world": 2, "ends": {0: {"how": "ended"}, 1: {"how": "ended"}}}
    assert [facts["level"] for _, facts in verdict.by_ranks(report)] == levels


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("epochs", 1, 2),
        ("num_train_epochs", 90.0, 2.0),
        ("num_steps", 1000, 1000),  # of a diffusion, perhaps
        ("steps_per_epoch", 500, 4),
        ("grad_accum_steps", 8, 2),
        ("per_device_batch_size", 64, 4),
        ("total_batch_size", 524288, 524288),  # others are computed from it
        ("save_every", 10, 2),  # in every step rank 0 would be alone where it is not in reality
        ("hidden", 512, 512),
    ],
)
def test_a_number_is_bounded_by_its_name(name, value, bound):
    assert (project.bounded(name, value), type(project.bounded(name, value))) == (
        bound,
        type(value),
    )


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
    assert project.bounded_code(text) == bounded


def test_a_number_is_bounded_in_a_command():
    given = ["--epochs", "90", "--batch-size=64", "epochs=90", "--lr", "1", "90"]
    assert project.bounded_arguments(given) == [
        *("--epochs", "2", "--batch-size=4", "epochs=2", "--lr", "1", "90")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["spawned.py", "processes.py"])
def test_a_script_that_starts_its_ranks_itself_is_clean(tmp_path, script):
    found = checked(tmp_path, script, "--epochs", "90")
    assert is_right(found), found


@pytest.mark.slow
def test_what_the_check_makes_small_is_not_blamed_on_the_script(tmp_path):
    """The script wants more than two epochs, and a best checkpoint. It asks for a terminal."""
    found = checked(tmp_path, "numbers.py")
    assert is_right(found), found
    assert "epochs 200 to 2" in str(found["not_seen"])


@pytest.mark.slow
def test_what_is_not_judged_says_so_and_nothing_else(tmp_path):
    found = checked(tmp_path, "sharded.py")
    assert found["could_not"].startswith("not judged: it uses FSDP2"), found
    assert (found["status"], found["findings"], found["not_seen"]) == (3, [], [])


@pytest.mark.slow
def test_rank_0_alone_in_the_wrapper_is_wrong_only_if_it_was_seen(tmp_path):
    found = checked(tmp_path, "alone.py", "2000")
    assert {item["level"] for item in found["findings"]} == {"WARN", "NOTE"}, found
    assert found["status"] == 0
    assert checked(tmp_path, "alone.py", "2000", options=["--strict"])["status"] == 1
    found = checked(tmp_path, "alone.py", "1", options=["--limit", 40])
    wrong = [item["kind"] for item in found["findings"] if item["level"] == "WRONG"]
    assert wrong == ["evaluates through the wrapper"], found


@pytest.mark.slow
def test_slurm_is_played_and_a_finished_run_in_the_folder_is_named(tmp_path):
    assert is_right(checked(tmp_path, "slurm.py"))
    (tmp_path / "runs").mkdir()
    torch.save({"epochs done": 5}, tmp_path / "runs/last.pt")
    found = checked(tmp_path, "slurm.py")
    assert "it made no step of an optimizer (after it loaded runs/last.pt)" in str(found)
    assert found["status"] == 3


@pytest.mark.slow
def test_what_lies_outside_stays_as_it_is_and_who_waits_for_nobody_is_no_conflict(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    (other / "logs").mkdir(parents=True)
    (other / "logs/x").write_text("1")
    (other / "logs/w").write_text("2")
    found = checked(own, "outside.py", str(other), options=["--limit", 30])
    assert found["could_not"] == "not judged: not done after 30 s (--limit), but at outside.py:20"
    assert (found["status"], found["findings"]) == (3, [])
    assert f"writing to {other}" in str(found["not_seen"])
    assert [(p.name, p.is_dir() or p.read_text()) for p in sorted(other.rglob("*"))] == [
        ("logs", True),
        ("w", "2"),
        ("x", "1"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import nowhere_at_all",
            "it needs nowhere_at_all, which is not installed here, on",
        ),
        (
            "import torch.nowhere",
            "it needs torch.nowhere, which is not in the installed torch",
        ),
        ("1 / 0", "could not run your script: ZeroDivisionError: division by zero, on rank"),
        ("import os\nos.abort()", "could not run your script: the process died, on rank"),
        ("import time\nwhile True: pass", "not judged: not done after 8 s (--limit)"),
        ("import torch.distributed as d\nd.init_process_group('gloo')", "not judged: it wraps no"),
    ],
)
def test_what_cannot_be_run_is_no_finding(tmp_path, text, said):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__main__.py").write_text(text)
    limit = "8" if "--limit" in said else "60"
    ended = run(sys.executable, CHECK, "--limit", limit, "-m", "own", cwd=tmp_path)
    assert said in ended.stdout, ended.text
    assert "not seen" not in ended.stdout
    assert ended.status == 3


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_ddp.py", "scripts/minimal/ddp.py"])
def test_the_scripts_of_this_collection_are_right(digits_dir, script):
    command = [sys.executable, CHECK, script, "--data-dir", digits_dir]
    text = succeed(*command, cwd=ROOT, timeout=150).text
    assert "OK     nothing wrong was seen" in text


FAILS_LATER = """
import torch
from common import loss_of, network, start
from torch.nn.parallel import DistributedDataParallel

rank, _ = start()
raw_model = network().cuda()
model = DistributedDataParallel(raw_model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    loss_of(raw_model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
raise FileNotFoundError("test.csv")
"""


def test_a_mistake_counts_although_the_script_fails_later(tmp_path):
    """A test set may be missing on this machine. In CI the status has to be that of a mistake."""
    shutil.copy(VARIANTS / "common.py", tmp_path)
    (tmp_path / "own.py").write_text(FAILS_LATER)
    ended = run(sys.executable, CHECK, "own.py", cwd=tmp_path)
    assert "past the wrapper" in ended.stdout, ended.text
    assert "could not run your script: FileNotFoundError: test.csv" in ended.stdout
    assert ended.status == 1


def test_a_script_finds_no_variables_of_the_job_in_which_the_check_is_started(tmp_path):
    """In a shell of Slurm, many scripts would believe that srun has started them."""
    (tmp_path / "own.py").write_text("import os; raise ValueError(os.environ.get('SLURM_NTASKS'))")
    ended = run(sys.executable, CHECK, "own.py", cwd=tmp_path, SLURM_NTASKS="9")
    assert "ValueError: None" in ended.stdout, ended.text
