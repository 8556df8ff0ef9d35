"""Several hosts for real: network namespaces, each with its own address and hostname."""

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.launches import LAUNCHES, SHORT, finish_all
from tests.processes import finish, run, start, succeed, summary, wait_until

# Root in a container may not make any.
HAS_NAMESPACES = os.geteuid() == 0 and not os.system("unshare -n ip link >/dev/null 2>&1")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root and network namespaces"),
]
ROUTER = """
ip netns add {router}
ip netns exec {router} sh -c "echo 1 > /proc/sys/net/ipv4/ip_forward"
"""
HOST = """
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


class Hosts:
    """Two hosts, 10.77.0.2 and 10.77.1.2, named node0 and node1, joined by a router.

    A router and not a switch: that takes a kernel with bridges.

    Args:
        resolve: whether a hostname resolves to its own address, rather than to 127.0.1.1 as on
            many a Debian.
    """

    def __init__(self, resolve):
        self.prefix = f"mnist{os.getpid()}"
        self.names = [f"{self.prefix}n{node}" for node in range(2)]
        self.router, self.resolve = f"{self.prefix}r", resolve

    def build(self):
        succeed(run("bash", "-ec", ROUTER.format(router=self.router)))
        for node, name in enumerate(self.names):
            succeed(run("bash", "-ec", HOST.format(router=self.router, node=node, name=name)))
            Path("/etc/netns", name, "hosts").write_text(self.hosts_file(node))

    def remove(self):
        for name in (*self.names, self.router):
            for pid in self.pids(name):  # nobody else is in a namespace of ours
                os.kill(pid, signal.SIGKILL)
            run("ip", "netns", "del", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    def pids(self, name):
        return [int(pid) for pid in run("ip", "netns", "pids", name).stdout.split()]

    def hosts_file(self, own):
        lines = ["127.0.0.1 localhost"]
        for node in range(2):
            own_name = node == own and not self.resolve
            lines.append(f"{'127.0.1.1' if own_name else f'10.77.{node}.2'} node{node}")
        return "\n".join(lines) + "\n"

    def launch(self, line):
        """Start a command on every host, with the variables of the launch table."""
        known = {"HOST0": "10.77.0.2", "PORT": "29500"}
        processes = []
        for node, name in enumerate(self.names):
            inside = f"hostname node{node}; exec bash -c '{line}'"
            words = ["ip", "netns", "exec", name, "unshare", "-u", "bash", "-c", inside]
            processes.append(start(*words, NODE=str(node), **known))
        return processes

    def run_ssh(self, flags, folder):
        """Start scripts/run_ssh.sh for all hosts, which it reaches without an sshd."""
        stub = folder / "ssh"
        stub.write_text(
            "#!/bin/bash\nhost=$1; shift\nnode=${host#node}\n"
            f'exec ip netns exec {self.prefix}n$node unshare -u bash -c "hostname $host; $*"\n'
        )
        stub.chmod(0o755)
        hosts = " ".join(f"node{node}" for node in range(2))
        settings = {"SSH": str(stub), "HOSTS": hosts, "NPROC_PER_NODE": "1"}
        return start("scripts/run_ssh.sh", *flags.split(), **settings)


@pytest.fixture
def hosts():
    built = []

    def build(resolve=True):
        built.append(Hosts(resolve))
        built[0].build()
        return built[0]

    yield build
    for each in built:
        each.remove()


def test_hosts_reach_the_weights_of_one(hosts, synthetic_dir, tmp_path, expected):
    """Gloo would listen where the hostname resolves to, on which nobody else can reach it."""
    network = hosts(resolve=False)
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    for ended in finish_all(network.launch(f"{LAUNCHES['variables by hand']} {flags}"), 200):
        assert ended.returncode == 0, ended.text
    assert summary(tmp_path / "run")["weights_sha256"] == expected


def test_run_ssh_trains_on_both_hosts_and_leaves_nobody_when_one_fails(
    hosts, synthetic_dir, tmp_path
):
    network = hosts()
    flags = "--dataset synthetic --model linear --epochs 100000 --threads 1 --no-progress"
    flags += f" --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    process = network.run_ssh(flags, tmp_path)
    wait_until((tmp_path / "run" / "metrics.jsonl").exists)
    pids = network.pids(network.names[1])
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    (agent,) = [pid for pid, command in commands.items() if b"/torchrun" in command]
    os.kill(agent, signal.SIGKILL)
    ended = finish(process, 120)  # when the last holder of its output has ended
    assert ended.returncode != 0
    assert "[node0] device  2 x cpu" in ended.stdout
    assert " ended with status" in ended.stderr


def test_the_doctor_finds_a_slow_link_and_names_that_resolve_to_loopback(hosts, synthetic_dir):
    command = LAUNCHES["variables by hand"].replace("train_ddp.py", "scripts/tools/doctor.py")
    flags = f"--dataset synthetic --data-dir {synthetic_dir} --threads 1"
    network = hosts(resolve=False)
    limit = "tbf rate 200mbit burst 70kb latency 50ms"
    for name in network.names:
        succeed(run("tc", "-n", name, *f"qdisc add dev eth0 root {limit}".split()))
    ended = finish_all(network.launch(f"{command} {flags}"), 120)
    assert [one.returncode for one in ended] == [0, 0], ended
    (found,) = [line for line in ended[0].stdout.splitlines() if line.startswith("hostnames")]
    assert "warning" in found
    assert "node0 resolves to 127.0.1.1; node1 resolves to 127.0.1.1" in found
    assert "gloo: eth0 on node0, eth0 on node1" in ended[0].stdout
    found = re.search(r"; 4 MiB ([0-9.]+) GB/s", ended[0].stdout)[1]
    assert 0.015 < float(found) < 0.027, "200 Mbit are 0.025 GB"
