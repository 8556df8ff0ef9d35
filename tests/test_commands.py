"""Every command that the documents and docstrings show runs, here or in a test that is named."""

import ast
import itertools
import json
import re
import shutil
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import data
from tests.documents import (
    ENGLISH,
    blocks,
    commands_of,
    docstring_commands,
    inline_commands,
    name_of,
    prose,
    rows,
    section,
    spans,
)
from tests.processes import ROOT, free_port, run, shell_line, start, summary
from tests.test_launch import LAUNCH_TABLE, SHORT, Row, finish_all, launch
from tests.test_lessons import LESSONS

README = ROOT / "README.md"
RUNNING = ROOT / "docs" / "running.md"
CONCEPTS = ROOT / "docs" / "concepts.md"
TOOLS = ROOT / "docs" / "tools.md"
LAUNCHED = {row.command for row in LAUNCH_TABLE}  # tests/test_launch.py runs them
LESSON = re.compile(r"python scripts/lessons/(\w+)\.py")

# Those that other tests run: the command to the test, whose source names what it runs.
ELSEWHERE = {
    "./scripts/quickstart.sh": "test_quickstart.py::test_quickstart_compares_the_three",
    "./scripts/test.sh": "test_quickstart.py::test_a_failed_installation_says_what_to_do",
    "source .venv/bin/activate": "test_commands.py::test_the_environment_is_activated",
    "tensorboard --logdir runs": "test_commands.py::test_tensorboard_shows_the_curves_of_the_table",
    "python scripts/minimal/single.py": (
        "test_minimal.py::test_one_epoch_of_mnist_reaches_98_percent"
    ),
    "python scripts/minimal/single.py --dataset synthetic --epochs 2": (
        "test_minimal.py::test_two_epochs_of_drawn_digits"
    ),
    "python scripts/minimal/dp.py": "test_minimal.py::test_one_epoch_of_mnist_reaches_98_percent",
    "torchrun --standalone --nproc_per_node 2 scripts/minimal/ddp.py": (
        "test_minimal.py::test_one_epoch_of_mnist_reaches_98_percent"
    ),
    "torchrun --nnodes 2 --node_rank $NODE --master_addr $HOST0 --nproc_per_node 2 train_ddp.py": (
        "test_commands.py::test_the_command_for_two_machines"
    ),
    "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint $HOST0:29500"
    " scripts/minimal/ddp.py": "test_minimal.py::test_two_torchruns_on_one_host",
    "python scripts/tools/scaling.py --check": (
        "test_scaling.py::test_the_command_measures_and_checks"
    ),
    "python scripts/tools/benchmark.py": "test_benchmark.py::test_everything_for_real",
    "python scripts/tools/ratios.py": "test_benchmark.py::test_the_ratios_for_real",
    "python scripts/tools/official_recipe.py": "test_benchmark.py::test_the_recipe_for_real",
    "python scripts/tools/waiting.py": (
        "test_benchmark.py::test_waiting_is_measured_alone_and_in_company"
    ),
    "python scripts/tools/time_to_accuracy.py": (
        "test_benchmark.py::test_time_to_accuracy_for_real"
    ),
    "python scripts/tools/time_to_accuracy.py --recipe": (
        "test_benchmark.py::test_the_time_to_99_percent_beside_the_recipe"
    ),
}


@dataclass(frozen=True)
class Command:
    """A command that is run here.

    Attributes:
        shown: as the documents show it.
        run: what of it is replaced: its data set, or a length that nobody could wait for.
        status: how it ends.
        gpus: how many it needs.
        trains: whether it takes the flags that make it short.
        prints: what it has to say.
    """

    shown: str
    run: tuple[tuple[str, str], ...] = ()
    status: int = 0
    gpus: int = 0
    trains: bool = True
    prints: str = ""


