"""Every way to launch train_ddp.py, with the commands of the documents' table."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext as nothing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.processes import (
    ROOT,
    environment,
    finish,
    free_port,
    run,
    script,
    shell_line,
    start,
    stray_processes,
    summary,
    wait_until,
)
from utils import config, distributed
from utils.cluster import launch as launching
from utils.cluster import launchers
from utils.cluster.launchers import Launch
from utils.cluster.meeting import Meeting, Member
from utils.errors import UsageError

SHORT = "--dataset synthetic --model linear --max-steps 20 --threads 1 --no-progress"
ONCE = ROOT / "tests" / "faulty.py"


@dataclass(frozen=True)
class Row:
    """A line of the table in docs/launching.md.

    Attributes:
        method: what it is called there.
        command: literally. $HOST0 and $PORT are where rank 0 is, $NODE is the node's number, and
            $SHARED a folder that all nodes see.
        nodes: on how many the command is given.
        slow: whether its test takes a minute, or needs more than this project.
    """

    method: str
    command: str
    nodes: int = 1
    slow: bool = False

    @property
    def is_script(self):
        return "scripts/" in self.command

    @property
    def marks(self):
        return [pytest.mark.slow] * self.slow + [pytest.mark.long] * self.is_script


LAUNCH_TABLE = [
    Row("torchrun, one node", "torchrun --standalone --nproc_per_node 2 train_ddp.py"),
    Row("no launcher, one node", "python train_ddp.py --nprocs 2"),
    Row("script, one node", "NPROC_PER_NODE=2 scripts/run_torchrun.sh"),
    Row(
        "torch.distributed.launch",
        "python -m torch.distributed.launch --nproc_per_node 2 train_ddp.py",
    ),
    Row(
        "torch.distributed.launch, environment",
        "python -m torch.distributed.launch --use_env --nproc_per_node 2 train_ddp.py",
        slow=True,
    ),
    Row(
        "torch.distributed.launch, several nodes",
        "python -m torch.distributed.launch --nnodes 2 --node_rank $NODE --master_addr $HOST0"
        " --master_port $PORT --nproc_per_node 1 train_ddp.py",
        nodes=2,
        slow=True,
    ),
    Row(
        "torchrun, static",
        "torchrun --nnodes 2 --node_rank $NODE --master_addr $HOST0 --master_port $PORT"
        " --nproc_per_node 1 --rdzv-conf timeout=120 train_ddp.py",
        nodes=2,
    ),
    Row(
        "torchrun, c10d",
        "torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint $HOST0:$PORT"
        " --rdzv_id job1 --rdzv-conf join_timeout=120 train_ddp.py",
        nodes=2,
    ),
    Row(
        "torchrun, elastic",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --max_restarts 3"
        " --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint $HOST0:$PORT --rdzv_id job1"
        " --rdzv-conf join_timeout=120,last_call_timeout=10 train_ddp.py",
        nodes=2,
        slow=True,
    ),
    Row(
        "script, several nodes",
        "NNODES=2 NPROC_PER_NODE=1 MASTER_ADDR=$HOST0 MASTER_PORT=$PORT scripts/run_torchrun.sh",
        nodes=2,
    ),
    Row(
        "no launcher, several nodes",
        "python train_ddp.py --nprocs 1 --nnodes 2 --node-rank $NODE"
        " --init-method tcp://$HOST0:$PORT",
        nodes=2,
    ),
    Row(
        "variables by hand",
        "RANK=$NODE WORLD_SIZE=2 MASTER_ADDR=$HOST0 MASTER_PORT=$PORT python train_ddp.py",
        nodes=2,
        slow=True,
    ),
    Row(
        "--init-method env://",
        "MASTER_ADDR=$HOST0 MASTER_PORT=$PORT"
        " python train_ddp.py --init-method env:// --rank $NODE --world-size 2",
        nodes=2,
        slow=True,
    ),
    Row(
        "--init-method tcp://",
        "python train_ddp.py --init-method tcp://$HOST0:$PORT --rank $NODE --world-size 2",
        nodes=2,
    ),
    Row(
        "--init-method file://",
        "python train_ddp.py --init-method file://$SHARED/meet --rank $NODE --world-size 2",
        nodes=2,
    ),
    # The tests of these three are in test_clusters.py and test_hosts.py.
    Row("srun", "srun --ntasks 2 python train_ddp.py"),
    Row("mpirun", "mpirun -n 2 python train_ddp.py"),
    Row("sbatch", "sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 scripts/slurm.sbatch"),
    Row("script, over ssh", 'HOSTS="node0 node1" scripts/run_ssh.sh'),
]
ELSEWHERE = ("srun", "mpirun", "sbatch", "script, over ssh")


def row(method):
    return next(row for row in LAUNCH_TABLE if row.method == method)


def path_of_python():
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def launch(row, flags, shared, literal=True, **extra):
    """Start a row's command, with flags added at its end, once for each node on this host.

    Args:
        literal: by a shell; otherwise the same processes are forked.
    """
    known = {"HOST0": "127.0.0.1", "PORT": str(free_port()), "SHARED": str(shared)}
    known |= {"PATH": path_of_python()} | extra
    line = f"{row.command} {flags}"
    processes = []
    for node in range(row.nodes):
        words, variables = ["bash", "-c", line], known | {"NODE": str(node)}
        if not literal:
            words, variables = shell_line(line, **variables)
        processes.append(start(*words, **variables))
    return processes


def finish_all(processes, timeout):
    begin = time.monotonic()
    return [finish(process, timeout, begin) for process in processes]


def error_lines(ended):
    return [line for line in ended.text.splitlines() if ".py: error: " in line]


@pytest.fixture(scope="module")
def expected(synthetic_dir, tmp_path_factory):
    """The weights that two processes reach, however they were started."""
    folder = tmp_path_factory.mktemp("expected")
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {folder}"
    ended = finish_all(launch(row("no launcher, one node"), flags, folder, literal=False), 60)
    assert ended[0].returncode == 0, ended[0].text
    return summary(folder)["weights_sha256"]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.method, marks=row.marks)
        for row in LAUNCH_TABLE
        if row.method not in ELSEWHERE
    ],
)
def test_every_way_reaches_the_same_weights(row, synthetic_dir, tmp_path, expected, request):
    """With ``--all`` by the very command; in the quick run the launch scripts alone."""
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    literal = row.is_script or request.config.getoption("--all")
    for ended in finish_all(launch(row, flags, tmp_path, literal), 90):
        assert ended.returncode == 0, ended.text
        assert "resource_tracker" not in ended.stderr, "a semaphore was left"
    found = summary(tmp_path / "run")
    assert (found["world_size"], found["backend"]) == (2, "gloo")
    assert found["weights_sha256"] == expected


@pytest.mark.slow
def test_an_elastic_job_grows_and_shrinks(synthetic_dir, tmp_path):
    """One node begins, a second joins, and the first goes on when that one is killed."""
    command = row("torchrun, elastic").command.replace(
        "last_call_timeout=10", "last_call_timeout=3"
    )
    flags = (
        f"--dataset synthetic --data-dir {synthetic_dir} --model linear --epochs 100000 --threads 1"
        f" --no-progress --no-tensorboard --run-dir {tmp_path}/run"
    )
    variables = environment(HOST0="127.0.0.1", PORT=str(free_port()), PATH=path_of_python())
    log = tmp_path / "log"

    def start_node():
        with open(log, "a") as output:
            return subprocess.Popen(
                ["bash", "-c", f"exec env {command} {flags}"],
                env=variables,
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def epochs():
        path = tmp_path / "run" / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    nodes = [start_node()]
    try:
        wait_until(lambda: epochs() > 0, 100)
        nodes.append(start_node())
        wait_until(lambda: "2 x cpu" in log.read_text(), 100)
        grown = epochs()
        wait_until(lambda: epochs() > grown, 100)
        os.killpg(nodes[1].pid, signal.SIGKILL)
        time.sleep(3)  # what two ranks still had under way
        alone = epochs()
        wait_until(lambda: epochs() > alone + 1, 100)
    finally:
        for node in nodes:
            if node.poll() is None:
                node.terminate()
            node.wait(60)


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        ("--backend nccl --device cpu", 2, "--backend nccl"),
        ("--nprocs 2 --nnodes 2", 2, "--nnodes needs the address of node 0"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(flags, status, words, synthetic_dir):
    common = ["--dataset", "synthetic", "--data-dir", synthetic_dir]
    ended = run(*script("train_ddp.py", *common, *flags.split()), timeout=30)
    assert ended.returncode == status, ended.text
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rank 0", "--rank and --world-size go together"),
        ("--rank 0 --world-size 2 --nprocs 2", "--nprocs numbers its processes itself"),
        ("--init-method tcp://host", "is not env://, tcp://host:port or file:///path"),
        ("--nprocs 2 --node-rank 1", "--node-rank 1 is not below --nnodes 1"),
        ("--nnodes 2", "--nnodes and --node-rank go with --nprocs"),
    ],
)
def test_flags_that_contradict_each_other(flags, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        config.parse_args("ddp", None, flags.split())
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        (
            {"OMPI_COMM_WORLD_RANK": "0"},
            "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not",
        ),
    ],
)
def test_variables_that_contradict_each_other(variables, words):
    args = config.build_parser("ddp", None).parse_args([])
    with pytest.raises(UsageError, match=words):
        launchers.read_launch(args, variables)


SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}
SLURM["SLURM_STEP_NUM_TASKS"] = "4"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Launch("alone")),
        # Left over in a shell: nobody keeps a store there.
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, Launch("alone")),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            Launch("environment", 1, 2),
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "h", "MASTER_PORT": "7", "TORCHELASTIC_USE_AGENT_STORE": "True"}
            | {"TORCHELASTIC_RUN_ID": "none"},
            Launch("torchrun", 1, 4, 1, 2, "h", 7),
        ),
        (
            SLURM | {"MASTER_PORT": "7", "SLURM_STEP_NODELIST": "rack[1-2]node[03-05,9],other"},
            Launch("slurm", 3, 4, 1, None, "rack1node03", 7),
        ),
        (
            SLURM | {"MASTER_PORT": "7", "SLURM_STEP_NODELIST": "node7,node8"},
            Launch("slurm", 3, 4, 1, None, "node7", 7),
        ),
        # Both say a rank: by hand wins over Slurm.
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, Launch("environment", 0, 1)),
    ],
)
def test_what_a_launcher_says(variables, expected):
    args = config.build_parser("ddp", None).parse_args([])
    assert launchers.read_launch(args, variables) == expected


@pytest.mark.parametrize("wrong", [["--backend", "mpi"], ["--epochs", "none"]])
def test_one_line_for_all_ranks_of_torchrun(wrong):
    """Also where rank 0, which has to say it, is the last to find out."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["tests/dies.py", "train_ddp.py", *wrong]
    ended = run(*launcher, "--nproc_per_node", 2, *script, timeout=60, DIES="late")
    assert ended.returncode == 1
    assert len(error_lines(ended)) == 1, ended.text


