"""What is made for clusters, on real ones of one computer: scripts/real_engines.sh installs them.

Two machines are two namespaces of Linux, each with a network, a host name and an /etc/hosts of its
own.
"""

import json
import os
import re
import shutil
import signal
import sys
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
LONG = 400  # seconds: a busy computer needs a minute to start a training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def need(*programs):
    """Skip the test if a program is not installed, or if this is not root."""
    missing = [program for program in programs if not shutil.which(program, path=PATH)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs {', '.join(missing) or 'root'}: see scripts/real_engines.sh")


class Machine:
    """A machine of its own, as far as a network can tell."""

    def __init__(self, number, folder):
        self.name = f"node{number}"
        self.address = f"10.77.0.{number + 1}"
        self.namespace = f"{self.name}-{os.getpid()}"  # tests may run at the same time
        self.network = f"/run/netns/{self.namespace}"
        self.hosts = folder / f"hosts of {self.name}"
        self.hosts.write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")

    def start(self, *words, **environment):
        enter = f'hostname {self.name} && mount --bind "{self.hosts}" /etc/hosts && exec "$@"'
        shell = ["unshare", "--uts", "--mount", "bash", "-c", enter, "bash"]
        return start("nsenter", f"--net={self.network}", *shell, *words, PATH=PATH, **environment)

    def succeed(self, *words, **environment):
        ended = finish(self.start(*words, **environment), LONG)
        assert ended.status == 0, ended.text
        return ended.stdout

    def crash(self):
        """Kill every process of this machine. Its network stays, or the cable would go too."""

        def all_have_ended():
            left = succeed("ip", "netns", "pids", self.namespace).stdout.split()
            run("kill", "-KILL", *left)
            return not left

        wait_until(all_have_ended)


@pytest.fixture
def two_machines(tmp_path):
    """Two machines, node0 and node1, joined by a cable."""
    need("ip", "nsenter", "unshare")
    machines = [Machine(number, tmp_path) for number in (0, 1)]
    one, other = (machine.namespace for machine in machines)
    commands = [f"ip netns add {name}" for name in (one, other)]
    commands += [f"ip link add eth0 netns {one} type veth peer name eth0 netns {other}"]
    for machine in machines:
        inside = f"ip -n {machine.namespace}"
        commands += [f"{inside} addr add {machine.address}/24 dev eth0"]
        commands += [f"{inside} link set {device} up" for device in ("lo", "eth0")]
    made = run("bash", "-c", " && ".join(commands))
    if made.status != 0:
        pytest.skip(f"needs namespaces: {made.stderr}")
    yield machines
    for machine in machines:
        machine.crash()
        succeed("ip", "netns", "delete", machine.namespace)


def saved_step(training):
    """Return the step of the last checkpoint, or 0."""
    if not (training.folder / "checkpoints" / "last.pt").exists():
        return 0
    return training.checkpoint["position"]["step"]


STATIC = ["--nnodes", 2, "--master_addr", "node0", "--master_port", 29500, "--node_rank"]
C10D = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "node0:29400", "--rdzv_id", "job1"]


@pytest.mark.parametrize(
    ("first", "second"),
    [([*STATIC, 0], [*STATIC, 1]), (["--nnodes", 2, *C10D],) * 2],
    ids=["static", "c10d"],
)
def test_torchrun_on_two_machines(first, second, two_machines, training):
    arguments = training.arguments("ddp", "--model", "linear", "--max-steps", 20, *QUIET)
    processes = [
        machine.start("torchrun", *words, "--nproc_per_node", 1, *arguments)
        for machine, words in zip(two_machines, (first, second), strict=True)
    ]
    for process in processes:
        ended = finish(process, LONG)
        assert ended.status == 0, ended.text
    assert training.summary["world_size"] == 2


