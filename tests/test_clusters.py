"""Several machines for real, on this computer: Slurm, Open MPI, ssh, network namespaces."""

import getpass
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT, finish, run, start, succeed

pytestmark = pytest.mark.slow
DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"
SHORT = ["--dataset", "synthetic", "--model", "linear", "--threads", "1"]
SHORT += ["--no-tensorboard", "--no-progress"]
ENDLESS = [*SHORT, "--epochs", 100000]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_until(is_true, seconds=120):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


# Slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Start a controller and two nodes. Yield the variable by which Slurm's commands find them."""
    programs = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
    if os.geteuid() != 0 or not all(map(shutil.which, programs)):
        pytest.skip("needs root, slurm-wlm and munge")
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents):  # munged refuses folders that others may write to
        if parent.name.startswith("pytest-"):
            parent.chmod(0o755)
    (folder / "key").write_bytes(os.urandom(64))
    (folder / "key").chmod(0o600)
    nodes, name = ("127.0.0.1", "127.0.0.2"), socket.gethostname()
    for subfolder in ("state", *nodes):
        (folder / subfolder).mkdir()
    described = [
        f"NodeName={node} NodeHostname={name} Port={free_port()} CPUs={os.cpu_count()}"
        for node in nodes
    ]
    (folder / "slurm.conf").write_text(
        f"ClusterName=test\nSlurmctldHost={name}(127.0.0.1)\nSlurmUser={getpass.getuser()}\n"
        f"SlurmctldPort={free_port()}\nAuthInfo=socket={folder}/socket\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/%n\n"
        f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid\n"
        "ProctrackType=proctrack/linuxproc\nReturnToService=2\nKillWait=5\n"
        "SchedulerParameters=batch_sched_delay=1,sched_interval=2\n"
        "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n"
        + "\n".join(described)
        + "\nPartitionName=test Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4\n"
    )
    found = {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [
        f"--{name}={folder}/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={folder}/key", *munge],
        ["slurmctld", "-D", "-i"],
        *(["slurmd", "-D", "-N", node] for node in nodes),
    ]
    daemons = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}.out", "a") as log:
                # Not by start(): at the end of each test what that started has to be gone.
                environment = os.environ | found
                daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            time.sleep(1)
        wait_until(lambda: run("sinfo", "-h", "-o", "%T", **found).stdout.strip() == "idle")
        yield found
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


class Job:
    """A job of scripts/slurm.sbatch, on two nodes with a process each."""

    def __init__(self, slurm, folder, data_dir, *flags):
        self.slurm, self.output, self.run_dir = slurm, folder / "out", folder / "run"
        words = ["--parsable", "--cpus-per-task", 1, "--output", self.output]
        flags = [*flags, "--data-dir", data_dir]
        settings = {"RUN_DIR": str(self.run_dir), "NPROC_PER_NODE": "1", **slurm}
        script = ROOT / "scripts" / "slurm.sbatch"
        self.number = succeed("sbatch", *words, script, *flags, **settings).stdout.strip()

    def state(self):
        told = run("scontrol", "show", "job", self.number, **self.slurm).stdout
        return told.partition("JobState=")[2].split(" ")[0]

    def text(self):
        return self.output.read_text() if self.output.exists() else ""


