"""The scripts in bash: what they start, and what they say when they cannot."""

import itertools
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import ROOT, finish, run, start, succeed, wait_until

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


def test_an_environment_is_used_as_it_is_and_another_is_left_alone(copy):
    """test.sh finds its environment complete, and calls make with it."""
    path = fake(copy / "fakes", "make", 'echo "make $*"; which python')
    (copy / "requirements-dev.txt").write_text("# a comment\ntorch>=2.9\n\npytest\n")
    bin_folder = Path(sys.executable).parent
    script = copy / "scripts" / "test.sh"
    ended = succeed("env", f"PATH={path}", f"VENV={bin_folder.parent}", script, "--all", "-x")
    assert "make check PYTHON=python PYTEST_FLAGS='-m' '' '-x'" in ended.stdout
    assert str(bin_folder / "python") in ended.stdout
    other = copy / "other"
    other.mkdir()
    assert "is yours" in run("env", f"PATH={path}", f"VENV={other}", script).stderr
    assert not [*other.iterdir()]


def test_run_torchrun_is_one_machine_or_one_of_several(tmp_path):
    path = fake(tmp_path, "torchrun", 'echo "$PET_SIGNALS_TO_HANDLE"; printf "%s\\n" "$@"')
    path = path.replace(":", f":{Path(sys.executable).parent}:", 1)  # torchrun's python3
    command = ["env", f"PATH={path}", SCRIPTS / "run_torchrun.sh", "--lr", "1 2"]
    signals, *words = succeed(*command).stdout.splitlines()
    assert "SIGUSR1" in signals
    assert words == ["--standalone", "--nproc_per_node", "2", "train_ddp.py", "--lr", "1 2"]
    several = {"NNODES": "2", "HOST0": "a", "NODE_RANK": "1", "NPROC_PER_NODE": "8"}
    words = succeed(*command, **several).stdout.split()
    given = dict(itertools.pairwise(words))
    assert (given["--nnodes"], given["--node_rank"], given["--master_addr"]) == ("2", "1", "a")
    assert given["--nproc_per_node"] == "8"
    ended = run(*command, NNODES="2", HOST0="a")
    assert ended.status != 0
    assert "NODE_RANK: is needed with NNODES" in ended.stderr


def test_a_machine_without_torchrun_says_so(copy):
    path = fake(copy / "fakes", "nothing", "")
    ended = run("env", f"PATH={path}", copy / "scripts" / "run_torchrun.sh")
    assert ended.status == 127
    assert f"has no torchrun in its PATH, nor in {copy}/.venv/bin" in ended.stderr


SSH = """
[[ $1 == -tt ]] || exit 9
echo "$2 gets $3"
[[ $2 == bad ]] && exit 3
IFS= read -r -N 1 -t 30 key && [[ $key == $'\\003' ]] && echo "$2 was interrupted" && exit 1
"""


def test_run_ssh_starts_every_host_and_stops_all_if_one_fails(tmp_path):
    fake(tmp_path, "ssh", SSH)
    settings = {"SSH": str(tmp_path / "ssh"), "HOSTS": "me@good bad"}
    ended = run(SCRIPTS / "run_ssh.sh", "--lr", "1 2", **settings)
    assert ended.status == 3, ended.text
    assert "bad ended with status 3" in ended.stderr
    assert "[me@good] me@good was interrupted" in ended.stdout
    node = "NNODES=2 HOST0=good NODE_RANK={} scripts/run_torchrun.sh --lr 1\\ 2"
    assert f"[me@good] me@good gets cd {ROOT} && env {node.format(0)}" in ended.stdout
    assert node.format(1) in ended.stdout


SRUN = """
shift
export SLURM_NODEID=0
"$@"
trap 'trap "" USR1; sleep 1; [[ $* != *--save* ]] || touch runs/slurm-10123/last.pt; exit 3' USR1
touch started
while [[ $* == *--endless* ]]; do sleep 0.1; done
"""
SCONTROL = """
case $* in
    "show hostnames "*) printf "node7\\nnode8\\n" ;;
    "show node node7") printf "NodeName=node7\\n   NodeAddr=10.0.0.7 NodeHostName=node7\\n" ;;
    *) echo "scontrol $*" ;;
esac
"""


