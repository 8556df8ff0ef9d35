"""What is made for clusters, on real ones of one computer: scripts/real_engines.sh installs them.

Two machines are two namespaces of Linux, each with a network, a host name and an /etc/hosts of its
own. They end with the process that holds them.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT, finish, run, start, succeed, wait_until

BIN = Path(sys.executable).parent
PATH = f"{BIN}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
DOCTOR = ROOT / "scripts" / "tools" / "doctor.py"
QUIET = ["--no-tensorboard", "--no-progress"]
ENDLESS = ["--epochs", 1000, "--batch-size", 1, *QUIET]  # 1,920 steps an epoch on one process
HOSTS = "127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n"
LONG = 400  # seconds: a busy computer needs a minute to start a training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def need(*programs):
    """Skip the test if a program is not installed, or if this is not root."""
    missing = [program for program in programs if not shutil.which(program, path=PATH)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs {', '.join(missing) or 'root'}: see scripts/real_engines.sh")


@dataclass
class Machine:
    """A machine of its own, as far as a network can tell."""

    name: str
    address: str
    holder: subprocess.Popen

    @property
    def network(self):
        return f"/proc/{self.holder.pid}/ns/net"

    def start(self, *words, **environment):
        enter = ["nsenter", "--target", self.holder.pid, "--net", "--uts", "--mount", "--"]
        command = [*enter, "env", "-C", ROOT, f"PATH={PATH}", *words]
        return start(*command, **environment)

    def succeed(self, *words, **environment):
        ended = finish(self.start(*words, **environment), LONG)
        assert ended.status == 0, ended.text
        return ended.stdout

    def crash(self):
        """Kill every process of this machine. Its network stays, or the cable would go too."""
        network = os.stat(self.network).st_ino

        def kill_all():
            """Return whether there was no process left. One that has ended has no network."""
            left = 0
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    is_here = (folder / "ns" / "net").stat().st_ino == network
                    if is_here and int(folder.name) != self.holder.pid:
                        left += 1
                        os.kill(int(folder.name), signal.SIGKILL)
                except OSError:
                    continue  # it has ended meanwhile
            return left == 0

        wait_until(kill_all)

    def end(self):
        self.crash()
        self.holder.kill()
        self.holder.communicate()


@pytest.fixture
def two_machines(tmp_path):
    """Return a function that starts two machines, node0 and node1, joined by a cable."""
    need("unshare", "nsenter", "ip")
    machines = []

    def begin(hosts=(HOSTS, HOSTS), addresses=("10.77.0.1", "10.77.0.2")):
        for i in (0, 1):
            file = tmp_path / f"hosts{i}"
            file.write_text(hosts[i])
            commands = f"hostname node{i}; mount --bind {file} /etc/hosts; ip link set lo up"
            commands += "; echo ready; exec sleep infinity"
            holder = start("unshare", "--net", "--uts", "--mount", "bash", "-ec", commands)
            if holder.stdout.readline() != "ready\n":
                pytest.skip(f"needs namespaces: {finish(holder).stderr}")
            machines.append(Machine(f"node{i}", addresses[i], holder))
        one, other = (machine.holder.pid for machine in machines)
        cable = f"ip link add eth0 netns {one} type veth peer name eth0 netns {other}"
        succeed(*cable.split())
        for machine in machines:
            # Without nodad an address of IPv6 can be used after a second only.
            size = ["/64", "nodad"] if ":" in machine.address else ["/24"]
            address = [machine.address + size[0], "dev", "eth0", *size[1:]]
            machine.succeed("ip", "addr", "add", *address)
            machine.succeed("ip", "link", "set", "eth0", "up")
        return machines

    yield begin
    for machine in machines:
        machine.end()


def saved_step(folder):
    """Return the step of the last checkpoint, or 0."""
    import torch

    path = folder / "checkpoints" / "last.pt"
    if not path.exists():
        return 0
    return torch.load(path, map_location="cpu", weights_only=True)["position"]["step"]


def start_torchrun(machine, words, training, *flags, log=None, **environment):
    """Start torchrun with one process there. What it prints can go to a file."""
    arguments = training.arguments("ddp", "--model", "linear", *flags)
    command = ["torchrun", *words, "--nproc_per_node", 1, *arguments]
    if log:
        command = ["bash", "-c", f'exec "$@" >>{log} 2>&1', "bash", *command]
    return machine.start(*command, **environment)


STATIC = ["--nnodes", 2, "--master_addr", "node0", "--master_port", 29500, "--node_rank"]
C10D = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "node0:29400", "--rdzv_id", "job1"]


@pytest.mark.parametrize(
    ("first", "second"),
    [([*STATIC, 0], [*STATIC, 1]), (["--nnodes", 2, *C10D],) * 2],
    ids=["static", "c10d"],
)
def test_torchrun_on_two_machines(first, second, two_machines, training):
    flags = ["--max-steps", 20, *QUIET]
    processes = [
        start_torchrun(machine, words, training, *flags)
        for machine, words in zip(two_machines(), (first, second), strict=True)
    ]
    for process in processes:
        ended = finish(process, LONG)
        assert ended.status == 0, ended.text
    assert training.summary["world_size"] == 2


def test_an_elastic_job_goes_on_when_a_machine_joins_and_when_it_is_lost(
    two_machines, training, tmp_path
):
    first, second = two_machines()
    words = ["--nnodes", "1:2", "--max_restarts", 3, *C10D, "--rdzv_conf", "last_call_timeout=2"]
    flags = ["--resume", "--save-every-steps", 20, *ENDLESS]
    options = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "log": tmp_path / "log"}

    def goes_on(world_size):
        """Wait until ranks have begun that are so many, and until they have saved."""
        sizes = re.findall(r"^world_size +(\d)", options["log"].read_text(), re.M)
        return sizes[-1:] == [world_size] and saved_step(training.folder) > step + 60

    step = 0
    options["log"].touch()
    stays = start_torchrun(first, words, training, *flags, **options)
    wait_until(lambda: goes_on("1"), stays, LONG)
    start_torchrun(second, words, training, *flags, **options)
    step = saved_step(training.folder)
    wait_until(lambda: goes_on("2"), stays, LONG)
    second.crash()
    step = saved_step(training.folder)
    wait_until(lambda: goes_on("1"), stays, LONG)
    stays.send_signal(signal.SIGTERM)
    finish(stays, LONG)
    assert "stopped and saved" in options["log"].read_text()


DEBIAN = [f"127.0.0.1 localhost\n127.0.1.1 node{i}\n10.77.0.{2 - i} node{1 - i}\n" for i in (0, 1)]
IPV6 = "::1 localhost\nfd00::1 node0\nfd00::2 node1\n"


def diagnose(machines, *flags, world_sizes=(2, 2)):
    """Run the doctor by hand on two machines, and return how both ended."""
    meeting = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    processes = [
        machine.start(
            sys.executable, DOCTOR, *flags, RANK=str(i), WORLD_SIZE=str(world_sizes[i]), **meeting
        )
        for i, machine in enumerate(machines)
    ]
    return [finish(process, LONG) for process in processes]


def test_the_doctor_measures_each_pair_of_machines(two_machines):
    for hosts, addresses in ((HOSTS, ("10.77.0.1", "10.77.0.2")), (IPV6, ("fd00::1", "fd00::2"))):
        machines = two_machines((hosts, hosts), addresses)
        first, second = diagnose(machines, "--pairs")
        assert (first.status, second.status) == (0, 0), first.text + second.text
        lines = first.stdout.splitlines()
        assert lines[-2].startswith("rank 0 on node0 and rank 1 on node1")
        assert lines[-1] == "OK"
        assert f"ranks [1] are on node1 ({addresses[1]})" in first.stdout
        while machines:
            machines.pop().end()


def test_the_doctor_says_which_address_belongs_into_the_file_of_hosts(two_machines):
    first, second = diagnose(two_machines(DEBIAN), "--timeout", 10)
    assert (first.status, second.status) == (1, 1)
    for i in (0, 1):
        found = f"warning: on node{i} the name node{i} leads to 127.0.1.1"
        (line,) = (line for line in first.stdout.splitlines() if line.startswith(found))
        assert f"write 10.77.0.{i + 1} into its /etc/hosts" in line
    assert "connectFullMesh failed" in first.stderr
    assert "Rank 0's warnings about names say why" in second.stderr


def test_the_doctor_names_who_counts_otherwise(two_machines):
    first, second = diagnose(two_machines(), "--timeout", 10, world_sizes=(2, 3))
    assert (first.status, second.status) == (1, 1)
    assert "different WORLD_SIZE, {0: 2, 1: 3}" in first.stderr


SLURM_CONF = """
ClusterName=two
SlurmctldHost=node0(10.77.0.1)
AuthInfo=socket={folder}/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
NodeName=node0 NodeAddr=10.77.0.1 CPUs=1
NodeName=node1 NodeAddr=10.77.0.2 CPUs=1
PartitionName=all Nodes=ALL Default=YES
"""


class Slurm:
    """A cluster of two nodes, whose names no other machine knows."""

    def __init__(self, folder, machines):
        self.folder = folder
        self.machine = machines[0]
        self.output = folder / "output"
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "state").mkdir(parents=True)
        (folder / "slurm.conf").write_text(SLURM_CONF.format(folder=folder))
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        files = {"socket": "munge", "key-file": "key", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "seed"}
        munge = [f"--{flag}={folder / name}" for flag, name in files.items()]
        self.daemons = [self.machine.start("munged", "--foreground", "--force", *munge)]
        wait_until((folder / "munge").exists, self.daemons[0])
        self.daemons.append(self.machine.start("slurmctld", "-D", **self.environment))
        for machine in machines:
            daemon = machine.start("slurmd", "-D", "-N", machine.name, **self.environment)
            self.daemons.append(daemon)
        wait_until(lambda: self.run("sinfo", "-h", "-o", "%t %D") == "idle 2\n", self.daemons[1])

    def run(self, *words, **environment):
        return self.machine.succeed(*words, **self.environment, **environment)

    def submit(self, *flags, script_flags=(), **environment):
        """Queue scripts/slurm.sbatch, and return the number of the job."""
        command = ["sbatch", "--parsable", f"--output={self.output}", *flags]
        command += [ROOT / "scripts" / "slurm.sbatch", *script_flags]
        return self.run(*command, NPROC_PER_NODE="1", **environment).strip()

    def job(self, number):
        """Return what Slurm knows of a job."""
        told = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(re.findall(r"(\w+)=(\S*)", told))

    def wait_for(self, number, **facts):
        """Wait until Slurm says this of a job, and fail if the job ends otherwise."""
        states = ["PENDING", "RUNNING", "COMPLETING", facts.get("JobState")]

        def is_there():
            found = self.job(number)
            assert found["JobState"] in states, (found, self.output.read_text())
            return found.items() >= facts.items()

        wait_until(is_there, self.daemons[1], LONG)

    def wait_for_text(self, text):
        def is_there():
            return self.output.exists() and text in self.output.read_text()

        wait_until(is_there, self.daemons[1], LONG)


@pytest.fixture
def slurm(tmp_path, two_machines):
    need("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
    hosts = [f"127.0.0.1 localhost\n10.77.0.{i + 1} node{i}\n" for i in (0, 1)]
    return Slurm(tmp_path / "slurm", two_machines(hosts))


def test_a_job_of_slurm_goes_on_after_its_time_limit_and_is_saved_when_cancelled(slurm, training):
    """Slurm sends USR1 90 to 150 seconds before the four minutes are over."""
    _, *flags = training.arguments("ddp", "--model", "linear", *ENDLESS)
    run_dir = {"RUN_DIR": str(training.folder)}
    number = slurm.submit("--time=4", script_flags=flags, **run_dir)
    slurm.wait_for_text(f"The run is saved. Job {number} is queued again")
    step = saved_step(training.folder)
    assert step > 0
    slurm.wait_for(number, Restarts="1")
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")  # it would wait for minutes
    slurm.wait_for_text(f"job {number}, attempt 2")
    wait_until(lambda: saved_step(training.folder) > step, seconds=LONG)  # an epoch is complete
    assert saved_step(training.folder) % 960 == 0
    slurm.run("scancel", number)
    slurm.wait_for(number, JobState="CANCELLED")
    wait_until(lambda: saved_step(training.folder) % 960 > 0, seconds=60)


def test_a_job_of_slurm_completes(slurm, training):
    _, *flags = training.arguments("ddp", "--model", "linear", "--max-steps", 20, *QUIET)
    number = slurm.submit(script_flags=flags, RUN_DIR=str(training.folder))
    slurm.wait_for(number, JobState="COMPLETED")
    assert training.summary["world_size"] == 2
    assert "Traceback" not in slurm.output.read_text()


def test_a_job_of_slurm_that_saves_nothing_does_not_begin_for_ever(slurm, tmp_path):
    (tmp_path / "own.py").write_text("import time; print('begins', flush=True); time.sleep(600)")
    number = slurm.submit(SCRIPT=str(tmp_path / "own.py"), RUN_DIR=str(tmp_path / "run"))
    slurm.wait_for_text("begins")
    slurm.run("scancel", "--batch", "--signal=USR1", number)  # as before the time limit
    slurm.wait_for(number, JobState="FAILED", Restarts="0")
    assert "so the job is not queued again" in slurm.output.read_text()


SSHD_CONFIG = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PermitRootLogin yes
SetEnv PATH={path}
"""


