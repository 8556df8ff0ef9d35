"""Examine a machine, or all machines of a job, before a run.

    python scripts/tools/doctor.py
    torchrun --standalone --nproc_per_node 2 scripts/tools/doctor.py
    srun python scripts/tools/doctor.py

Start the doctor with the launcher, the settings and the flags of the run. Rank 0 prints a table of
checks. Each row says what was found, and how to repair it. The exit status is 1 if sums are wrong,
or versions differ.
"""

import argparse
import os
import platform
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")  # before torch is imported, as in train_ddp.py
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from collectives import SMALLEST, largest, time_all_reduce
from utils.cluster.launch import launch
from utils.training import config

from utils import output, signals
from utils.device import select_devices, setup_device, usable_cores

OK, WARNING, FAILURE = "ok", "warning", "failure"
SHM_MIB = 512  # a container has 64 by default
OPEN_FILES = 1024  # what most systems give
Facts = list[dict[str, Any]]  # of all ranks, in their order


class Finding(NamedTuple):
    """A row of the doctor's table."""

    check: str
    state: str
    found: str
    fix: str = ""


def judge(check: str, problems: list[str], found: str, fix: str, state: str = WARNING) -> Finding:
    """Return a row with the problems, their state and cure, or else with what was found."""
    text = "; ".join(sorted(set(problems)))
    return Finding(check, state, text, fix) if text else Finding(check, OK, found)


def facts_of_host() -> dict[str, Any]:
    """Return what this rank knows of its host. ``shm`` is what is free in /dev/shm, in MiB."""
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    status = os.statvfs("/dev/shm")
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "address": address,
        "cores": usable_cores(),
        "shm": status.f_bavail * status.f_frsize // 2**20,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "threads": torch.get_num_threads(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


def facts_of_device(device: torch.device, visible: list[torch.device]) -> dict[str, Any]:
    """Return what is known of this rank's device."""
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": f"{device} {properties.name} (one of {len(visible)} visible)",
        "memory": [size // 2**20 for size in torch.cuda.mem_get_info(device)],
    }


def check_limits(facts: Facts) -> list[Finding]:
    """Return the rows about what the hosts allow."""
    enough = max(OPEN_FILES, 4 * len(facts))  # rank 0 holds several connections to each rank

    def low(name: str, least: int) -> list[str]:
        return [f"{fact[name]} on {fact['host']}" for fact in facts if fact[name] < least]

    shm, files = (", ".join(sorted({str(f[n]) for f in facts})) for n in ("shm", "files"))
    cure = "--shm-size=1g for a container, in Kubernetes a volume emptyDir with medium: Memory"
    return [
        judge("/dev/shm MiB", low("shm", SHM_MIB), f"{shm} free", cure),
        judge("open files", low("files", enough), f"{files} for a process", "ulimit -n 65536"),
    ]


def check_gpus(facts: Facts) -> list[Finding]:
    """Return the rows about devices and their memory.

    Two ranks on one GPU are no row: NCCL refuses them when the group is made, and gloo works.
    """
    devices = {fact["device"] for fact in facts}
    memory = [fact["memory"] for fact in facts if "memory" in fact]
    used = [
        f"{fact['memory'][0]} of {fact['memory'][1]} MiB of {fact['device']} on {fact['host']} free"
        for fact in facts
        if "memory" in fact and 2 * fact["memory"][0] < fact["memory"][1]
    ]
    free = f"{min(memory)[0]} MiB or more free" if memory else "no GPU"
    return [
        Finding("devices", OK, ", ".join(sorted(devices))),
        judge("GPU memory", used, free, "nvidia-smi shows who uses it; --devices names others"),
    ]


def versions() -> str:
    """Return the versions of this rank."""
    found = f"Python {platform.python_version()}, torch {torch.__version__}"
    if torch.cuda.is_available():
        found += f", CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}"
    return found


def check_all_reduce(device: torch.device, world_size: int) -> Finding:
    """Check sums, and measure the latency and the bus bandwidth by size. Collective."""
    told, wrong = [], []
    for timing in time_all_reduce(device):
        if timing.size == SMALLEST:
            told.append(f"{1e6 * timing.seconds:,.0f} us for {timing.size} B")
        elif world_size > 1:
            rate = timing.bus_bandwidth(world_size) / 1e9
            told.append(f"{timing.size // 2**20} MiB {rate:,.3f} GB/s")
        if not timing.is_right:
            wrong.append(f"wrong sums of {timing.size} bytes")
    return judge("all-reduce", wrong, "; ".join(told), "try --backend gloo", FAILURE)


