"""The scripts in bash: what they start, and what they say when they cannot."""

import itertools
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, finish, run, start, succeed

SCRIPTS = ROOT / "scripts"


def fake(folder, name, content):
    """Write a program in bash into ``folder``, and return the PATH by which it is found first."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{content}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.fixture
def copy(tmp_path):
    """A copy of the scripts and the requirements, where runs/ and .venv may be made."""
    shutil.copytree(SCRIPTS, tmp_path / "copy" / "scripts")
    for name in ("requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path / "copy")
    return tmp_path / "copy"


def test_run_torchrun_is_one_machine_or_one_of_several(tmp_path):
    path = fake(tmp_path, "torchrun", 'echo "$PET_SIGNALS_TO_HANDLE"; printf "%s\\n" "$@"')
    command = ["env", f"PATH={path}", SCRIPTS / "run_torchrun.sh", "--lr", "1 2"]
    signals, *words = succeed(*command).stdout.splitlines()
    assert "SIGUSR1" in signals
    assert words == ["--standalone", "--nproc_per_node", "auto", "train_ddp.py", "--lr", "1 2"]
    several = {"NNODES": "2", "HOST0": "a", "NODE_RANK": "1", "NPROC_PER_NODE": "8"}
    words = succeed(*command, **several).stdout.split()
    given = dict(itertools.pairwise(words))
    assert (given["--nnodes"], given["--node_rank"], given["--master_addr"]) == ("2", "1", "a")
    assert given["--nproc_per_node"] == "8"
    ended = run(*command, NNODES="2", HOST0="a")
    assert ended.status != 0
    assert "NODE_RANK: is needed with NNODES" in ended.stderr


SSH = """
[[ $1 == -tt ]] || exit 9
echo "$2 gets $3"
[[ $2 == bad && -e $READY ]] && exit 3
touch "$READY"
IFS= read -r -N 1 -t 30 key && [[ $key == $'\\003' ]] && echo "$2 was interrupted" && exit 1
"""


def test_run_ssh_starts_every_host_and_stops_all_if_one_fails(tmp_path):
    fake(tmp_path, "ssh", SSH.replace("&& -e $READY ", ""))
    settings = {"SSH": str(tmp_path / "ssh"), "READY": str(tmp_path / "ready")}
    ended = run(SCRIPTS / "run_ssh.sh", "--lr", "1 2", HOSTS="me@good bad", **settings)
    assert ended.status == 3, ended.text
    assert "bad ended with status 3, so the others stop" in ended.stderr
    assert "[me@good] me@good was interrupted" in ended.stdout
    node = "NNODES=2 HOST0=good NODE_RANK={} scripts/run_torchrun.sh --lr 1\\ 2"
    assert f"[me@good] me@good gets cd {ROOT} && env {node.format(0)}" in ended.stdout
    assert node.format(1) in ended.stdout


def test_run_ssh_passes_sigterm_on_to_every_host(tmp_path):
    fake(tmp_path, "ssh", SSH)
    settings = {"SSH": str(tmp_path / "ssh"), "READY": str(tmp_path / "ready"), "HOSTS": "a b"}
    process = start(SCRIPTS / "run_ssh.sh", **settings)
    deadline = time.monotonic() + 20
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)  # until the other is there, too
    process.terminate()
    ended = finish(process, 20)
    assert ended.status == 143
    assert "[a] a was interrupted" in ended.stdout
    assert "[b] b was interrupted" in ended.stdout


@pytest.mark.parametrize(
    ("is_ours", "words"),
    [(True, "the packages could not be installed (no network)"), (False, "is yours: install")],
)
def test_an_environment_that_is_not_ours_is_left_alone(is_ours, words, copy):
    venv = copy / ".venv"
    fake(venv / "bin", "python", 'echo "no network"; exit 1')
    prompt = "mnist-data-parallel" if is_ours else "mine"
    (venv / "pyvenv.cfg").write_text(f"prompt = '{prompt}'\n")
    path = fake(copy / "fakes", "python3", 'touch "$PWD/began"')
    ended = run("env", f"PATH={path}", copy / "scripts" / "test.sh", cwd=copy)
    assert ended.status == 2
    assert words in ended.stderr.splitlines()[-1]
    assert (copy / "began").exists() == is_ours
    assert (venv / "pyvenv.cfg").exists()


def test_what_is_satisfied_is_not_installed_again(copy):
    """test.sh finds its environment complete, and calls make with it."""
    bin_folder = Path(sys.executable).parent
    path = fake(copy / "fakes", "make", 'echo "make $*"; which python')
    wanted = copy / "requirements-dev.txt"
    wanted.write_text("# a comment\ntorch>=2.9\n\npytest\n")
    command = ["env", f"PATH={path}", f"VENV={bin_folder.parent}", copy / "scripts" / "test.sh"]
    begin = time.monotonic()
    ended = succeed(*command, "--all", "-x", cwd=copy)
    assert time.monotonic() - begin < 5
    assert 'make check PYTHON=python PYTEST_FLAGS=-m "" -x' in ended.stdout
    assert str(bin_folder / "python") in ended.stdout
    wanted.write_text("torch>=99\n")
    assert "is yours" in run(*command, cwd=copy).stderr


QUICKSTART = """
if [[ $1 == - ]]; then
    [[ $2 != requirements.txt ]] || exit 0
    echo "$GPUS mnist"