FEW = "--steps 3 --dataset synthetic"
ONE_STEP = "--batch-sizes 6144 --epochs 0.25 --seeds 0 --dataset synthetic -- --model linear"
SYNTHETIC = (("prepare_data.py mnist", "prepare_data.py synthetic"),)
ASKED = ("runs/first", "runs/asked")
NAME = (("runs/NAME", "runs/asked"),)
SINGLE = (("runs/single-20260101-120000", "runs/asked"),)
RUNS = (("runs/quickstart-20260101-120000/{single,dp,ddp}", "runs/first"),)
# In groups that share a copy of the project, in this order: a later one may go on with a run of
# an earlier one.
COMMANDS = {
    "scripts": [
        Command("python train_single.py"),
        Command("python train_single.py --epochs 5 --amp bf16"),
        Command("python train_dp.py"),
        Command("python train_dp.py --device cpu --replicas 2"),
        Command("python train_ddp.py"),
    ],
    "gpus": [Command("python train_dp.py --devices 0,1 --output-device 1", gpus=2)],
    "own model and data": [
        Command("python train_single.py --model mine --dataset mine"),
        Command("python train_dp.py --model mine --dataset mine"),
        Command(
            "torchrun --standalone --nproc_per_node 2 train_ddp.py --model mine --dataset mine"
        ),
    ],
    "checkpoints": [
        Command("python train_single.py --run-dir runs/first --save-every-steps 100"),
        Command(
            "torchrun --standalone --nproc_per_node 2 train_ddp.py --run-dir runs/first"
            " --epochs 3 --resume"
        ),
        Command("python train_dp.py --init-weights runs/first/checkpoints/last.pt"),
        Command(
            "python scripts/tools/compare.py runs/quickstart-20260101-120000/{single,dp,ddp}",
            run=RUNS,
            trains=False,
        ),
    ],
    "doctor": [
        Command("python scripts/tools/doctor.py"),
        Command("torchrun --standalone --nproc_per_node 2 scripts/tools/doctor.py"),
    ],
    "exercise": [
        Command(
            "python train_ddp.py --nprocs 8 --nnodes 3 --node-rank 5"
            " --init-method tcp://127.0.0.1:29500",
            status=2,
            trains=False,
        ),
        Command(
            "NNODES=3 NPROC_PER_NODE=8 MASTER_ADDR=127.0.0.1 scripts/run_multi_node.sh --dry-run",
            trains=False,
        ),
    ],
    "predict": [
        Command("python train_single.py --run-dir runs/first --save-every-steps 100", run=(ASKED,)),
        *(
            Command(f"python scripts/tools/predict.py {rest}", run=run, trains=False, prints=prints)
            for rest, run, prints in (
                ("runs/NAME digit.png photo.jpg", NAME, "photo.jpg: "),
                ("runs/NAME digit.png", NAME, "digit.png: "),
                ("runs/NAME --test", NAME, "10,000"),
                ("runs/NAME --export digits.pt2", NAME, "digits.pt2"),
                ("digits.pt2 digit.png", (), "digit.png: "),
                ("runs/single-20260101-120000 digit.png", SINGLE, "digit.png: "),
                ("runs/single-20260101-120000 --test", SINGLE, "10,000"),
                ("runs/single-20260101-120000 --export digits.pt2", SINGLE, "digits.pt2"),
            )
        ),
    ],
    "profile": [
        Command(
            "torchrun --standalone --nproc_per_node 2 train_ddp.py --profile",
            run=(("--profile", "--profile --max-steps 20 --run-dir runs/traced"),),
            prints="profile of 10 steps",
        ),
        Command(
            "python scripts/tools/trace.py runs/ddp-20260101-120000",
            run=(("runs/ddp-20260101-120000", "runs/traced"),),
            trains=False,
            prints="backward",
        ),
        Command(
            "python scripts/tools/trace.py --draw steps.svg runs/profiled/{single,dp,ddp}",
            run=(("runs/profiled/{single,dp,ddp}", "runs/traced"),),
            trains=False,
            prints="drawn in steps.svg",
        ),
        Command("python scripts/tools/draw_ring.py docs/ring_all_reduce.svg", trains=False),
    ],
    "benchmark": [
        Command(
            "python scripts/tools/benchmark.py --quick",
            run=(("--quick", f"--quick --output runs/benchmark-A --models linear {FEW}"),),
            trains=False,
            prints="How to read it",
        ),
        Command(
            "python scripts/tools/benchmark.py --models convnet,resnet18 --counts 2,4"
            " -- --amp bf16",
            run=(("convnet,resnet18", f"linear --quick --threads 4 {FEW}"),),
            trains=False,
            prints="How to read it",
        ),
        *(
            Command(
                "python scripts/tools/benchmark.py"
                f" --compare {a}/benchmark.json {b}/benchmark.json",
                run=((a, "runs/benchmark-A"), (b, "runs/benchmark-A")),
                trains=False,
                prints="linear",
            )
            for a, b in (("runs/benchmark-A", "runs/benchmark-B"), ("before", "after"))
        ),
    ],
    "ratios": [
        Command(
            "python scripts/tools/ratios.py --only engine,start-ddp --rounds 9",
            run=(("--rounds 9", "--rounds 1 --images 1000 --dataset synthetic"),),
            trains=False,
        ),
        Command(
            "python scripts/tools/waiting.py --others 0,1 --spins 300000,1000 --rounds 9",
            run=(("--rounds 9", "--rounds 1 --images 960 --model linear --dataset synthetic"),),
            trains=False,
            prints="beside 1 other",
        ),
        Command(
            "python scripts/tools/time_to_accuracy.py --goal 99.5 --epochs 3,4,5 -- --amp bf16",
            run=(
                ("99.5", "30 --techniques single --seeds 0 --dataset synthetic"),
                ("3,4,5", "0.1"),
                ("bf16", "bf16 --model linear"),
            ),
            trains=False,
            prints="  reached",
        ),
        # Many minutes: it has to start, and to end when it is asked to.
        Command(
            "python scripts/tools/official_recipe.py --full --rounds 1",
            run=(("python", "timeout --signal=INT 20 python"), ("1", "1 --dataset synthetic")),
            status=124,
            trains=False,
        ),
    ],
    "large batches": [
        *(
            Command(
                f"python scripts/tools/large_batch.py {rest}",
                run=((rest, f"{rest} {ONE_STEP}"),),
                trains=False,
                prints="capped-linear",
            )
            for rest in (
                "--output runs/large_batch.json",
                "--output runs/large_batch.json --rules all --chart large_batch.svg",
                "--output runs/large_batch.json --rules all --chart FILE.svg",
            )
        ),
        Command(
            "python scripts/tools/large_batch.py --batch-sizes 1536 --epochs 1 --seeds 0"
            " -- --momentum 0.8",
            run=(("1536 --epochs 1", "6144 --epochs 0.25"), ("-- ", "--dataset synthetic -- ")),
            trains=False,
            prints="capped-linear",
        ),
    ],
    "scaling": [
        Command("python scripts/tools/scaling.py", trains=False),
        Command("python scripts/tools/scaling.py --chart scaling.svg", trains=False),
        *(
            Command(
                f"python scripts/tools/scaling.py --link {link} --compute 120 --parameters 25.6e6",
                trains=False,
            )
            for link in ("infiniband100", "infiniband400")
        ),
    ],
    "small": [
        Command("diff train_single.py train_dp.py", status=1, trains=False),
        Command("diff train_single.py train_ddp.py", status=1, trains=False),
        *(
            Command(
                f"diff scripts/minimal/single.py scripts/minimal/{technique}.py",
                status=1,
                trains=False,
            )
            for technique in ("dp", "ddp")
        ),
        Command("python scripts/tools/contact_sheet.py docs/synthetic_digits.svg", trains=False),
        Command(
            "python scripts/tools/prepare_data.py mnist --data-dir data",
            run=SYNTHETIC,
            trains=False,
        ),
    ],
}
QUICK = ("gpus", "exercise", "small")