@pytest.fixture
def ssh(tmp_path, two_machines):
    """Two machines with a server of ssh each, and the command that connects to them."""
    need("sshd", "ssh", "ssh-keygen")
    succeed("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key")
    (tmp_path / "sshd").write_text(SSHD_CONFIG.format(folder=tmp_path, path=PATH))
    options = f"ssh -F none -i {tmp_path}/key -o UserKnownHostsFile={tmp_path}/known"
    options += " -o StrictHostKeyChecking=accept-new -o BatchMode=yes -o LogLevel=ERROR"
    machines = two_machines()
    for machine in machines:
        machine.succeed("mkdir", "-p", "/run/sshd")
        server = shutil.which("sshd", path=PATH)  # it wants its whole path
        machine.start(server, "-D", "-e", "-f", tmp_path / "sshd")
    for name in ("node0", "node1"):
        answers = ["bash", "-c", f"until {options} {name} true; do sleep 0.3; done"]
        machines[0].succeed("timeout", 60, *answers)
    return machines, {"SSH": options, "HOSTS": "node0 node1", "NPROC_PER_NODE": "1"}


def test_run_ssh_trains_on_two_machines_and_ctrl_c_shows_that_all_have_saved(ssh, training):
    (machine, _), settings = ssh
    _, *flags = training.arguments("ddp", "--model", "linear", *ENDLESS)
    process = machine.start("scripts/run_ssh.sh", *flags, **settings)
    wait_until(lambda: saved_step(training.folder) > 0, process, LONG)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of its programs
    ended = finish(process, LONG)
    assert ended.status == 130, ended.text
    assert "[node0] stopped and saved" in ended.stdout
    step = saved_step(training.folder)
    flags += ["--resume", "--max-steps", step + 20]
    told = machine.succeed("scripts/run_ssh.sh", *flags, **settings)
    assert "[node0] complete: " in told
    assert training.summary["global_step"] == step + 20