def unreachable_hosts(facts: Facts, rank: int) -> list[str]:
    """Return the hosts that this one cannot reach at the addresses that they find. Collective."""
    found: list[str] = []
    with socket.create_server(("", 0), backlog=1024) as listener:
        ports: list[Any] = [None] * len(facts)
        dist.all_gather_object(ports, listener.getsockname()[1])
        others = {fact["host"]: (fact, port) for fact, port in zip(facts, ports, strict=True)}
        others.pop(facts[rank]["host"])

        def probe(other: tuple[dict[str, Any], int]) -> None:
            fact, port = other
            try:
                if fact["address"].startswith("127."):
                    raise OSError("that is each host itself")
                socket.create_connection((fact["address"], port), timeout=2).close()
            except OSError:
                found.append(f"{fact['host']} resolves to {fact['address'] or 'nothing'}")

        with ThreadPoolExecutor(64) as pool:
            pool.map(probe, others.values())
        dist.barrier()  # before the listener goes
    return found


def examine(facts: Facts, backend: str) -> list[Finding]:
    """Turn the facts of all ranks into rows."""
    hosts: dict[str, Facts] = {}
    for fact in facts:
        hosts.setdefault(fact["host"], []).append(fact)
    rendezvous = ", ".join(f"{len(group)} processes on {host}" for host, group in hosts.items())
    unreachable = [text for fact in facts for text in fact["unreachable"]]
    address = "in /etc/hosts, give the name the address that others use; or set GLOO_SOCKET_IFNAME"
    chosen = {f"{f['interface'] or 'where the hostname leads'} on {f['host']}" for f in facts}
    groups, installed = hosts.values(), facts[0]["versions"]
    unlike = [f"{f['versions']} on {f['host']}" for f in facts if f["versions"] != installed]
    threads = ", ".join(f"{g[0]['threads']} x {len(g)} on {g[0]['cores']} cores" for g in groups)
    crowded = [
        f"{sum(fact['threads'] for fact in group)} threads on {group[0]['cores']} cores of {host}"
        for host, group in hosts.items()
        if sum(fact["threads"] for fact in group) > group[0]["cores"]
    ]
    return [
        Finding("rendezvous", OK, rendezvous),
        judge("versions", unlike, installed, "install the same on every host", FAILURE),
        judge("hostnames", unreachable, "resolve to where the others can reach them", address),
        Finding("interface", OK, f"{backend}: {', '.join(sorted(chosen))}"),
        *check_gpus(facts),
        *check_limits(facts),
        judge("threads", crowded, threads, "start fewer processes, or lower --threads"),
    ]


def run(args: argparse.Namespace) -> int:
    """Examine, report from rank 0, and return the exit status."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    devices = select_devices(args.device, args.devices)
    device = setup_device(args.device, args.devices, args.threads, local_rank=local_rank)
    dist.init_process_group(
        backend=args.backend,
        timeout=timedelta(seconds=args.timeout),
        device_id=device if "nccl" in args.backend else None,
    )
    own = facts_of_host() | facts_of_device(device, devices)
    facts: Facts = [{}] * world_size
    dist.all_gather_object(facts, own)
    own["unreachable"] = unreachable_hosts(facts, rank)
    dist.all_gather_object(facts, own)
    rows = [check_all_reduce(device, world_size)]
    if rank == 0:
        rows = [*examine(facts, args.backend.rpartition(":")[2]), *rows]
        for row in rows:
            fix = f"\n{'':23}-> {row.fix}" if row.fix else ""
            print(f"{row.check:<12}  {row.state:<7}  {row.found}{fix}", flush=True)
    status = largest(int(any(row.state == FAILURE for row in rows)))
    dist.destroy_process_group()
    return status


def main() -> int:
    output.protect()
    signals.install_handlers()
    parser = config.build_parser("ddp", __doc__)  # the flags of the run, but shorter timeouts
    parser.set_defaults(technique="ddp", rdzv_timeout=30.0, timeout=30.0)
    args = parser.parse_args()
    if problem := config.find_conflict(args):
        parser.error(problem)
    return launch(run, args)


if __name__ == "__main__":
    sys.exit(main())
