"""Several machines for real, on this computer: Slurm, ssh, network namespaces."""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import ROOT, finish, run, start, succeed, wait_until

pytestmark = pytest.mark.slow
DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"
ENDLESS = ["--dataset", "synthetic", "--model", "linear", "--threads", "1", "--epochs", 100000]
ENDLESS += ["--no-tensorboard", "--no-progress"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


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


def test_a_job_of_slurm_goes_on_after_its_time_limit_but_not_after_scancel(
    slurm, digits_dir, tmp_path
):
    """On two nodes with a process each."""
    output, metrics = tmp_path / "out", tmp_path / "run" / "metrics.jsonl"
    words = ["--parsable", "--cpus-per-task", 1, "--output", output, ROOT / "scripts/slurm.sbatch"]
    settings = {"RUN_DIR": str(tmp_path / "run"), "NPROC_PER_NODE": "1", **slurm}
    job = succeed("sbatch", *words, *ENDLESS, "--data-dir", digits_dir, **settings).stdout.strip()
    wait_until(metrics.exists)
    # This is what --signal=B:USR1@90 sends when 90 seconds are left.
    succeed("scancel", "--batch", "--signal=USR1", job, **slurm)
    wait_until(lambda: f"job {job} is queued again" in output.read_text())
    step = int(re.search(r"stopped and saved at step (\d+)", output.read_text())[1])
    first_row = json.loads(metrics.read_text().splitlines()[0])
    assert first_row["global_step"] == 1920 // (2 * 96), "an epoch of two ranks"
    time.sleep(3)  # until slurmd has forgotten the first attempt

    def runs_again():  # Slurm would let it wait for two minutes
        run("scontrol", "update", f"JobId={job}", "StartTime=now", **slurm)
        return f"job {job}, attempt 2" in output.read_text()

    wait_until(runs_again, seconds=200)
    wait_until(lambda: json.loads(metrics.read_text().splitlines()[-1])["global_step"] > step)
    succeed("scancel", job, **slurm)
    state = ("scontrol", "show", "job", job)
    wait_until(lambda: "JobState=CANCELLED" in run(*state, **slurm).stdout)
    assert output.read_text().count("is queued again") == 1


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


def test_run_ssh_trains_on_both_hosts_and_sigterm_ends_both(sshd, digits_dir, tmp_path):
    environment = {"SSH": sshd, "HOSTS": "127.0.0.1 127.0.0.2", "NPROC_PER_NODE": "1"}
    environment |= {"MASTER_PORT": str(free_port())}
    flags = [*ENDLESS, "--data-dir", digits_dir, "--run-dir", tmp_path / "run"]
    process = start(ROOT / "scripts" / "run_ssh.sh", *flags, **environment)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and "epoch" in metrics.read_text())
    process.terminate()
    ended = finish(process, 60)
    assert ended.status == 143, ended.text
    assert "[127.0.0.1] stopped and saved at step" in ended.stdout
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