PODMAN = ["podman", *(["--runtime", "runc"] if shutil.which("runc") else [])]
BASE = "python:3.13-slim"
IMAGE = "localhost/mnist-data-parallel-test"


@pytest.fixture(scope="module")
def image():
    """The image of the Dockerfile. It needs a quarter of an hour, and 7 GB."""
    need("podman")
    if run("podman", "image", "exists", BASE).status != 0:
        pytest.skip(f"needs the image {BASE}: see scripts/real_engines.sh")
    build = ["build", "--isolation", "chroot", "--network", "host", "--tag", IMAGE, ROOT]
    succeed(*PODMAN, *build, timeout=2400)
    yield IMAGE
    run("podman", "rmi", IMAGE)


def in_container(*options, network="none"):
    """Return the beginning of a command that runs in a new container."""
    limits = [f"--ulimit={name}=4096:4096" for name in ("nofile", "nproc")]  # more may be refused
    shown = ["--env", "OMP_NUM_THREADS=1", "--shm-size", "256m"]
    return [*PODMAN, "run", "--rm", "--network", network, *limits, *shown, *options]


@pytest.mark.timeout(3600)
def test_the_image_trains_compiles_and_runs_an_own_script_as_any_user(image, digits_dir, tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o777)
    (tmp_path / "own.py").write_text("import torch; open('written', 'w'); print(torch.ones(2))")
    digits_dir.chmod(0o755)
    user = ["--user", "1234:1234", "--volume", f"{digits_dir}:/data:ro"]
    mounted = ["--volume", f"{tmp_path}/runs:/project/runs", IMAGE]
    launcher = ["torchrun", "--standalone", "--nproc_per_node", 2, "train_ddp.py"]
    flags = ["--data-dir", "/data", "--run-dir", "runs/first", "--max-steps", 5, *QUIET]
    command = [*in_container(*user, *mounted), *launcher, *flags, "--model", "linear", "--compile"]
    told = succeed(*command, timeout=LONG).stdout
    assert "complete: runs/first/summary.json" in told
    assert (tmp_path / "runs" / "first" / "summary.json").stat().st_uid == 1234
    own = ["--volume", f"{tmp_path}:/mine", "--workdir", "/mine", IMAGE, "python", "own.py"]
    assert "tensor([1., 1.])" in succeed(*in_container(*user, *own), timeout=LONG).stdout
    assert (tmp_path / "written").stat().st_uid == 1234