else
    echo "ran $*"
fi
"""


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        ("1", ["--device cpu --threads 1"] * 3),
        ("2", ["--devices 0 ", "--devices 0,1", "--devices 0,1"]),
    ],
)
def test_quickstart_trains_with_equal_conditions_and_says_how_to_go_on(gpus, devices, copy):
    path = fake(copy / "fakes", "python3", QUICKSTART)
    script = copy / "scripts" / "quickstart.sh"
    ended = succeed("env", f"PATH={path}", script, "--lr", "0.2", cwd=copy, GPUS=gpus)
    runs = [line for line in ended.stdout.splitlines() if line.startswith("ran ")]
    assert [name in line for name, line in zip(("single", "dp", "ddp"), runs, strict=False)]
    for line, device in zip(runs[:3], devices, strict=True):
        assert device in line
        assert "--epochs 0.5 --lr 0.2 --dataset mnist" in line
    sizes = [line.partition("--batch-size ")[2].split()[0] for line in runs[:3]]
    assert sizes == (["96", "48", "48"] if gpus == "2" else ["96", "96", "48"])
    assert runs[3].startswith("ran scripts/tools/benchmark.py --runs runs/quickstart-")
    assert "torchrun --standalone --nproc_per_node 2 train_ddp.py --dataset mnist" in ended.stdout


def test_gpu_check_reports_what_ran_and_what_failed(copy):
    answers = '-c*available*) echo 2;; *pytest*) echo oh; exit 1;; *) echo "ran $*";;'
    path = fake(copy / "fakes", "python3", f'case "$*" in {answers} esac')
    script = copy / "scripts" / "gpu_check.sh"
    ended = run("env", f"PATH={path}", script, "tests", "doctor", cwd=copy)
    assert ended.status == 1
    (report,) = copy.glob("runs/*/report.md")
    assert report.read_text() == ended.stdout
    assert "FAILED: tests" in ended.stdout
    assert "--nproc_per_node 2 scripts/tools/doctor.py" in ended.stdout
    assert "there is no part docter" in run("env", f"PATH={path}", script, "docter").stderr


@pytest.mark.slow
def test_quickstart_for_real(digits_dir, tmp_path):
    """Without a network, with drawn digits, in a copy of what git knows."""
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, files):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    dead = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    flags = ["--model", "linear", "--max-steps", 30, "--data-dir", tmp_path / "data"]
    shutil.copytree(digits_dir / "Synthetic", tmp_path / "data" / "Synthetic")
    ended = succeed(tmp_path / "scripts" / "quickstart.sh", *flags, cwd=tmp_path, **dead)
    assert "Going on with drawn digits" in ended.stderr
    rows = [line.split()[:2] for line in ended.stdout.splitlines() if "%" in line]
    assert rows == [["single", "1"], ["dp", "1"], ["ddp", "2"]]
    assert "dp: nn.DataParallel only calls the model" in ended.stdout
    assert not (tmp_path / ".venv").exists()
