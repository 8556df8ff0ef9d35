"""Several hosts for real: network namespaces, each with its own address and hostname."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.processes import (
    ROOT,
    command,
    environment,
    finish,
    flags,
    run,
    succeed,
    summary,
    wait_until,
)
from tests.test_launch import (
    SHORT,
    Row,
    error_lines,
    finish_all,
    launch,
    row,
)


def sh(*command):
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


def has_namespaces():
    """Root in a container may not make any."""
    try:
        sh("unshare", "-n", "ip", "link")
    except (OSError, subprocess.CalledProcessError):
        return False
    return os.geteuid() == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_namespaces(), reason="needs root and network namespaces"),
]


class Hosts:
    """Hosts 10.77.0.2, 10.77.1.2 ... named node0, node1 ..., joined by a router.

    A router and not a switch: that takes a kernel with bridges.

    Args:
        count: how many.
        resolve: whether a hostname resolves to its own address, rather than to 127.0.1.1 as on
            many a Debian.
    """

    def __init__(self, count, resolve=True):
        prefix = f"mnist{os.getpid()}"
        self.router = f"{prefix}r"
        self.names = [f"{prefix}n{node}" for node in range(count)]
        self.addresses = [f"10.77.{node}.2" for node in range(count)]
        self.resolve = resolve

    def __enter__(self):
        try:
            sh("ip", "netns", "add", self.router)
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            sh("ip", "netns", "exec", self.router, "sh", "-c", forward)
            for node, name in enumerate(self.names):
                sh("ip", "netns", "add", name)
                host, router = ("ip", "-n", name), ("ip", "-n", self.router)
                plug, gateway = f"to{node}", f"10.77.{node}.1"
                sh(*host, "link", "add", "eth0", "type", "veth", "peer", plug, "netns", self.router)
                sh(*router, "addr", "add", f"{gateway}/24", "dev", plug)
                sh(*router, "link", "set", plug, "up")
                sh(*host, "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
                sh(*host, "link", "set", "eth0", "up")
                sh(*host, "link", "set", "lo", "up")
                sh(*host, "route", "add", "default", "via", gateway)
                etc = Path("/etc/netns", name)
                etc.mkdir(parents=True)
                (etc / "hosts").write_text(self.hosts_file(node))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        for node, name in enumerate((*self.names, self.router)):
            for pid in self.pids(node):  # nobody else is in a namespace of ours
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def pids(self, node):
        """Return the processes of a host, or of the router behind the last host."""
        name = [*self.names, self.router][node]
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def hosts_file(self, own):
        lines = ["127.0.0.1 localhost"]
        for node, address in enumerate(self.addresses):
            own_name = node == own and not self.resolve
            lines.append(f"{'127.0.1.1' if own_name else address} node{node}")
        return "\n".join(lines) + "\n"

    def start(self, node, command, **variables):
        """Start a shell command on a host, with the variables of the launch table."""
        known = {"HOST0": self.addresses[0], "PORT": "29500", "NODE": str(node)}
        inside = f"hostname node{node}; exec bash -c '{command}'"
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[node], "unshare", "-u", "bash", "-c", inside],
            env=environment(**known, **variables),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def launch(self, row, flags, shared):
        """Start a row's command on every host."""
        hosts = range(len(self.names))
        return [self.start(n, f"{row.command} {flags}", SHARED=str(shared)) for n in hosts]

    def cut_off(self, node):
        sh("ip", "-n", self.names[node], "link", "set", "eth0", "down")


@pytest.fixture
def hosts():
    built = []

    def build(count, resolve=True):
        built.append(Hosts(count, resolve).__enter__())
        return built[0]

    yield build
    for each in built:
        each.__exit__()


@pytest.fixture(scope="module")
def expected(synthetic_dir, tmp_path_factory):
    """The weights that so many processes reach on one host."""
    known = {}

    def of(world_size):
        if world_size not in known:
            folder = tmp_path_factory.mktemp("expected")
            local = Row("spawn", f"python train_ddp.py --nprocs {world_size}")
            flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {folder}"
            (ended,) = finish_all(launch(local, flags, folder), 120)
            assert ended.returncode == 0, ended.text
            known[world_size] = summary(folder)["weights_sha256"]
        return known[world_size]

    return of


def ssh_stub(network, folder):
    """Return settings that make run_ssh.sh reach the hosts, without an sshd."""
    stub = folder / "ssh"
    prefix = network.names[0][:-1]
    stub.write_text(
        "#!/bin/bash\nhost=$1; shift\nnode=${host#node}\n"
        f'exec ip netns exec {prefix}$node unshare -u bash -c "hostname $host; $*"\n'
    )
    stub.chmod(0o755)
    names = " ".join(f"node{node}" for node in range(len(network.names)))
    return {"SSH": str(stub), "HOSTS": names, "NPROC_PER_NODE": "1"}


