"""The scripts in bash: the first command, the environment, and launches that cannot work."""

import os
import re
import shlex
import shutil
import signal

import pytest

from tests.processes import ROOT, error_line, finish, run, start, succeed, wait_until

# Programs that install and start nothing. $GPUS is what torch counts, $INSTALL what pip does.
PYTHON = """case "$*" in
    -c*) echo "${GPUS:-0}" ;;
    -m\\ venv*) mkdir -p "$3/bin" && touch "$3/pyvenv.cfg" && cp "$0" "$3/bin/python" ;;
    -m\\ pip*) eval "$INSTALL" ;;
    -\\ *) [ -z "$INSTALL" ] ;;
    *) echo "ran $*" ;;
esac"""
FAKES = {"python3": PYTHON} | dict.fromkeys(("torchrun", "ssh", "srun"), "echo STARTED")
TWO = {"NNODES": "2", "MASTER_ADDR": "a"}
WRONG = [
    ("run_torchrun.sh", {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0 is not a whole number, 1 or"),
    ("run_torchrun.sh", {"NPROC_PER_NODE": "abc"}, "NPROC_PER_NODE=abc is not a whole number"),
    ("run_torchrun.sh", {"NNODES": "abc"}, "NNODES=abc is neither a number of machines nor"),
    ("run_torchrun.sh", {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
    ("run_torchrun.sh", {"MASTER_ADDR": "a"}, "MASTER_ADDR is set, but NNODES is not"),
    ("run_torchrun.sh", TWO | {"NODE_RANK": "abc"}, "NODE_RANK=abc is not a whole number"),
    ("run_torchrun.sh", TWO | {"NODE_RANK": "-1"}, "NODE_RANK=-1 is not a whole number"),
    ("run_torchrun.sh", TWO | {"NODE_RANK": "2"}, "NODE_RANK=2 is not below NNODES=2"),
    ("run_torchrun.sh", {"PATH": "/usr/bin:/bin"}, "there is no .venv/bin/torchrun: activate"),
    ("run_ssh.sh", {}, "set HOSTS or HOSTFILE"),
    ("run_ssh.sh", {"HOSTS": "a, b"}, "'a,' in HOSTS is no host name"),
    ("run_ssh.sh", {"HOSTS": "a b", "NPROC_PER_NODE": "abc"}, "NPROC_PER_NODE=abc is not a whole"),
    ("run_torchrun.sh", {"PATH": "/usr/bin:/bin", "VENV": "old"}, "Python was upgraded"),
    ("quickstart.sh", {"INSTALL": "false", "VENV": "old"}, "Python was upgraded"),
    ("test.sh", {"INSTALL": "false", "VENV": "fakes"}, "fakes exists, but is not a virtual"),
    ("test.sh", {"INSTALL": "false", "TORCH_BACKEND": "rocm"}, "is neither cpu nor cuda"),
]


@pytest.fixture
def copy(tmp_path):
    """A checkout of its own, without an environment; and fake programs."""
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "runs", "data"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "fakes").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "fakes" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "fakes" / name).chmod(0o755)
    return tmp_path


def faked(copy, name, *arguments, **variables):
    variables = {"PATH": f"{copy}/fakes:/usr/bin:/bin"} | variables
    return start(copy / "scripts" / name, *arguments, cwd=copy, **variables)


@pytest.mark.slow
def test_quickstart_compares_the_three(copy, synthetic_dir):
    """Without a network, with drawn digits; nothing is installed where all that is needed is there.

    Every process starts as it does for a user, since a shell starts it.
    """
    (copy / "data").mkdir()
    for folder in synthetic_dir.iterdir():
        (copy / "data" / folder.name).symlink_to(folder)
    words = ["--model", "linear", "--max-steps", 30]
    dead = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    ended = succeed(run(copy / "scripts" / "quickstart.sh", *words, cwd=copy, timeout=250, **dead))
    assert not (copy / ".venv").exists()
    assert "Going on with drawn digits" in ended.stderr
    assert ended.stdout.count("data    synthetic") == 4
    rows = [line.split() for line in ended.stdout.splitlines() if line.endswith(" MB")]
    assert [row[0] for row in rows] == ["single", "dp", "ddp", "single"]
    assert rows[0][rows[0].index("x", 3) - 1] == "1.00"
    assert "a device is a core of the CPU" in ended.stdout
    assert "single on 2 cores is one process without data parallelism" in ended.stdout
    for words in ("How to read it", "tensorboard", "MODELS in models.py"):
        assert words in ended.stdout
    # What it advises can be copied.
    line = next(line for line in ended.stdout.splitlines() if "--resume" in line)
    succeed(run(*shlex.split(line)[3:], cwd=copy))


@pytest.mark.parametrize(
    ("gpus", "flags", "devices"),
    [(0, [], "cpu " * 4), (1, [], "0"), (2, [], "0 0,1 0,1"), (2, ["--device", "cpu"], "cpu " * 4)],
)
def test_a_gpu_is_a_device_where_there_are_some(gpus, flags, devices, copy):
    words = ["--epochs", "2", *flags]
    ended = finish(faked(copy, "quickstart.sh", *words, GPUS=str(gpus)))
    assert ended.returncode == 0, ended.text
    trained = re.findall(r"^ran .*?--devices? (\S+)", ended.stdout, re.MULTILINE)
    assert trained == devices.split()
    assert ("so they need two" in ended.stderr) == (gpus == 1)


@pytest.mark.parametrize(("install", "status"), [("false", 1), ("touch began; sleep 60", 130)])
@pytest.mark.parametrize("is_mine", [False, True])
def test_only_an_environment_that_this_run_made_is_removed(install, status, is_mine, copy):
    if is_mine:
        (copy / ".venv" / "bin").mkdir(parents=True)
        (copy / ".venv" / "pyvenv.cfg").touch()
        shutil.copy(copy / "fakes" / "python3", copy / ".venv" / "bin" / "python")
    process = faked(copy, "test.sh", INSTALL=install)
    if status == 130:
        wait_until((copy / "began").exists)
        os.killpg(process.pid, signal.SIGINT)
    ended = finish(process)
    assert ended.returncode == status, ended.text
    assert ("Install python3-venv" in ended.stderr) == (status == 1)
    assert (copy / ".venv").exists() == is_mine


@pytest.mark.parametrize(
    ("chosen", "has_gpu", "is_small"),
    [("", False, True), ("", True, False), ("cuda", False, False), ("cpu", True, True)],
)
def test_without_a_gpu_the_small_build_of_torch_is_installed(chosen, has_gpu, is_small, copy):
    (copy / "fakes" / "nvidia-smi").write_text(f"#!/bin/sh\nexit {int(not has_gpu)}\n")
    (copy / "fakes" / "nvidia-smi").chmod(0o755)
    install = 'echo "from $PIP_EXTRA_INDEX_URL" >&2; false'
    ended = finish(faked(copy, "test.sh", INSTALL=install, TORCH_BACKEND=chosen))
    assert ("/whl/cpu" in ended.stderr) == ("2 minutes, 1 GB" in ended.stderr) == is_small


@pytest.mark.parametrize(("name", "settings", "words"), WRONG)
def test_what_cannot_work_is_one_line_before_anything_starts(name, settings, words, copy):
    (copy / "old" / "bin").mkdir(parents=True)
    for python in ("python", "python3"):
        (copy / "old" / "bin" / python).symlink_to("/gone/python3.9")
    before = sorted(copy.rglob("*"))
    ended = finish(faked(copy, name, **settings))
    assert words in error_line(ended)
    assert "STARTED" not in ended.stdout
    assert sorted(copy.rglob("*")) == before, "nothing is removed"


@pytest.mark.parametrize("name", ["run_torchrun.sh", "run_ssh.sh", "slurm.sbatch"])
def test_a_dry_run_anywhere_on_the_line_starts_nothing(name, copy):
    settings = {"NPROC_PER_NODE": "4", "NNODES": "3", "MASTER_ADDR": "a", "HOSTS": "a b c"}
    settings |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NUM_NODES": "3"}
    told = succeed(finish(faked(copy, name, "--epochs", "7", "--dry-run", **settings))).stdout
    assert "--epochs 7" in told
    assert "STARTED" not in told
    table = [line.split() for line in told.partition("\nnode ")[2].splitlines()[1:]]
    assert [columns[-1] for columns in table] == ["0-3", "4-7", "8-11"]
    assert succeed(finish(faked(copy, name, "--epochs", "7", "--help"))).stdout.startswith("Tr")


def test_settings_reach_the_command(copy):
    """A job's own name, and hosts from a file."""
    elastic = {"NNODES": "1:4", "MASTER_ADDR": "a", "RDZV_ID": "mine", "NPROC_PER_NODE": "1"}
    told = succeed(finish(faked(copy, "run_torchrun.sh", "--dry-run", **elastic))).stdout
    assert "--rdzv_id mine " in told
    (copy / "hosts").write_text("# ours\nnode7 slots=8\n\nme@node8  # new\n")
    hosts = {"HOSTFILE": "hosts", "NPROC_PER_NODE": "1"}
    told = succeed(finish(faked(copy, "run_ssh.sh", "--dry-run", **hosts))).stdout
    assert re.findall(r" (\S+): cd .* NODE_RANK=(\d) MASTER_ADDR=node7", told) == [
        ("node7", "0"),
        ("me@node8", "1"),
    ]


@pytest.mark.parametrize(("usable", "processes"), [(3, "gpu"), (0, "2")])
def test_only_gpus_that_torch_can_use_are_counted(usable, processes, tmp_path):
    """NVML, which device_count() asks, lists three; the driver may be too old for torch."""
    torch = f"class cuda:\n device_count = lambda: 3\n is_available = lambda: {usable} > 0\n"
    (tmp_path / "torch.py").write_text(f"__version__ = '2.15'\n{torch}")
    command = [ROOT / "scripts" / "run_torchrun.sh", "--dry-run"]
    ended = succeed(run(*command, PYTHONPATH=str(tmp_path), real=True))
    assert f"--nproc_per_node {processes} " in ended.stdout
    assert ended.stdout.split()[-1] == ("0-2" if usable else "0-1")
    assert ("lists 3 GPUs but cannot use them: update" in ended.stderr) == (not usable)