def test_a_job_of_slurm_runs_on_two_nodes(slurm, digits_dir, tmp_path):
    job = Job(slurm, tmp_path, digits_dir, *SHORT, "--max-steps", 5)
    wait_until(lambda: job.state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"))
    assert job.state() == "COMPLETED", job.text()
    assert f"job {job.number}, attempt 1" in job.text()
    assert summary(job.run_dir)["world_size"] == 2


def test_a_job_of_slurm_goes_on_after_its_time_limit_but_not_after_scancel(
    slurm, digits_dir, tmp_path
):
    job = Job(slurm, tmp_path, digits_dir, *ENDLESS)
    wait_until((job.run_dir / "metrics.jsonl").exists)
    # This is what --signal=B:USR1@90 sends when 90 seconds are left.
    succeed("scancel", "--batch", "--signal=USR1", job.number, **slurm)
    wait_until(lambda: f"job {job.number} is queued again" in job.text())
    assert "stopped and saved at step" in job.text()
    time.sleep(3)  # until slurmd has forgotten the first attempt

    def runs_again():  # Slurm would let it wait for two minutes
        run("scontrol", "update", f"JobId={job.number}", "StartTime=now", **slurm)
        return f"job {job.number}, attempt 2" in job.text()

    wait_until(runs_again, 200)
    step = int(re.search(r"saved at step (\d+)", job.text())[1])

    def went_on():
        rows = (job.run_dir / "metrics.jsonl").read_text().splitlines()
        return rows and json.loads(rows[-1])["global_step"] > step

    wait_until(went_on)
    succeed("scancel", job.number, **slurm)
    wait_until(lambda: job.state() in ("CANCELLED", ""))
    assert job.text().count("is queued again") == 1


# Open MPI


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI's mpirun")
def test_ranks_of_mpirun(digits_dir, tmp_path):
    variables = (
        "RANK=$OMPI_COMM_WORLD_RANK LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK"
        " WORLD_SIZE=$OMPI_COMM_WORLD_SIZE"
    )
    flags = f"{' '.join(SHORT)} --max-steps 5 --data-dir {digits_dir} --run-dir {tmp_path}"
    inside = f"{variables} exec {sys.executable} train_ddp.py {flags}"
    root = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["mpirun", "-n", 2, "--oversubscribe", "bash", "-c", inside]
    succeed(*command, **root, **meeting)
    assert summary(tmp_path)["world_size"] == 2


# ssh


@pytest.fixture
def sshd(tmp_path):
    """Start an sshd on loopback. Yield the command that reaches it."""
    program = shutil.which("sshd", path="/usr/sbin:/sbin")
    if not program or os.geteuid() != 0:
        pytest.skip("needs root and openssh-server")
    key, port = tmp_path / "key", free_port()
    succeed("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    Path("/run/sshd").mkdir(exist_ok=True)
    server = {"Port": port, "HostKey": key, "AuthorizedKeysFile": f"{key}.pub", "PidFile": "none"}
    server |= {"UsePAM": "no", "StrictModes": "no", "PermitRootLogin": "yes"}
    server |= {"SetEnv": f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"}
    options = [word for item in server.items() for word in ("-o", "{}={}".format(*item))]
    daemon = start(program, "-D", "-f", "/dev/null", *options)
    client = {"BatchMode": "yes", "StrictHostKeyChecking": "no", "LogLevel": "ERROR"}
    client |= {"UserKnownHostsFile": "/dev/null", "IdentityFile": key, "Port": port}
    yield " ".join(["ssh", *(f"-o {name}={value}" for name, value in client.items())])
    daemon.terminate()
    finish(daemon)


@pytest.mark.parametrize("how", ["SIGTERM to run_ssh.sh", "SIGKILL to a rank"])
def test_run_ssh_trains_on_both_hosts_and_ends_on_both(how, sshd, digits_dir, tmp_path):
    environment = {"SSH": sshd, "HOSTS": "127.0.0.1 127.0.0.2", "NPROC_PER_NODE": "1"}
    environment |= {"MASTER_PORT": str(free_port())}
    flags = [*ENDLESS, "--data-dir", digits_dir, "--run-dir", tmp_path / "run"]
    process = start(ROOT / "scripts" / "run_ssh.sh", *flags, **environment)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and "epoch" in metrics.read_text())
    if how == "SIGTERM to run_ssh.sh":
        process.terminate()
        ended = finish(process, 60)
        assert ended.status == 143, ended.text
        assert "[127.0.0.1] stopped and saved at step" in ended.stdout
    else:
        pids = succeed("pgrep", "-f", f"train_ddp.py.*{tmp_path}/run").stdout.split()
        (rank,) = [p for p in pids if b"\0RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes()]
        os.kill(int(rank), signal.SIGKILL)
        ended = finish(process, 90)
        assert ended.status == 1, ended.text
        assert "ended with status 1, so the others stop" in ended.stderr
    assert "[127.0.0.2] " in ended.stdout


# Network namespaces

ROUTER = "ip netns add {router}\nip netns exec {router} sysctl -qw net.ipv4.ip_forward=1\n"
MACHINE = """
ip netns add {name}
ip -n {name} link add eth0 type veth peer to{node} netns {router}
ip -n {router} addr add 10.77.{node}.1/24 dev to{node}
ip -n {router} link set to{node} up
ip -n {name} addr add 10.77.{node}.2/24 dev eth0
ip -n {name} link set eth0 up
ip -n {name} link set lo up
ip -n {name} route add default via 10.77.{node}.1
mkdir -p /etc/netns/{name}
"""


@pytest.fixture
def on_machines():
    """Make two machines, node0 and node1, and yield a function that starts a command on both.

    node1 resolves its own name to 127.0.1.1, as many a Debian does.
    """
    if os.geteuid() != 0 or os.system("unshare -n ip link >/dev/null 2>&1"):
        pytest.skip("needs root and network namespaces")
    prefix = f"mnist{os.getpid()}"
    router, names = f"{prefix}r", [f"{prefix}n{node}" for node in range(2)]
    script = ROUTER.format(router=router)
    for node, name in enumerate(names):
        script += MACHINE.format(router=router, node=node, name=name)
    succeed("bash", "-ec", script)
    for node, name in enumerate(names):
        own = "127.0.1.1" if node else "10.77.0.2"
        other = f"10.77.0.2 node0\n{own} node1" if node else f"{own} node0\n10.77.1.2 node1"
        Path("/etc/netns", name, "hosts").write_text(f"127.0.0.1 localhost\n{other}\n")

    def begin(command, **variables):
        for node, name in enumerate(names):
            inside = f"hostname node{node}; RANK={node} exec {command}"
            words = ["ip", "netns", "exec", name, "unshare", "-u", "bash", "-c", inside]
            meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.2", "MASTER_PORT": "29500"}
            yield start(*words, **meeting, **variables)

    yield lambda *args, **variables: [finish(p) for p in list(begin(*args, **variables))]
    for name in (*names, router):
        run("ip", "netns", "del", name)
        shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def test_the_doctor_finds_the_machine_that_resolves_its_name_to_loopback(on_machines):
    first, _ = on_machines(f"{sys.executable} {DOCTOR} --timeout 20")
    assert first.status == 1
    assert "error: on node1 the name node1 leads to 127.0.1.1" in first.stdout
    assert "write 10.77.1.2 into its /etc/hosts" in first.stdout
    assert "ok: ranks [0] are on node0, where gloo uses 10.77.0.2" in first.stdout
    # The advice is right: with it the doctor measures, and finds nothing.
    both = on_machines(f"{sys.executable} {DOCTOR} --timeout 20", GLOO_SOCKET_IFNAME="eth0")
    assert [ended.status for ended in both] == [0, 0], both
    assert "ok: gloo: " in both[0].stdout


# Kubernetes


def test_the_command_of_the_manifest_trains_on_two_nodes(digits_dir, tmp_path):
    """No cluster is here: the command of the pods is started as Kubernetes would start it."""
    *_, job = yaml.safe_load_all((ROOT / "scripts" / "kubernetes" / "job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    port, processes = free_port(), []
    for node in range(job["spec"]["completions"]):
        words = " ".join(container["command"])
        words = words.replace("$(JOB_COMPLETION_INDEX)", str(node))
        words = words.replace("mnist-ddp-0.mnist-ddp", "127.0.0.1").replace("29500", str(port))
        words = words.replace("/shared/data", str(digits_dir)).replace("/shared", str(tmp_path))
        processes.append(start(*words.split(), *SHORT, "--max-steps", 5))
    for process in processes:
        ended = finish(process)
        assert ended.status == 0, ended.text
    assert summary(tmp_path / "runs" / "mnist-ddp")["world_size"] == 2