@pytest.mark.timeout(3600)
def test_the_job_of_kubernetes_trains_in_two_containers(image, two_machines, digits_dir, tmp_path):
    """Each container is in the network of a machine. There is no Kubernetes."""
    _, job = yaml.safe_load_all((ROOT / "scripts" / "kubernetes" / "job.yaml").read_text())
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    shutil.copytree(digits_dir, tmp_path / "data")
    containers = []
    for index, machine in enumerate(two_machines()):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in command]
        options = [
            "--volume",
            f"{tmp_path}:/shared",
            "--add-host",
            "mnist-ddp-0.mnist-ddp:10.77.0.1",
        ]
        options += ["--add-host", f"mnist-ddp-{index}:{machine.address}"]
        options += ["--hostname", f"mnist-ddp-{index}", IMAGE]
        containers.append(start(*in_container(*options, network=f"ns:{machine.network}"), *words))
    for container in containers:
        ended = finish(container, LONG)
        assert ended.status == 0, ended.text
    summary = json.loads((tmp_path / "runs" / "mnist-ddp" / "summary.json").read_text())
    assert summary["world_size"] == 2


def test_the_notebook_runs_from_its_first_cell_to_its_last(digits_dir, tmp_path):
    """With this project's last commit, smaller models, and drawn digits."""
    if not (find_spec("nbclient") and find_spec("ipykernel")):
        pytest.skip("needs nbclient and ipykernel: see scripts/real_engines.sh")
    text = (ROOT / "docs" / "two_gpus.ipynb").read_text()
    text = text.replace("ADDRESS", str(ROOT))
    quick = "quickstart.sh --model linear --max-steps 20 --data-dir"
    assert "quickstart.sh" in text
    text = text.replace("quickstart.sh", f"{quick} {digits_dir}")
    text = text.replace(
        "benchmark.py -- --model resnet18 --amp fp16",
        f"benchmark.py --rounds 1 --seconds 0.5 -- --model linear --data-dir {digits_dir}",
    )
    (tmp_path / "two_gpus.ipynb").write_text(text)
    code = "import nbclient, nbformat; book = nbformat.read('two_gpus.ipynb', 4)\n"
    code += "nbclient.NotebookClient(book, timeout=900).execute()\n"
    code += "nbformat.write(book, 'two_gpus.ipynb')"
    ended = run(sys.executable, "-c", code, cwd=tmp_path, timeout=900)
    cells = json.loads((tmp_path / "two_gpus.ipynb").read_text())["cells"]
    outputs = ["".join("".join(o.get("text", "")) for o in c.get("outputs", [])) for c in cells]
    assert ended.status == 0, ended.text
    assert "test accuracy" in outputs[2]
    assert "speed-up" in outputs[3]
    assert all(len(output.splitlines()) < 120 for output in outputs), "a progress bar in its steps"
