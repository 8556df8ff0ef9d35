"""Slurm and Open MPI for real: a controller and two nodes of Slurm's, on this machine alone."""

import getpass
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.documents import blocks, read
from tests.launches import LAUNCHES, SHORT, finish_all, launch
from tests.processes import (
    ROOT,
    environment,
    free_port,
    run,
    stray_processes,
    summary,
    wait_until,
)

pytestmark = pytest.mark.slow

# Names that lead to this machine, and are not the same.
NODES = ("127.0.0.1", "127.0.0.2")
SLURM = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
needs_mpirun = pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI's mpirun")
# Of no use to a real cluster: it may run more ranks than cores, and as root.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@needs_mpirun
def test_mpirun_side_by_side(synthetic_dir, tmp_path, expected):
    """Two jobs on one host find ports of their own."""
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {tmp_path}"
    jobs = [launch(LAUNCHES["mpirun"], f"{flags}/{job}", **MPI) for job in range(2)]
    for job, processes in enumerate(jobs):
        (ended,) = finish_all(processes, 120)
        assert ended.returncode == 0, ended.text
        assert summary(tmp_path / str(job))["weights_sha256"] == expected


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Start munged, slurmctld and two slurmd out of a temporary folder; yield what finds them.

    Each node has two GPUs, which are none: Slurm hands out what its configuration lists.
    """
    missing = [name for name in SLURM if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'} (slurm-wlm, munge)")
    folder = tmp_path_factory.mktemp("slurm")
    # munged refuses folders that others may write to, which /tmp is.
    for parent in (folder, *folder.parents):
        if parent.name.startswith("pytest-"):
            parent.chmod(0o755)
    key, munge_socket = folder / "key", folder / "munge.socket"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    name = socket.gethostname()
    ports = [free_port() for _ in range(3)]
    (folder / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmUser={getpass.getuser()}
SlurmctldPort={ports[0]}
AuthInfo=socket={munge_socket}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
ReturnToService=2
KillWait=5
SchedulerParameters=batch_sched_delay=1,sched_interval=2
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={NODES[0]} NodeHostname={name} Port={ports[1]} CPUs={os.cpu_count()} Gres=gpu:2
NodeName={NODES[1]} NodeHostname={name} Port={ports[2]} CPUs={os.cpu_count()} Gres=gpu:2
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
""")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n")
    for gpu in range(2):
        os.mknod(folder / f"gpu{gpu}", stat.S_IFCHR, os.makedev(1, 3))  # /dev/null by another name
    (folder / "state").mkdir()
    for node in NODES:
        (folder / f"spool.{node}").mkdir()
    found = {"SLURM_CONF": str(folder / "slurm.conf")}
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge_socket}",
         f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
         f"--seed-file={folder}/munged.seed"],
        ["slurmctld", "-D", "-i"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}.out", "a") as output:
                to_file = {"stdout": output, "stderr": output}
                daemons.append(subprocess.Popen(command, env=environment(**found), **to_file))
            time.sleep(1)
        wait_until(lambda: run("sinfo", "-h", "-o", "%T", **found).stdout.strip() == "idle")
        yield found
    finally:
        if len(daemons) == len(commands):
            run("scancel", "--user", getpass.getuser(), **found)
            time.sleep(1)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        for pid, _ in stray_processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Leave the daemons alone, which live as long as the module: they look for steps left over."""
    yield
    deadline = time.monotonic() + 60
    while strays := [line for _, line in stray_processes(0) if "train_" in line]:
        assert time.monotonic() < deadline, f"left running: {strays}"
        time.sleep(0.2)


def test_srun(slurm, synthetic_dir, tmp_path, expected):
    command = LAUNCHES["srun"].replace("srun", "srun --nodes 2")
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    (ended,) = finish_all(launch(command, flags, **slurm), 120)
    assert ended.returncode == 0, ended.text
    assert summary(tmp_path / "run")["weights_sha256"] == expected


def sbatch(slurm, *arguments, **extra):
    submitted = run("sbatch", "--parsable", *arguments, **slurm, **extra)
    assert submitted.returncode == 0, submitted.text
    return submitted.stdout.strip()


def job_state(slurm, job):
    told = run("scontrol", "show", "job", job, **slurm).stdout
    return told.partition("JobState=")[2].split(" ")[0]


def wait_for(output, words):
    wait_until(lambda: output.exists() and words in output.read_text(), 200)
    return output.read_text()


def test_sbatch_runs_to_its_end(slurm, synthetic_dir, tmp_path, expected):
    """On two nodes, which the script itself asks for."""
    command = LAUNCHES["sbatch"].split()[-1:]  # the sizes are this test's
    flags = f"{SHORT} --data-dir {synthetic_dir}".replace(" --no-progress", "").split()
    output, run_dir = tmp_path / "out", tmp_path / "run"
    sizes = ["--cpus-per-task", "1", "--output", str(output)]
    job = sbatch(slurm, *sizes, *command, *flags, RUN_DIR=str(run_dir))
    text = wait_for(output, "summary in")
    assert f"job {job}, attempt 1" in text
    assert summary(run_dir)["weights_sha256"] == expected


def test_a_job_of_ones_own(slurm, short_dir, tmp_path):
    """The script that docs/launching.md shows, with this test's names, sizes and training."""
    (shown,) = (b.text for b in blocks(read(ROOT / "docs" / "launching.md")) if "SBATCH" in b.text)
    output, job_script = tmp_path / "out", tmp_path / "my_job.sbatch"
    names = {
        "--partition=gpu --account=my-account": "--partition=test",
        "--gpus-per-node=4 --cpus-per-task=32": "--gpus-per-node=2 --cpus-per-task=1",
        "--nproc_per_node 4": "--nproc_per_node 1",
        "slurm-%j.out": str(output),
        "~/my_venv/bin": str(Path(sys.executable).parent),
        "29500": str(free_port()),
        "train.py": f"scripts/minimal/ddp.py --dataset synthetic --data-dir {short_dir}",
    }
    for name, ours in names.items():
        assert name in shown
        shown = shown.replace(name, ours)
    job_script.write_text(f"{shown.rstrip()} && rm model.pt\n")  # which ddp.py leaves
    job = sbatch(slurm, job_script)
    text = wait_for(output, "of 500")
    assert text.count("epoch 1: ") == 1, text
    wait_until(lambda: job_state(slurm, job) not in ("RUNNING", "COMPLETING"))
    assert job_state(slurm, job) == "COMPLETED", output.read_text()