def test_an_elastic_job_goes_on_when_a_machine_joins_and_when_it_is_lost(
    two_machines, training, tmp_path
):
    log = tmp_path / "log"
    log.touch()
    command = ["bash", "-c", f'exec "$@" >>{log} 2>&1', "bash", "torchrun", "--nnodes", "1:2"]
    command += [*C10D, "--rdzv_conf", "last_call_timeout=2", "--max_restarts", 3]
    flags = ["--model", "linear", "--resume", "--save-every-steps", 20, *ENDLESS]
    command += ["--nproc_per_node", 1, *training.arguments("ddp", *flags)]
    stays, comes = two_machines

    def start_there(machine):
        return machine.start(*command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def wait_for(world_size):
        """Wait until so many ranks have begun, and until they have saved."""
        step = saved_step(training)

        def goes_on():
            sizes = re.findall(r"^world_size +(\d)", log.read_text(), re.M)
            return sizes[-1:] == [world_size] and saved_step(training) > step + 60

        wait_until(goes_on, process, LONG)

    process = start_there(stays)
    wait_for("1")
    start_there(comes)
    wait_for("2")
    comes.crash()
    wait_for("1")
    process.send_signal(signal.SIGTERM)
    finish(process, LONG)
    assert "stopped and saved" in log.read_text()


def diagnose(machines, *flags):
    """Run the doctor by hand on two machines, and return how both ended."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    command = [sys.executable, DOCTOR, *flags]
    processes = [machines[rank].start(*command, RANK=str(rank), **job) for rank in (0, 1)]
    return [finish(process, LONG) for process in processes]


def test_the_doctor_measures_two_machines_and_names_those_whose_names_lead_to_themselves(
    two_machines,
):
    first, second = diagnose(two_machines, "--pairs")
    assert (first.status, second.status) == (0, 0), first.text + second.text
    assert "rank 0 on node0 and rank 1 on node1" in first.stdout
    assert "ranks [1] are on node1 (10.77.0.2)" in first.stdout
    for machine in two_machines:  # as Debian writes it
        hosts = machine.hosts.read_text()
        machine.hosts.write_text(hosts.replace(f"{machine.address} ", "127.0.1.1 "))
    first, second = diagnose(two_machines, "--timeout", 10)
    assert (first.status, second.status) == (1, 1)
    for name in ("node0", "node1"):
        assert f"warning: on {name} the name {name} leads to 127.0.1.1" in first.stdout
    for ended in (first, second):
        assert "Rank 0's warnings about names say why" in ended.stderr


SLURM_CONF = """
ClusterName=two
SlurmctldHost=node0(10.77.0.1)
AuthType=auth/none
CredType=cred/none
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


@pytest.fixture
def slurm(tmp_path, two_machines):
    """Return a function that runs a command of Slurm, in a cluster of the two machines."""
    need("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
    folder = tmp_path / "slurm"
    (folder / "state").mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(folder=folder))
    first = two_machines[0]

    def call(*words, **environment):
        return first.succeed(*words, SLURM_CONF=str(conf), **environment)

    controller = first.start("slurmctld", "-D", SLURM_CONF=str(conf))
    for machine in two_machines:
        # No machine knows the name of the other.
        machine.hosts.write_text(f"127.0.0.1 localhost\n{machine.address} {machine.name}\n")
        machine.start("slurmd", "-D", "-N", machine.name, SLURM_CONF=str(conf))
    wait_until(lambda: call("sinfo", "-h", "-o", "%t %D") == "idle 2\n", controller)
    return call


def test_a_job_of_slurm_goes_on_after_its_time_limit_and_is_saved_when_cancelled(
    slurm, training, tmp_path
):
    """Slurm sends USR1 90 to 150 seconds before the five minutes are over."""
    output = tmp_path / "output"
    output.touch()
    command = ["sbatch", "--parsable", "--time=5", f"--output={output}"]
    command += [ROOT / "scripts" / "slurm.sbatch"]
    command += training.arguments("ddp", "--model", "linear", *ENDLESS)[1:]
    settings = {"NPROC_PER_NODE": "1", "RUN_DIR": str(training.folder)}
    number = slurm(*command, **settings).strip()

    def wait_for(text):
        """Wait until the job has printed this, or Slurm says it of the job."""

        def is_said():
            told = slurm("scontrol", "--oneliner", "show", "job", number)
            return text in output.read_text() or text in told.split()

        wait_until(is_said, seconds=LONG)

    wait_for(f"The run is saved. Job {number} is queued again")
    step = saved_step(training)
    assert step > 0
    wait_for("JobState=PENDING")
    # It would wait for two minutes. In the second of the requeue its credential is still revoked.
    slurm("scontrol", "update", f"JobId={number}", "StartTime=now+5")
    wait_for(f"job {number}, attempt 2")
    wait_until(lambda: saved_step(training) > step, seconds=LONG)  # an epoch is complete
    assert saved_step(training) % 960 == 0, "each of two nodes has a process"
    slurm("scancel", number)
    wait_for("JobState=CANCELLED")
    wait_until(lambda: saved_step(training) % 960 > 0, seconds=60)


SSHD_CONFIG = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PermitRootLogin yes
SetEnv PATH={path}
"""


def test_run_ssh_trains_on_two_machines_and_ctrl_c_shows_that_all_have_saved(
    two_machines, training, tmp_path
):
    need("sshd", "ssh", "ssh-keygen")
    succeed("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key")
    (tmp_path / "sshd").write_text(SSHD_CONFIG.format(folder=tmp_path, path=PATH))
    ssh = f"ssh -F none -i {tmp_path}/key -o UserKnownHostsFile={tmp_path}/known"
    ssh += " -o StrictHostKeyChecking=accept-new -o BatchMode=yes -o LogLevel=ERROR"
    Path("/run/sshd").mkdir(exist_ok=True)
    server = shutil.which("sshd", path=PATH)  # it wants its whole path
    first = two_machines[0]
    for machine in two_machines:
        machine.start(server, "-D", "-e", "-f", tmp_path / "sshd")
        answers = f"until {ssh} {machine.name} true; do sleep 0.3; done"
        first.succeed("timeout", 60, "bash", "-c", answers)

    settings = {"SSH": ssh, "HOSTS": "node0 node1", "NPROC_PER_NODE": "1"}
    flags = training.arguments("ddp", "--model", "linear", *ENDLESS)[1:]
    process = first.start("scripts/run_ssh.sh", *flags, **settings)
    wait_until(lambda: saved_step(training) > 0, process, LONG)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of its programs
    ended = finish(process, LONG)
    assert ended.status == 130, ended.text
    assert "[node0] stopped and saved" in ended.stdout
    step = saved_step(training)
    flags += ["--resume", "--max-steps", step + 20]
    assert "[node0] complete: " in first.succeed("scripts/run_ssh.sh", *flags, **settings)
    assert training.summary["global_step"] == step + 20


PODMAN = ["podman", *(["--runtime", "runc"] if shutil.which("runc") else [])]
BASE = "python:3.13-slim"
IMAGE = "localhost/mnist-data-parallel-test"
# In a new container, as some user. More files and processes may be refused.
IN_CONTAINER = [*PODMAN, "run", "--rm", "--user=1234:1234", "--shm-size=256m"]
IN_CONTAINER += ["--env=OMP_NUM_THREADS=1", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]


@pytest.fixture
def image():
    """The image of the Dockerfile. It needs a quarter of an hour, and 7 GB."""
    need("podman")
    if run("podman", "image", "exists", BASE).status != 0:
        pytest.skip(f"needs the image {BASE}: see scripts/real_engines.sh")
    build = ["build", "--isolation", "chroot", "--network", "host", "--tag", IMAGE, ROOT]
    succeed(*PODMAN, *build, timeout=2400)
    yield IMAGE
    run("podman", "rmi", IMAGE)


@pytest.mark.timeout(3600)
def test_the_image_trains_as_a_job_of_kubernetes_and_runs_an_own_script(
    image, two_machines, digits_dir, tmp_path
):
    """Each container is in the network of a machine. There is no Kubernetes."""
    _, job = yaml.safe_load_all((ROOT / "scripts" / "kubernetes" / "job.yaml").read_text())
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    shutil.copytree(digits_dir, tmp_path / "data")
    for folder in (tmp_path, tmp_path / "data"):
        folder.chmod(0o777)
    flags = ["--model", "linear", "--max-steps", 5, "--compile", *QUIET]
    containers = []
    for index, machine in enumerate(two_machines):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in command]
        name = f"mnist-ddp-{index}"
        options = [f"--network=ns:{machine.network}", f"--volume={tmp_path}:/shared"]
        options += [f"--hostname={name}", f"--add-host={name}:{machine.address}"]
        options += ["--add-host=mnist-ddp-0.mnist-ddp:10.77.0.1", image]
        containers.append(start(*IN_CONTAINER, *options, *words, *flags))
    for container in containers:
        ended = finish(container, LONG)
        assert ended.status == 0, ended.text
    summary = tmp_path / "runs" / "mnist-ddp" / "summary.json"
    assert json.loads(summary.read_text())["world_size"] == 2
    assert summary.stat().st_uid == 1234

    (tmp_path / "own.py").write_text("import torch; open('written', 'w'); print(torch.ones(2))")
    options = ["--network=none", f"--volume={tmp_path}:/mine", "--workdir=/mine", image]
    ended = succeed(*IN_CONTAINER, *options, "python", "own.py", timeout=LONG)
    assert "tensor([1., 1.])" in ended.stdout


def test_the_notebook_runs_from_its_first_cell_to_its_last(digits_dir, tmp_path):
    """With this project's last commit, smaller models, and drawn digits."""
    if not (find_spec("nbclient") and find_spec("ipykernel")):
        pytest.skip("needs nbclient and ipykernel: see scripts/real_engines.sh")
    quick = f"--model linear --data-dir {digits_dir}"
    text = (ROOT / "docs" / "two_gpus.ipynb").read_text()
    text = text.replace("ADDRESS", str(ROOT))
    text = text.replace("quickstart.sh", f"quickstart.sh --max-steps 20 {quick}")
    text = text.replace("-- --model resnet18 --amp fp16", f"--rounds 1 --seconds 0.5 -- {quick}")
    assert text.count(quick) >= 2
    (tmp_path / "two_gpus.ipynb").write_text(text)
    code = "import nbclient, nbformat; book = nbformat.read('two_gpus.ipynb', 4)\n"
    code += "nbclient.NotebookClient(book, timeout=900).execute()\n"
    code += "nbformat.write(book, 'two_gpus.ipynb')"
    succeed(sys.executable, "-c", code, cwd=tmp_path, timeout=900)
    cells = json.loads((tmp_path / "two_gpus.ipynb").read_text())["cells"]
    outputs = ["".join("".join(o.get("text", "")) for o in c.get("outputs", [])) for c in cells]
    assert "test accuracy" in outputs[2]
    assert "speed-up" in outputs[3]
    assert all(len(output.splitlines()) < 120 for output in outputs), "a progress bar in its steps"