def test_one_line_for_all_ranks_without_a_launcher(synthetic_dir):
    """Before any process group, also for a device that no backend knows."""
    code = (
        "import sys; sys.path.insert(0, '.'); import utils.early, torch, train_ddp\n"
        "from utils.cluster import launch\n"
        "launch.select_devices = lambda *names: [torch.device('mps')]\n"
        "if __name__ == '__main__': sys.exit(train_ddp.main())"
    )
    common = ["--dataset", "synthetic", "--data-dir", synthetic_dir]
    for command, words in (
        (script("train_ddp.py", *common, "--backend", "mpi", "--nprocs", 3), "--backend mpi"),
        ([sys.executable, "-c", code, *common], "use train_single.py, or --device cpu"),
    ):
        ended = run(*command, timeout=60)
        assert ended.returncode == 2, ended.text
        (line,) = error_lines(ended) or ended.stderr.splitlines()
        assert words in line


@pytest.mark.parametrize(("ranks", "gpus"), [(2, 2), (2, 1), (3, 2)])
def test_a_gpu_for_each_rank(ranks, gpus, monkeypatch):
    """A launcher shows each rank all GPUs of the node, or one, which is number 0 for all."""
    devices = [torch.device("cuda", index) for index in range(gpus)]
    monkeypatch.setattr(launching, "select_devices", lambda *names: devices)
    monkeypatch.setattr(distributed, "choose_backend", lambda *names: "nccl")
    own = Member(0)
    meeting = Meeting(own, ranks, own, mates=list(range(ranks)))
    monkeypatch.setattr(launching, "meet", lambda *arguments: meeting)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    args = config.parse_args("ddp", None, [])
    with pytest.raises(UsageError, match="see 2 GPUs") if ranks > gpus > 1 else nothing():
        launching._meet(args, Launch("torchrun", 0, ranks, 0, ranks))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "how"), [("torchrun, one node", "raise"), ("torchrun, static", "kill")]
)
def test_torchrun_starts_all_again_after_a_crash(method, how, synthetic_dir, tmp_path, expected):
    """Ranks that start again must not meet at the addresses of the attempt before."""
    command = row(method).command.replace("train_ddp.py", str(ONCE))
    again = Row(method, command.replace("torchrun", "torchrun --max_restarts 1"), row(method).nodes)
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    crash = {"FAULT": how, "FAULT_RANK": "1", "FAULT_STEP": "1", "FAULT_ONCE": ""}
    crash["FAULT_FLAG"] = str(tmp_path / "crashed")
    for ended in finish_all(launch(again, flags, tmp_path, **crash), 120):
        assert ended.returncode == 0, ended.text
    assert (tmp_path / "crashed").exists()
    assert summary(tmp_path / "run")["weights_sha256"] == expected