@pytest.mark.parametrize(
    ("method", "count", "resolve"),
    [
        ("torchrun, static", 2, True),
        ("no launcher, several nodes", 2, True),
        ("script, several nodes", 2, True),
        ("--init-method file://", 2, True),
        ("scripts/run_ssh.sh", 3, True),
        # Gloo would listen where the hostname resolves to, on which nobody else can reach it.
        ("variables by hand", 3, False),
        ("script, several nodes", 3, False),
    ],
)
def test_hosts_reach_the_weights_of_one(
    method, count, resolve, hosts, synthetic_dir, tmp_path, expected
):
    network = hosts(count, resolve)
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    if method == "scripts/run_ssh.sh":
        started = launch(Row("", method), flags, tmp_path, **ssh_stub(network, tmp_path))
    else:
        command = row(method).command.replace("WORLD_SIZE=2", f"WORLD_SIZE={count}")
        many = Row(method, command.replace("NNODES=2 ", f"NNODES={count} "), nodes=count)
        started = network.launch(many, flags, tmp_path)
    for ended in finish_all(started, 200):
        assert ended.returncode == 0, ended.text
    assert summary(tmp_path / "run")["weights_sha256"] == expected(count)


LONG = "--dataset synthetic --model linear --epochs 100000 --threads 1 --no-progress"


@pytest.mark.parametrize("killed", ["a node", "the script"])
def test_run_ssh_leaves_nobody(killed, hosts, synthetic_dir, tmp_path):
    network = hosts(2)
    flags = f"{LONG} --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    settings = ssh_stub(network, tmp_path)
    (process,) = launch(Row("", "exec scripts/run_ssh.sh"), flags, tmp_path, **settings)
    wait_until((tmp_path / "run" / "metrics.jsonl").exists)
    if killed == "the script":
        process.kill()
    else:
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in network.pids(1)}
        (agent,) = [pid for pid, command in commands.items() if b"/torchrun" in command]
        os.kill(agent, signal.SIGKILL)
    ended = finish(process, 120)  # when the last holder of its output has ended
    assert ended.returncode != 0
    assert killed == "the script" or " ended with status" in ended.stderr


def test_a_host_is_cut_off_in_training(hosts, synthetic_dir, tmp_path):
    network = hosts(2)
    flags = f"{LONG} --data-dir {synthetic_dir} --run-dir {tmp_path}/run --timeout 20"
    processes = network.launch(row("no launcher, several nodes"), flags, tmp_path)
    wait_until((tmp_path / "run" / "metrics.jsonl").exists)
    network.cut_off(1)
    for rank, process in enumerate(processes):
        ended = finish(process, 120)
        assert ended.returncode == 1, ended.text
        (line,) = error_lines(ended)
        assert f"rank {rank} lost rank {1 - rank} (node{1 - rank} pid " in line
        assert "Traceback" not in ended.stderr


def test_a_name_server_that_never_answers_costs_little(synthetic_dir, tmp_path):
    """PyTorch asks it for the name of each address; glibc would wait ten seconds each time."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.77.0.1\n")
    with_it = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    words = flags(synthetic_dir, tmp_path / "run", "--max-steps", 3, "--rdzv-timeout", 30)
    wrapper = ["unshare", "-m", "bash", "-c", with_it, tmp_path / "resolv.conf"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.77.0.1", 53))
        ended = run(*wrapper, "env", "-u", "RES_OPTIONS", *command("spawn", 3, *words), real=True)
        silent.settimeout(1)
        assert silent.recv(512), "nobody has asked"
    succeed(ended)


def test_the_doctor_finds_names_that_resolve_to_loopback(hosts, synthetic_dir, tmp_path):
    command = row("variables by hand").command.replace("train_ddp.py", "scripts/tools/doctor.py")
    flags = f"--dataset synthetic --data-dir {synthetic_dir} --threads 1"
    network = hosts(2, resolve=False)
    ended = finish_all(network.launch(Row("", command, nodes=2), flags, tmp_path), 120)
    assert [one.returncode for one in ended] == [0, 0], ended
    (found,) = [line for line in ended[0].stdout.splitlines() if line.startswith("hostnames")]
    assert "warning" in found
    assert "node0 resolves to 127.0.1.1; node1 resolves to 127.0.1.1" in found
    assert "gloo: eth0 on node0, eth0 on node1" in ended[0].stdout