def shown_commands() -> dict[str, str]:
    """Return every command that a reader is shown, with the file that shows it."""
    found = {}
    for path in ENGLISH:
        for block in blocks(path):
            found |= dict.fromkeys(commands_of(block), name_of(path))
        found |= dict.fromkeys(inline_commands(prose(path)), name_of(path))
    scripts = [*ROOT.glob("train_*.py"), *(ROOT / "scripts").rglob("[a-z]*.py")]
    for path in scripts:
        found |= dict.fromkeys(docstring_commands(path), name_of(path))
    return found


def test_every_command_is_run_by_a_test() -> None:
    here = {command.shown for group in COMMANDS.values() for command in group}
    shown = shown_commands()
    assert len(shown) > 50, "the documents show commands: this test does not find them"
    lessons = {command for command in shown if LESSON.fullmatch(command)}
    names = {match[1] for command in lessons if (match := LESSON.fullmatch(command))}
    assert names - {"NAME"} == set(LESSONS)
    untested = shown.keys() - here - LAUNCHED - ELSEWHERE.keys() - lessons
    assert not untested, {command: shown[command] for command in untested}
    gone = (here | ELSEWHERE.keys()) - shown.keys()
    assert not gone, f"no document shows {gone} any more"


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_test_that_is_named_runs_the_command(command: str) -> None:
    file, _, name = ELSEWHERE[command].partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    functions = {f.name: ast.unparse(f) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    flag_or_file = next(word for word in reversed(command.split()) if word != "runs")
    assert flag_or_file.rpartition("/")[2].removesuffix(".py") in functions[name]


def test_the_environment_is_activated(tmp_path: Path) -> None:
    """It is made as ``scripts/environment.sh`` makes it, of which the README says the name."""
    assert "VENV=${VENV:-.venv}" in (ROOT / "scripts" / "environment.sh").read_text()
    made = run(sys.executable, "-m", "venv", "--without-pip", ".venv", cwd=tmp_path)
    assert made.returncode == 0, made.text
    line = "source .venv/bin/activate && command -v python"
    assert run("bash", "-c", line, cwd=tmp_path).stdout.strip() == f"{tmp_path}/.venv/bin/python"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, synthetic_dir: Path) -> Path:
    """A copy of the project to which the documents' edits were applied, to the letter."""
    folder = tmp_path_factory.mktemp("project") / "copy"
    leave = shutil.ignore_patterns(".*", "runs", "data", "__pycache__", "tests")
    shutil.copytree(ROOT, folder, ignore=leave)
    (folder / "data").symlink_to(synthetic_dir)
    for block in blocks(README) + blocks(RUNNING):
        name = re.match(r"# (\w+\.py)\n", block.text)
        if block.language == "python" and name:
            (folder / name[1]).write_text(block.text)
        if block.language == "diff":
            apply(block.text, folder)
    return folder