def wait_for_port(port, process):
    def is_there():
        assert process.poll() is None, process.communicate()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_there)


def start_waiting(synthetic_dir, *flags):
    """Start a rank that waits for others who never come, and return when it does wait."""
    port = free_port()
    common = ["--dataset", "synthetic", "--data-dir", synthetic_dir]
    method = f"tcp://127.0.0.1:{port}"
    process = start(*script("train_ddp.py", *common, "--init-method", method, *flags))
    wait_for_port(port, process)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_stop_signal_ends_the_waiting(number, synthetic_dir):
    process = start_waiting(synthetic_dir, "--rank", 0, "--world-size", 2)
    begin = time.monotonic()
    process.send_signal(number)
    ended = finish(process, 10, begin)
    assert ended.returncode == 128 + number
    assert ended.seconds < 3
    assert f"stopped by {number.name} while waiting" in ended.stderr


def test_an_interface_that_is_not_there_is_one_line(synthetic_dir, tmp_path):
    arguments = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--run-dir", tmp_path / "r"]
    arguments += ["--nprocs", 2, "--rdzv-timeout", 20]
    ended = run(*script("train_ddp.py", *arguments), GLOO_SOCKET_IFNAME="nowhere0")
    assert ended.returncode == 1
    (line,) = error_lines(ended)
    assert "GLOO_SOCKET_IFNAME" in line


