"""The scripts in bash: the first command, the environment, and launches that cannot work."""

import datetime
import itertools
import os
import re
import shlex
import shutil
import signal

import pytest

from tests.processes import ROOT, error_line, finish, run, start, succeed, wait_until

TWO = {"NNODES": "2", "MASTER_ADDR": "a"}
WRONG = [
    ("run_torchrun.sh", {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0 is not a whole number, 1 or"),
    ("run_torchrun.sh", {"NNODES": "abc"}, "NNODES=abc is neither a number of machines nor"),
    ("run_torchrun.sh", {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
    ("run_torchrun.sh", {"MASTER_ADDR": "a"}, "MASTER_ADDR is set, but NNODES is not"),
    ("run_torchrun.sh", TWO | {"NODE_RANK": "2"}, "NODE_RANK=2 is not below NNODES=2"),
    ("run_torchrun.sh", {"PATH": "/usr/bin:/bin"}, "there is no .venv/bin/torchrun: activate"),
    ("run_ssh.sh", {}, "set HOSTS or HOSTFILE"),
    ("run_ssh.sh", {"HOSTS": "a, b"}, "'a,' in HOSTS is no host name"),
    ("quickstart.sh", {"INSTALL": "false", "VENV": "old"}, "Python was upgraded"),
    ("test.sh", {"INSTALL": "false", "VENV": "fakes"}, "fakes exists, but is not a virtual"),
    ("test.sh", {"INSTALL": "false", "TORCH_BACKEND": "rocm"}, "TORCH_BACKEND=rocm is none of cpu"),
    ("gpu_check.sh", {"FLAGS": "--data-dir"}, "--data-dir wants a folder after it"),
    ("gpu_check.sh", {"FLAGS": "--only doctor,docter"}, "docter is no part: see --list"),
]


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
    for words in ("How to read it", "tensorboard", "--model my_network:MyNetwork"):
        assert words in ended.stdout
    # What it advises can be copied.
    line = next(line for line in ended.stdout.splitlines() if "--resume" in line)
    succeed(run(*shlex.split(line)[3:], cwd=copy))


# GPUs, flags of the user, and devices and CPU threads of each training: DataParallel has two cores
# in one process, DDP one in each of two.
CORES = ["cpu 1", "cpu 2", "cpu 1"]


@pytest.mark.parametrize(
    ("gpus", "flags", "devices"),
    [
        (0, [], [*CORES, "cpu 2"]),
        (1, [], [*CORES, "0 -"]),
        (2, [], ["0 -", "0,1 -", "0,1 -"]),
        (2, ["--device", "cpu"], [*CORES, "cpu 2"]),
    ],
)
def test_a_gpu_is_a_device_where_there_are_two(gpus, flags, devices, copy):
    """One GPU trains alone, beside DataParallel and DDP on the CPU."""
    ended = finish(faked(copy, "quickstart.sh", "--epochs", "2", *flags, GPUS=str(gpus)))
    assert ended.returncode == 0, ended.text
    found = []
    for line in re.findall(r"^ran .*train_.*", ended.stdout, re.MULTILINE):
        given = dict(itertools.pairwise(line.split()))
        device = given.get("--devices") or given["--device"]
        found.append(f"{device} {given.get('--threads', '-')}")
        assert given.get("--replicas") == ("2" if "train_dp" in line and device == "cpu" else None)
    assert found == devices
    assert ("so they need two" in ended.stderr) == (gpus == 1)


@pytest.mark.parametrize(
    ("install", "status", "is_mine"),
    [("false", 1, False), ("touch began; sleep 60", 130, False), ("false", 1, True)],
)
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


# What nvidia-smi says of driver and GPU, TORCH_BACKEND, and the folder of the build and its size.
@pytest.mark.parametrize(
    ("smi", "chosen", "folder", "size"),
    [
        (None, "", "/whl/cpu ", "1 GB"),
        ("580.65.06, 9.0", "", "", "6 GB"),
        ("535.104.05, 9.0", "", "/whl/cu126 ", "6 GB"),  # a driver too old for CUDA 13
        ("580.65.06, 7.0", "", "/whl/cu126 ", "6 GB"),  # a GPU too old for it
        ("580.65.06, 9.0", "cpu", "/whl/cpu ", "1 GB"),
    ],
)
def test_the_build_of_torch_fits_the_machine(smi, chosen, folder, size, copy):
    """With pip, which takes the package index's build if it is asked for nothing else."""
    fake = copy / "fakes" / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\necho '{smi}'\n" if smi else "#!/bin/sh\nexit 9\n")
    fake.chmod(0o755)
    install = 'echo "asked: $* " >&2; case "$*" in *-r*) false ;; esac'
    ended = finish(faked(copy, "test.sh", INSTALL=install, TORCH_BACKEND=chosen))
    assert f"(about 2 minutes, {size})" in ended.stderr
    asked = re.findall("asked: .* --disable-pip-version-check (.*)", ended.stderr)
    assert asked.pop() == "-rrequirements.txt -rrequirements-dev.txt "
    url = f"--index-url https://download.pytorch.org{folder}torch torchvision "
    assert asked == ([url] if folder else [])


def test_uv_finds_the_build_itself(copy):
    (copy / "fakes" / "uv").write_text('#!/bin/sh\necho "uv: $UV_TORCH_BACKEND" >&2; exit 1\n')
    (copy / "fakes" / "uv").chmod(0o755)
    for chosen, told in (("", "auto"), ("cpu", "cpu"), ("cuda", "")):
        ended = finish(faked(copy, "test.sh", INSTALL="false", TORCH_BACKEND=chosen))
        assert f"uv: {told}\n" in ended.stderr


@pytest.mark.parametrize(("name", "settings", "words"), WRONG)
def test_what_cannot_work_is_one_line_before_anything_starts(name, settings, words, copy):
    (copy / "old" / "bin").mkdir(parents=True)
    for python in ("python", "python3"):
        (copy / "old" / "bin" / python).symlink_to("/gone/python3.9")
    before = sorted(copy.rglob("*"))
    ended = finish(faked(copy, name, *settings.get("FLAGS", "").split(), **settings))
    assert words in error_line(ended)
    assert "STARTED" not in ended.stdout
    assert sorted(copy.rglob("*")) == before, "nothing is removed"


def test_a_batch_job_is_warned_and_ends_with_its_first_failure(copy):
    """Slurm reads the options above the first command; its signal has to reach the tasks."""
    text = (ROOT / "scripts" / "slurm.sbatch").read_text()
    options = re.findall(r"^#SBATCH (\S+)$", text.partition("\nset -")[0], re.MULTILINE)
    assert "--signal=USR1@90" in options, "not B:USR1, which the batch script alone would get"
    assert {"--requeue", "--open-mode=append"} <= {*options}
    told = succeed(finish(faked(copy, "slurm.sbatch", "--dry-run"))).stdout
    assert told.split()[:2] == ["srun", "--kill-on-bad-exit=1"]


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
    """A job's name, settings on other hosts, and hosts from a file."""
    day = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
    job = {"MASTER_ADDR": "a", "NPROC_PER_NODE": "1"}
    for settings, name in (
        ({"NNODES": "1:4", "RDZV_ID": "mine"}, "mine"),
        ({"NNODES": "1:4"}, "mnist-ddp"),  # a machine may join on another day
        ({"NNODES": "2"}, f"mnist-ddp-{day}"),  # or a failed run would go on, unasked
    ):
        dry = finish(faked(copy, "run_torchrun.sh", "--dry-run", **job, **settings))
        assert f"--rdzv_id {name} " in dry.stdout
    settings = {"MASTER_PORT": "4", "RDZV_TIMEOUT": "5", "MAX_RESTARTS": "6", "SCRIPT": "my script"}
    hosts = {"HOSTS": "a", "NPROC_PER_NODE": "3", "SSH": "my ssh"} | settings
    told = succeed(finish(faked(copy, "run_ssh.sh", "--dry-run", **hosts))).stdout
    line = told.splitlines()[0]
    assert line.startswith("my ssh a: cd ")
    words = shlex.split(line)
    given = {word.partition("=")[::2] for word in words}
    assert {*settings.items(), ("NPROC_PER_NODE", "3"), ("NNODES", "1")} <= given
    assert words[-1] == "scripts/run_torchrun.sh", "without flags nothing comes after it"
    (copy / "hosts").write_text("# ours\nnode7 slots=8\n\nme@node8  # new\n")
    hosts = {"HOSTFILE": "hosts", "NPROC_PER_NODE": "1"}
    told = succeed(finish(faked(copy, "run_ssh.sh", "--dry-run", **hosts))).stdout
    found = re.findall(r" (\S+): cd .* NODE_RANK=(\d) MASTER_ADDR=node7", told)
    assert found == [("node7", "0"), ("me@node8", "1")]


TORCH = """
__version__ = "2.15"
class Tensor:
    def __init__(self, index):
        self.index = index
    def __add__(self, other):
        if str(self.index) in "{broken}":
            raise RuntimeError("CUDA error: no kernel image is available for execution\\nmore")
        return self
    def sum(self):
        return self
    def item(self):
        return 4
def ones(count, device):
    return Tensor(device[-1])
class cuda:
    device_count = lambda: 3
    is_available = lambda: {available}
    get_device_capability = lambda index: ({major}, 0)
"""
WAYS = [  # whether the driver serves torch, GPUs that cannot compute, their capability, processes
    (False, "", 9, 2, "lists 3 GPUs but cannot use them: update the GPU driver"),
    (True, "1", 7, 2, "sm_70, for which torch 2.15 has no code: pip install --index-url"),
    (True, "02", 14, 1, "to leave out the others: CUDA_VISIBLE_DEVICES=1\n"),
]


@pytest.mark.parametrize(("available", "broken", "major", "ranks", "words"), WAYS)
def test_only_gpus_that_compute_are_counted(available, broken, major, ranks, words, tmp_path):
    """NVML, which device_count() asks, lists three."""
    content = TORCH.format(available=available, broken=broken, major=major)
    (tmp_path / "torch.py").write_text(content)
    command = [ROOT / "scripts" / "run_torchrun.sh", "--dry-run"]
    ended = succeed(run(*command, PYTHONPATH=str(tmp_path), real=True))
    assert f"--nproc_per_node {ranks} " in ended.stdout
    assert ended.stdout.split()[-1] == f"0-{ranks - 1}"
    assert words in ended.stderr