def apply(diff: str, folder: Path) -> None:
    """Apply a diff without line numbers: each hunk's old lines occur in the file exactly once."""
    head, *hunks = re.split(r"^@@\n", diff, flags=re.MULTILINE)
    path = folder / head.removeprefix("--- ").strip()
    text = path.read_text()
    assert hunks, diff
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"{path.name} has not exactly one\n{old}"
        text = text.replace(old, new)
    path.write_text(text)


def run_command(command: Command, project: Path, max_steps: int) -> Any:
    line = command.shown
    for shown, instead in command.run:
        assert shown in line
        line = line.replace(shown, instead, 1)
    if command.trains:
        line += " --threads 1 --no-progress"
        line += "" if "--max-steps" in line else f" --max-steps {max_steps}"
        line += "" if "--dataset" in line else " --dataset synthetic"
        line += "" if "--model" in line else " --model linear"
    words, variables = shell_line(line)
    return run(*words, cwd=project, timeout=200, **variables)


def marks_of(group: str) -> list[pytest.MarkDecorator]:
    gpus = max(command.gpus for command in COMMANDS[group])
    slow = [] if group in QUICK else [pytest.mark.slow]
    return [*slow, pytest.mark.gpu(gpus)] if gpus else slow


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=marks_of(group)) for group in COMMANDS]
)
@pytest.mark.timeout(900)  # four commands of a minute each, on a busy machine
def test_commands_run(group: str, project: Path) -> None:
    if group == "predict":
        image = pytest.importorskip("PIL.Image", reason="needs Pillow")
        digits = data.load_dataset("synthetic", str(project / "data"))[1].images
        for name in ("digit.png", "photo.jpg"):
            image.fromarray(digits[0].numpy()).save(project / name)
    for i, command in enumerate(COMMANDS[group], start=1):
        ended = run_command(command, project, 5 * i)
        assert ended.returncode == command.status, (command.shown, ended.text)
        assert "Traceback" not in ended.text
        assert command.prints in ended.stdout, (command.shown, ended.text)
        if command.trains and "doctor" not in command.shown:
            assert "test accuracy" in ended.stdout, (command.shown, ended.text)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS["own model and data"], ids=lambda c: c.shown)