def test_a_job_of_slurm_is_queued_again_after_its_time_limit(tmp_path):
    """With commands that only pretend. Slurm sends USR1 when 90 seconds are left."""
    path = fake(tmp_path / "fakes", "srun", SRUN)
    fake(tmp_path / "fakes", "scontrol", SCONTROL)
    fake(tmp_path / "fakes", "torchrun", 'echo "$@"')
    job = {"SLURM_JOB_ID": "10123", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    command = ["env", f"PATH={path}", SCRIPTS / "slurm.sbatch", "--lr", "0.2"]
    words = succeed(*command, cwd=tmp_path, **job).stdout.split()
    assert "scontrol" not in words, "nothing stopped it"
    given = dict(itertools.pairwise(words))
    assert (given["--nnodes"], given["--node_rank"]) == ("2", "0")
    assert (given["--master_addr"], given["--master_port"]) == ("10.0.0.7", "20123")
    assert (given["--run-dir"], given["--lr"]) == ("runs/slurm-10123", "0.2")
    assert "--resume" in words

    def stop(*flags):
        (tmp_path / "started").unlink()
        process = start(*command, "--endless", *flags, cwd=tmp_path, **job)
        wait_until((tmp_path / "started").exists, process)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        process.send_signal(signal.SIGUSR1)  # Slurm may send it again while the script saves
        return finish(process)

    assert "so the job is not queued again" in stop().stdout, "it would begin at step 0 for ever"
    (tmp_path / "runs" / "slurm-10123").mkdir(parents=True)
    ended = stop("--save")
    assert (ended.status, ended.stdout.splitlines()[-1]) == (3, "scontrol requeue 10123")
    time.sleep(1)  # the file has to be older than the next attempt
    assert "scontrol" not in stop().stdout, "only an earlier attempt has saved something"
    (tmp_path / "runs" / "slurm-10123" / "summary.json").touch()
    assert "scontrol" not in stop("--save").stdout, "the run is complete"


QUICKSTART = """
if [[ $1 == - ]]; then
    [[ $2 != requirements.txt ]] || exit 0
    echo "${GPUS:-2} mnist"
else
    echo "ran $*"
fi
"""


def test_quickstart_trains_with_equal_conditions_and_says_how_to_go_on(copy):
    path = fake(copy / "fakes", "python3", QUICKSTART)
    script = copy / "scripts" / "quickstart.sh"
    ended = succeed("env", f"PATH={path}", script, "--lr", "0.2", cwd=copy)
    runs = [line for line in ended.stdout.splitlines() if line.startswith("ran ")]
    wanted = [("single", "", 96), ("dp", "--devices 0,1", 48), ("ddp", "--nproc_per_node 2", 48)]
    for line, (name, flags, batch_size) in zip(runs[:3], wanted, strict=True):
        assert f"train_{name}.py" in line
        assert flags in line
        assert f"--batch-size {batch_size} " in line
        assert "--lr 0.2 --dataset mnist" in line
    assert runs[3].startswith("ran scripts/tools/benchmark.py --runs runs/quickstart-")
    for gpus, processes in ((0, 2), (1, 1)):
        ended = succeed("env", f"PATH={path}", script, cwd=copy, GPUS=str(gpus))
        runs = [line for line in ended.stdout.splitlines() if line.startswith("ran ")]
        assert ["--device cpu" in line for line in runs[:3]] == [gpus == 0] * 3
        launcher = f"torchrun --standalone --nproc_per_node {processes}"
        assert f"{processes} train_ddp.py --batch-size {96 // processes} " in runs[2]
        assert f"{launcher} train_ddp.py --dataset mnist" in ended.stdout


GPU_CHECK = """
case "$*" in
    *"$MISSING"*) echo "No module named '$MISSING'"; exit 1 ;;
    -c*available*) echo "$GPUS" ;;
    "-m pytest"*)
        trap 'echo "interrupted in test 7"; exit 1' INT
        env --default-signal=INT setsid sleep 98765 &  # a session of its own, as a rank has
        wait
        ;;
    *doctor.py*) ! pgrep -f "sleep 98765" && echo "ran $*" ;;
    -c*) ;;
    *) echo "ran $*" ;;
esac
"""


@pytest.fixture
def gpu_check(copy):
    """Return a function that runs gpu_check.sh with a python3 that only pretends."""
    path = fake(copy / "fakes", "python3", GPU_CHECK)
    fake(copy / "fakes", "nvidia-smi", 'echo "ran nvidia-smi $*"')

    def check(*parts, **environment):
        environment = {"GPUS": "2", "PART_SECONDS": "8", "MISSING": "nothing"} | environment
        # From its own folder, too.
        command = ["env", f"PATH={path}", "./gpu_check.sh", *parts]
        return run(*command, cwd=copy / "scripts", **environment)

    return check


def test_gpu_check_ends_a_part_that_hangs_before_the_next_begins(gpu_check, copy):
    """Else both would use the GPUs at once. pytest says where it was, and the report has it all."""
    ended = gpu_check("tests", "doctor")
    assert ended.status == 1
    (report,) = copy.glob("runs/*/report.md")
    assert report.read_text() == ended.stdout
    said = ended.stdout.splitlines()
    assert said.index("interrupted in test 7") < said.index("## doctor")
    assert "FAILED: tests, with status 137 (137: it took too long)" in said
    assert any("--nproc_per_node 2 scripts/tools/doctor.py" in line for line in said)
    assert "FAILED: doctor" not in ended.stdout


def test_gpu_check_names_what_is_missing_before_it_begins(gpu_check):
    assert "there is no part docter" in gpu_check("doctor", "docter").stderr
    ended = gpu_check("doctor", "tests", MISSING="pytest")
    assert ended.status == 2
    assert "error: No module named 'pytest'" in ended.stderr
    assert "ran" not in ended.stdout


def test_gpu_check_has_something_to_do_on_one_gpu(gpu_check):
    ended = gpu_check("overlap", "machine", GPUS="1")
    assert ended.status == 0, ended.text
    assert "skipped: with one GPU nothing travels" in ended.stdout
    assert "ran nvidia-smi topo -m" in ended.stdout


@pytest.mark.slow
def test_quickstart_trains_without_a_network_in_a_fresh_copy(digits_dir, tmp_path):
    """Without a network, with drawn digits, in a copy of what git knows."""
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, files):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    dead = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    flags = ["--model", "linear", "--max-steps", 30, "--data-dir", tmp_path / "data"]
    shutil.copytree(digits_dir / "Synthetic", tmp_path / "data" / "Synthetic")
    script = tmp_path / "scripts" / "quickstart.sh"
    ended = succeed(script, *flags, cwd=tmp_path, timeout=280, **dead)
    assert "Going on with drawn digits" in ended.stderr
    table = [line for line in ended.stdout.splitlines() if re.match(r"(single|dp|ddp) +\d", line)]
    rows = [line.split()[:2] for line in table]
    assert rows == [["single", "1"], ["dp", "1"], ["ddp", "2"]]
    assert "dp has no speed-up here" in ended.stdout
    assert not (tmp_path / ".venv").exists()


def test_run_ssh_passes_the_settings_on_to_every_host(tmp_path):
    """Or a host would use a port that is taken, another network, or another script."""
    fake(tmp_path, "ssh", 'echo "$3"')
    settings = {
        "HOST0": "10.0.0.1",
        "NPROC_PER_NODE": "4",
        "MASTER_PORT": "29501",
        "SCRIPT": "scripts/minimal/ddp.py",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "eth2",
        "NCCL_DEBUG": "INFO",
    }
    ssh = {"SSH": str(tmp_path / "ssh"), "HOSTS": "a b"}
    ended = succeed(SCRIPTS / "run_ssh.sh", **ssh, **settings)
    for host in ("a", "b"):
        (line,) = [line for line in ended.stdout.splitlines() if line.startswith(f"[{host}] ")]
        assert {*line.split()} >= {f"{name}={value}" for name, value in settings.items()}
