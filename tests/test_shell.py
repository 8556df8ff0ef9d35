"""The scripts in bash: what they start, and what they say when they cannot.

Most of them call programs here that only pretend. test_engines.py has real ones.
"""

import itertools
import re
import shutil
import signal
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


def test_nothing_is_installed_into_an_environment_of_the_user(copy):
    own = copy / "own"
    own.mkdir()
    assert "is yours" in run(copy / "scripts" / "test.sh", VENV=str(own)).stderr
    assert not [*own.iterdir()]


def test_run_torchrun_is_one_machine_or_one_of_several(tmp_path):
    path = fake(tmp_path, "torchrun", 'echo "$PET_SIGNALS_TO_HANDLE"; printf "%s\\n" "$@"')
    path = path.replace(":", f":{Path(sys.executable).parent}:", 1)  # for python3
    command = ["env", f"PATH={path}", SCRIPTS / "run_torchrun.sh", "--lr", "1 2"]
    signals, *words = succeed(*command).stdout.splitlines()
    assert "SIGUSR1" in signals
    assert words == ["--standalone", "--nproc_per_node", "2", "train_ddp.py", "--lr", "1 2"]
    several = {"NNODES": "2", "HOST0": "a", "NPROC_PER_NODE": "8"}
    words = succeed(*command, NODE_RANK="1", **several).stdout.split()
    given = dict(itertools.pairwise(words))
    assert (given["--nnodes"], given["--node_rank"], given["--master_addr"]) == ("2", "1", "a")
    assert given["--nproc_per_node"] == "8"
    assert "NODE_RANK: is needed with NNODES" in run(*command, **several).stderr


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


def test_run_ssh_starts_every_host_with_its_settings_and_stops_all_if_one_fails(tmp_path):
    fake(tmp_path, "ssh", SSH)
    ssh = {"SSH": str(tmp_path / "ssh"), "HOSTS": "me@good bad"}
    ended = run(SCRIPTS / "run_ssh.sh", "--lr", "1 2", **ssh, NCCL_SOCKET_IFNAME="eth2")
    assert ended.status == 3, ended.text
    assert "bad ended with status 3" in ended.stderr
    assert "[me@good] me@good was interrupted" in ended.stdout
    node = "NNODES=2 HOST0=good NCCL_SOCKET_IFNAME=eth2 NODE_RANK={} scripts/run_torchrun.sh"
    assert f"[me@good] me@good gets cd {ROOT} && env {node.format(0)} --lr 1\\ 2" in ended.stdout
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


def test_a_job_of_slurm_is_queued_again_after_its_time_limit_if_it_has_saved(tmp_path):
    """Slurm sends USR1 when 90 seconds are left."""
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

    (tmp_path / "runs" / "slurm-10123").mkdir(parents=True)
    assert "so the job is not queued again" in stop().stdout, "it would begin at step 0 for ever"
    ended = stop("--save")
    assert (ended.status, ended.stdout.splitlines()[-1]) == (3, "scontrol requeue 10123")


QUICKSTART = """
if [[ $1 == - ]]; then
    [[ $2 != requirements.txt ]] || exit 0
    echo "$GPUS mnist"
else
    echo "ran $*"
fi
"""


@pytest.mark.parametrize("gpus", [1, 2])
def test_quickstart_compares_equal_global_batches_on_gpus(gpus, copy):
    path = fake(copy / "fakes", "python3", QUICKSTART)
    command = ["env", f"PATH={path}", copy / "scripts" / "quickstart.sh", "--lr", "0.2"]
    ended = succeed(*command, cwd=copy, GPUS=str(gpus))
    single, dp, ddp, benchmark = re.findall("(?m)^ran (.*)", ended.stdout)
    for run_of_three in (single, dp, ddp):
        assert "--lr 0.2 --dataset mnist" in run_of_three
        assert "--device cpu" not in run_of_three
    assert single.startswith("train_single.py --batch-size 96 ")
    assert f"--nproc_per_node {gpus} train_ddp.py --batch-size {96 // gpus} " in ddp
    assert ("train_dp.py --batch-size 48 " in dp and "--devices 0,1 " in dp) == (gpus == 2)
    assert benchmark.startswith("scripts/tools/benchmark.py --runs runs/quickstart-")


@pytest.mark.slow
def test_quickstart_trains_without_a_network_in_a_fresh_copy(digits_dir, tmp_path):
    """With drawn digits."""
    fresh = tmp_path / "fresh"
    shutil.copytree(ROOT, fresh, ignore=shutil.ignore_patterns(".*", "data", "runs"))
    shutil.copytree(digits_dir / "Synthetic", fresh / "data" / "Synthetic")
    dead = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = [fresh / "scripts" / "quickstart.sh", "--model", "linear", "--max-steps", 30]
    ended = succeed(*command, timeout=280, **dead)
    assert "Going on with drawn digits" in ended.stderr
    table = [line for line in ended.stdout.splitlines() if re.match(r"(single|dp|ddp) +\d", line)]
    single, dp, ddp = [line.split() for line in table]
    assert (single[:2], dp[:2], ddp[:2]) == (["single", "1"], ["dp", "1"], ["ddp", "2"])
    assert (single[4], dp[4]) == ("1.00", "-")
    assert "dp has no speed-up here" in ended.stdout
    assert not (fresh / ".venv").exists()


GPU_CHECK = """
case "$*" in
    *"$MISSING"*) echo "No module named '$MISSING'"; exit 1 ;;
    -c*available*) echo 2 ;;
    "-m pytest"*)
        trap 'echo "interrupted in test 7"; exit 1' INT
        env --default-signal=INT setsid sleep 98765 &  # a session of its own, as a rank has
        wait
        ;;
    *doctor.py*) ! pgrep -f "sleep 98765" && echo "ran $*" ;;
    -c*) ;;
esac
"""


def test_gpu_check_ends_a_part_that_hangs_and_goes_on_with_the_next(copy):
    """Else both would use the GPUs at once. pytest says where it was, and the report has it all."""
    path = fake(copy / "fakes", "python3", GPU_CHECK)
    command = ["env", f"PATH={path}", copy / "scripts" / "gpu_check.sh", "tests", "doctor"]
    ended = run(*command, MISSING="pytest")
    assert ended.status == 2
    assert "error: No module named 'pytest'" in ended.stderr, "before anything begins"
    ended = run(*command, PART_SECONDS="5", MISSING="nothing")
    assert ended.status == 1
    (report,) = copy.glob("runs/*/report.md")
    assert report.read_text() == ended.stdout
    said = ended.stdout.splitlines()
    assert said.index("interrupted in test 7") < said.index("## doctor")
    assert "FAILED: tests, with status 137 (137: it took too long)" in said
    assert any("--nproc_per_node 2 scripts/tools/doctor.py" in line for line in said)
    assert "FAILED: doctor" not in ended.stdout
