"""Every command that documents and docstrings show runs, in the order of reading."""

import re

import pytest

from tests.documents import (
    ENGLISH,
    blocks,
    commands_of,
    docstring_commands,
    follow,
    inline_commands,
    name_of,
    prose,
    read,
)
from tests.launches import LAUNCHES
from tests.processes import ROOT, copy_project, run, shell_line, succeed

# What tests of their own run: test_quickstart, test_lessons, test_minimal, test_training, test_gpu.
ELSEWHERE = re.compile(
    r"(\./)?scripts/(quickstart|test)\.sh|source |python scripts/lessons/NAME\.py$|tensorboard "
    r"|(.*torchrun .*|python )scripts/minimal/\w+\.py|scripts/gpu_check\.sh --only"
)
# Several machines, and schedulers: tests run those of launching.md, which differ in numbers.
ON_MACHINES = re.compile(r"-m pytest|\$HOST0|\$NODE|^(srun|sbatch|mpirun|HOSTS=)")
# A reader's own files.
OWN_FILES = re.compile(r"my_(script|project)|their.train|\.\.\./scripts/check|kubectl|docker ")
PAGES = [path for path in ENGLISH if path.stem != "recipes"]  # tests/test_recipes.py follows them
TRAINS = re.compile(r"^(?!diff).*train_\w+\.py")
NEEDS_GPUS = re.compile(r"--devices \d|VISIBLE_DEVICES=\d|--output-device|--nproc_per_node gpu")


def shown_commands():
    """Return every command that a reader is shown, with the file that shows it first."""
    told = {path: commands_of(blocks(read(path))) + inline_commands(prose(path)) for path in PAGES}
    scripts = [*ROOT.glob("train_*.py"), *(ROOT / "scripts").rglob("[a-z]*.py")]
    told |= {path: docstring_commands(path) for path in scripts}
    found = {}
    for path, commands in told.items():
        for command in commands:
            found.setdefault(command, name_of(path))
    return found


SHOWN = shown_commands()
LAUNCHED = LAUNCHES.values()  # tests/test_launch.py runs them


HERE = [
    command
    for command in SHOWN
    if command not in LAUNCHED
    and not (ELSEWHERE.match(command) or ON_MACHINES.search(command) or OWN_FILES.search(command))
]


def test_the_commands_for_several_machines_are_of_kinds_that_are_launched():
    for command in SHOWN:
        kind = re.search(r"torchrun --nnodes|\bsrun|\bsbatch|\bmpirun|HOSTS=", command)
        assert not kind or any(kind[0] in each for each in LAUNCHED), command


def test_one_test_alone_runs_as_contributing_shows_it():
    (line,) = [command for command in SHOWN if "-m pytest" in command]
    words, _ = shell_line(line.removeprefix(".venv/bin/"))
    assert "1 passed" in succeed(run(*words, cwd=ROOT)).stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory, synthetic_dir):
    """A copy of the project to which the documents' edits were applied, to the letter."""
    folder = copy_project(tmp_path_factory.mktemp("project") / "copy", synthetic_dir)
    for path in PAGES:
        follow(blocks(read(path)), folder)
    return folder


def run_shown(command, project, max_steps):
    line = command
    if re.search(r"scripts/tools/(benchmark|scaling)\.py", line):
        # These measure for real in test_benchmark.py.
        line = f"{line.partition(' -- ')[0]} --help"
    elif "scripts/tools/" in line:
        # Names of runs stand for a reader's own.
        line = re.sub(r"runs/[\w-]+(/\{[\w,]+\})?(?=\s|$)", "runs/shown", line)
        if "runs/shown" in line and not (project / "runs/shown").exists():
            made = "python train_ddp.py --nprocs 2 --profile --run-dir runs/shown"
            succeed(run_shown(made, project, max_steps))
        line = line.replace("prepare_data.py mnist", "prepare_data.py synthetic")
    elif TRAINS.match(line):
        line += " --threads 1 --no-progress"
        more = {"--max-steps": max_steps, "--dataset": "synthetic", "--model": "linear"}
        line += "".join(f" {flag} {value}" for flag, value in more.items() if flag not in line)
    words, variables = shell_line(line)
    return run(*words, cwd=project, timeout=200, **variables)


def run_all(commands, project):
    for number, command in enumerate(commands, start=1):
        ended = run_shown(command, project, 20 + 5 * number)
        assert ended.returncode == command.startswith("diff "), (command, ended.text)
        assert "Traceback" not in ended.text
        assert not TRAINS.match(command) or "test accuracy" in ended.stdout, (command, ended.text)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted({SHOWN[command] for command in HERE}))
def test_commands_run(name, project):
    commands = [command for command in HERE if SHOWN[command] == name]
    run_all([command for command in commands if not NEEDS_GPUS.search(command)], project)


@pytest.mark.gpu(2)
def test_commands_for_gpus_run(project):
    run_all(filter(NEEDS_GPUS.search, HERE), project)