def test_sbatch_goes_on_after_the_time_limit(slurm, synthetic_dir, tmp_path):
    """The job saves and queues itself again."""
    flags = (
        f"--dataset synthetic --data-dir {synthetic_dir} --model linear --epochs 100000"
        " --threads 1 --no-tensorboard --save-every-steps 100"
    ).split()
    output, run_dir = tmp_path / "out", tmp_path / "run"
    script = str(ROOT / "scripts" / "slurm.sbatch")
    sizes = ["--nodes", "1", "--ntasks-per-node", "2", "--cpus-per-task", "1"]
    job = sbatch(slurm, *sizes, "--output", output, script, *flags, RUN_DIR=str(run_dir))
    wait_until((run_dir / "metrics.jsonl").exists)
    # What --signal=USR1@90 sends when 90 seconds are left.
    assert run("scancel", "--signal=USR1", job, **slurm).returncode == 0
    wait_for(output, f"queueing job {job} again")
    assert "stopped by SIGUSR1" in output.read_text()
    # Slurm lets a requeued job wait for two minutes, if nobody asks for more haste; but in the
    # second of the requeue itself slurmd would take the new start for the one just revoked.
    time.sleep(3)
    deadline = time.monotonic() + 150
    while f"job {job}, attempt 2" not in output.read_text():
        run("scontrol", "update", f"JobId={job}", "StartTime=now", **slurm)
        assert time.monotonic() < deadline, (job_state(slurm, job), output.read_text())
        time.sleep(2)
    text = wait_for(output, "resumed")
    assert "train_ddp.py: error" not in text
    run("scancel", job, **slurm)
    wait_until(lambda: job_state(slurm, job) in ("CANCELLED", ""))
    assert "attempt 3" not in output.read_text()