def test_own_data_is_learned_as_far_as_the_documents_say(
    command: Command, project: Path, tmp_path: Path
) -> None:
    assert "Each ends above 95 %" in RUNNING.read_text()
    words, _ = shell_line(f"{command.shown} --threads 1 --run-dir {tmp_path}/run")
    ended = run(*words, cwd=project)
    assert ended.returncode == 0, ended.text
    assert summary(tmp_path / "run")["test_accuracy"] > 0.95


@pytest.mark.slow
def test_the_run_that_goes_on_ends_as_the_documents_say(project: Path) -> None:
    """The commands under "checkpoints" ran before: one run, three scripts."""
    if not (project / "runs" / "first").exists():
        test_commands_run("checkpoints", project)
    result = json.loads((project / "runs" / "first" / "summary.json").read_text())
    assert (result["script"], result["global_step"]) == ("train_ddp.py", 10)
    assert result["resumed_from"] == 5


def test_the_output_that_is_shown_is_printed(project: Path) -> None:
    """A block of text behind a command is what the command prints."""
    compared = 0
    known = {command.shown: command for group in COMMANDS.values() for command in group}
    shown = blocks(CONCEPTS)
    for block, following in itertools.pairwise(shown):
        if block.language == "bash" and following.language == "text":
            (line,) = commands_of(block)
            ended = run_command(known[line], project, 5)
            assert following.text in ended.text
            compared += 1
    assert compared == 2


@pytest.mark.slow
def test_the_command_for_two_machines(synthetic_dir: Path, tmp_path: Path) -> None:
    """The one in the docstring of train_ddp.py, at a port that no other test has."""
    (command,) = [c for c in docstring_commands(ROOT / "train_ddp.py") if "$NODE" in c]
    command = command.replace("$HOST0", "$HOST0 --master_port $PORT")
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    for ended in finish_all(launch(Row("docstring", command, nodes=2), flags, tmp_path), 150):
        assert ended.returncode == 0, ended.text
    assert summary(tmp_path / "run")["world_size"] == 4


def python_block(start: str) -> str:
    (found,) = [
        b.text for b in blocks(CONCEPTS) if b.language == "python" and b.text.startswith(start)
    ]
    return found


def test_the_minimal_script_trains(tmp_path: Path) -> None:
    (tmp_path / "minimal_ddp.py").write_text(python_block("# minimal_ddp.py"))
    ended = run(
        *[sys.executable, "minimal_ddp.py"],
        cwd=tmp_path,
        MASTER_PORT=str(free_port()),
        CUDA_VISIBLE_DEVICES="",
    )
    assert ended.returncode == 0, ended.text
    losses = re.findall(r"^epoch \d: loss (\d\.\d+) over 64 samples$", ended.stdout, re.MULTILINE)
    assert len(losses) == 3
    assert float(losses[2]) < float(losses[0])
    assert (tmp_path / "model.pt").exists()


def test_the_barrier_of_the_concepts_lets_rank_0_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    namespace: dict[str, Any] = {}
    exec(python_block("from contextlib"), namespace)
    for rank in (0, 1):
        with namespace["zero_first"](rank):
            calls.append(f"rank {rank} prepares")
    assert calls == ["rank 0 prepares", "barrier", "barrier", "rank 1 prepares"]
    with namespace["zero_first"](-1):
        pass
    assert len(calls) == 4, "without a process group nobody waits"


@pytest.mark.slow
def test_tensorboard_shows_the_curves_of_the_table(project: Path, synthetic_dir: Path) -> None:
    command = Command("python train_single.py --log-every 2 --run-dir runs/curves")
    ended = run_command(command, project, 10)
    assert ended.returncode == 0, ended.text
    port = free_port()
    line = f"exec tensorboard --logdir runs --port {port}"
    server = start("bash", "-c", line, cwd=project)
    try:
        told = rows(section(TOOLS, "Reading TensorBoard").text)
        expected = {tag for row in told if row[0].startswith("`") for tag in spans(row[0])}
        deadline, found = time.monotonic() + 60, set()
        url = f"http://127.0.0.1:{port}/data/plugin/scalars/tags"
        while found != expected and time.monotonic() < deadline:
            assert server.poll() is None, server.communicate()
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    found = set(json.load(answer).get("curves", {}))
            except OSError:
                pass
            time.sleep(0.5)
        assert found == expected
    finally:
        server.terminate()
        server.communicate(timeout=20)