def test_the_parent_of_spawn_passes_a_signal_on(synthetic_dir):
    process = start_waiting(synthetic_dir, "--nprocs", 2, "--nnodes", 2)
    process.send_signal(signal.SIGTERM)
    ended = finish(process, 10)
    assert ended.returncode == 143, ended.text
    assert len(error_lines(ended)) == 1, ended.text


def test_killing_the_parent_of_spawn_leaves_nobody(synthetic_dir):
    process = start_waiting(synthetic_dir, "--nprocs", 2, "--nnodes", 2)
    process.kill()
    process.communicate(timeout=10)
    assert stray_processes(wait=5.0) == []


@pytest.mark.parametrize("name", ["run_torchrun.sh", "run_ssh.sh"])
def test_a_dry_run_prints_command_and_ranks(name):
    settings = {"NPROC_PER_NODE": "4", "NNODES": "3", "MASTER_ADDR": "10.0.0.1", "HOSTS": "a b c"}
    ended = run(ROOT / "scripts" / name, "--dry-run", "--epochs", 7, **settings)
    assert ended.returncode == 0, ended.text
    assert "train_ddp.py" in ended.stdout or name == "run_ssh.sh"
    assert "--epochs 7" in ended.stdout
    table = [line.split() for line in ended.stdout.partition("\nnode ")[2].splitlines()[1:]]
    assert [columns[-1] for columns in table] == ["0-3", "4-7", "8-11"]
    assert run(ROOT / "scripts" / name, "--help").returncode == 0


def test_the_launch_scripts_say_what_is_missing():
    ended = run(ROOT / "scripts" / "run_torchrun.sh", NNODES="2")
    assert (ended.returncode, "NNODES=2 needs MASTER_ADDR" in ended.stderr) == (2, True)
    settings = {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"}
    ended = run(ROOT / "scripts" / "run_torchrun.sh", **settings)
    assert (ended.returncode, "NODE_RANK=2 is not below NNODES=2" in ended.stderr) == (2, True)
    ended = run(ROOT / "scripts" / "run_ssh.sh")
    assert (ended.returncode, "set HOSTS" in ended.stderr) == (2, True)
