"""Examine a machine, or all machines of a job, before a run.

    python scripts/tools/doctor.py
    torchrun --standalone --nproc_per_node 2 scripts/tools/doctor.py
    srun python scripts/tools/doctor.py --json

Start the doctor with the launcher, the settings and the flags of the run. Rank 0 prints a table of
checks. Each row says what was found, and how to repair it. The exit status is 1 if a check failed.
"""

import argparse
import json
import os
import platform
import resource
import socket
import sys
import threading
import zlib
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from collectives import largest, time_all_reduce

import data
from utils import config, output, signals
from utils.cluster.launch import Job, launch
from utils.device import select_devices, setup_device, usable_cores
from utils.errors import describe

SIZES = (4, 2**10, 2**20, 2**24)  # bytes to all-reduce
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
    """Return MiB free in /dev/shm, and the number of files that ``ulimit`` allows."""
    status = os.statvfs("/dev/shm")
    free = status.f_bavail * status.f_frsize // 2**20
    return {"shm": free, "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}


def facts_of_device(device: torch.device, visible: list[torch.device]) -> dict[str, Any]:
    """Return what is known of this rank's device."""
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": f"{device} {properties.name} (one of {len(visible)} visible)",
        "uuid": str(properties.uuid),
        "memory": [size // 2**20 for size in torch.cuda.mem_get_info(device)],
    }


def check_limits(facts: Facts) -> list[Finding]:
    """Return the rows about what the hosts allow."""
    enough = max(OPEN_FILES, 4 * len(facts))  # rank 0 holds several connections to each rank

    def low(name: str, least: int) -> list[str]:
        return [f"{fact[name]} on {fact['name']}" for fact in facts if fact[name] < least]

    shm, files = (", ".join(sorted({str(f[n]) for f in facts})) for n in ("shm", "files"))
    cure = "--shm-size=1g for a container, in Kubernetes a volume emptyDir with medium: Memory"
    return [
        judge("/dev/shm MiB", low("shm", SHM_MIB), f"{shm} free", cure),
        judge("open files", low("files", enough), f"{files} for a process", "ulimit -n 65536"),
    ]


def check_gpus(facts: Facts, backend: str) -> list[Finding]:
    """Return the rows about devices and their memory."""
    uuids = [fact.get("uuid", str(rank)) for rank, fact in enumerate(facts)]
    shared = [
        f"rank {rank} shares {fact['device']}"
        for rank, fact in enumerate(facts)
        if uuids.count(uuids[rank]) > 1
    ]
    devices = {fact["device"] for fact in facts}
    memory = [fact["memory"] for fact in facts if "memory" in fact]
    used = [
        f"{fact['memory'][0]} of {fact['memory'][1]} MiB of {fact['device']} on {fact['name']} free"
        for fact in facts
        if "memory" in fact and 2 * fact["memory"][0] < fact["memory"][1]
    ]
    free = f"{min(memory)[0]} MiB or more free" if memory else "no GPU"
    state = FAILURE if backend == "nccl" else WARNING
    return [
        judge("devices", shared, ", ".join(sorted(devices)), "one process for each GPU", state),
        judge("GPU memory", used, free, "nvidia-smi shows who uses it; --devices names others"),
    ]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("torchvision", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "nccl": str(torch.cuda.nccl.version())}
    return found


def facts_of_data(name: str, data_dir: str) -> dict[str, Any]:
    """Return a checksum of a data set, or why it can't be read. Empty if it isn't fetched yet."""
    source = data.SOURCES[name]
    if source.mirrors and not Path(data_dir, source.folder).is_dir():
        return {}
    try:
        sets = data.place(data.load_dataset(name, data_dir), torch.device("cpu"), False, 0, 0)
        return {"sum": zlib.crc32(repr([data.fingerprint(each) for each in sets]).encode())}
    except Exception as error:  # a user's own function can fail in any way
        return {"problem": describe(error)}


def facts_of_this_rank(args: argparse.Namespace) -> dict[str, Any]:
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    return {
        "host": socket.gethostname(),
        "name": socket.gethostname(),
        "address": address,
        "versions": versions(),
        "data": facts_of_data(args.dataset, args.data_dir),
        "cores": usable_cores(),
        **facts_of_host(),
    }


def check_all_reduce(device: torch.device, world_size: int) -> Finding:
    """Check sums, latency and bandwidth, over the size of the message. Collective."""
    told, wrong = [], []
    for size, (seconds, is_right) in time_all_reduce(SIZES, device).items():
        # A ring moves 2(n-1)/n of the message over each link.
        rate = size * 2 * (world_size - 1) / world_size / seconds / 1e6
        told.append(f"{size:,} B {seconds * 1e3:.2f} ms {rate:,.1f} MB/s")
        if not is_right:
            wrong.append(f"wrong sums of {size} bytes")
    return judge("all-reduce", wrong, "; ".join(told), "try --backend gloo", FAILURE)


def unreachable_hosts(facts: Facts, rank: int) -> list[str]:
    """Return the hosts that this one cannot reach at the addresses that they find. Collective."""
    found: list[str] = []
    with socket.create_server(("", 0), backlog=1024) as listener:
        ports: list[Any] = [None] * len(facts)
        dist.all_gather_object(ports, listener.getsockname()[1])
        others = {f["host"]: (f, port) for f, port in zip(facts, ports, strict=True)}
        others.pop(facts[rank]["host"])

        def probe(fact: dict[str, Any], port: int) -> None:
            try:
                if fact["address"].startswith("127."):
                    raise OSError("that is each host itself")
                socket.create_connection((fact["address"], port), timeout=2).close()
            except OSError:
                found.append(f"{fact['name']} resolves to {fact['address'] or 'nothing'}")

        threads = [threading.Thread(target=probe, args=other) for other in others.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.barrier()  # before the listener goes
    return found


def check_data(facts: Facts, where: str) -> Finding:
    absent = [f"no {where} on {fact['name']}" for fact in facts if not fact["data"]]
    if absent:
        return judge("data", absent, "", "the first process will fetch and prepare it")
    broken = [f"{f['data']['problem']} on {f['name']}" for f in facts if "problem" in f["data"]]
    if broken:
        return judge("data", broken, "", "make it readable on every host", FAILURE)
    sums = {fact["data"]["sum"] for fact in facts}
    problems = [f"{where} differs from rank to rank"] if len(sums) > 1 else []
    cure = "prepare it again on every host; give a set of your own one order and one seed"
    return judge("data", problems, f"{where}, the same on all ranks", cure, FAILURE)


def examine(facts: Facts, args: argparse.Namespace, backend: str) -> list[Finding]:
    """Turn the facts of all ranks into rows."""
    hosts: dict[str, Facts] = {}
    for fact in facts:
        hosts.setdefault(fact["host"], []).append(fact)
    groups = [(group[0]["name"], group) for group in hosts.values()]

    rendezvous = ", ".join(f"{len(group)} processes on {name}" for name, group in groups)
    installed = ", ".join(" ".join(item) for item in facts[0]["versions"].items())
    found = {
        name: sorted({fact["versions"].get(name, "-") for fact in facts})
        for name in {name for fact in facts for name in fact["versions"]}
    }
    unlike = [f"{name} {' / '.join(values)}" for name, values in found.items() if len(values) > 1]
    unreachable = [text for fact in facts for text in fact["unreachable"]]
    address = "in /etc/hosts, give the name the address that others use; or set GLOO_SOCKET_IFNAME"
    chosen = {f"{f['interface'] or 'where the hostname leads'} on {f['name']}" for f in facts}
    threads = ", ".join(f"{g[0]['threads']} x {len(g)} on {g[0]['cores']} cores" for _, g in groups)
    crowded = [
        f"{sum(fact['threads'] for fact in group)} threads on {group[0]['cores']} cores of {name}"
        for name, group in groups
        if sum(fact["threads"] for fact in group) > group[0]["cores"]
    ]
    return [
        Finding("rendezvous", OK, rendezvous),
        judge("versions", unlike, installed, "install the same packages on every host", FAILURE),
        judge("hostnames", unreachable, "resolve to where the others can reach them", address),
        Finding("interface", OK, f"{backend}: {', '.join(sorted(chosen))}"),
        *check_gpus(facts, backend),
        *check_limits(facts),
        check_data(facts, f"{args.dataset} in {args.data_dir}"),
        judge("threads", crowded, threads, "start fewer processes, or lower --threads"),
    ]


def run(args: argparse.Namespace, job: Job) -> int:
    """Examine, report from rank 0, and return the exit status."""
    out = os.dup(1)
    if args.json:  # and gloo must not write there (torch 2.9)
        os.dup2(2, 1)
    own = facts_of_this_rank(args)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    devices = select_devices(args.device, args.devices)
    device = devices[local_rank % len(devices)]
    setup_device(device, args.threads)
    dist.init_process_group(
        job.backend,
        store=job.rendezvous(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=args.timeout),
        device_id=device if "nccl" in job.backend else None,
    )
    own |= facts_of_device(device, devices)
    own |= {"threads": torch.get_num_threads(), "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
    facts: Facts = [{}] * world_size
    dist.all_gather_object(facts, own)
    own["unreachable"] = unreachable_hosts(facts, rank)
    dist.all_gather_object(facts, own)
    rows = [check_all_reduce(device, world_size)]
    if rank == 0:
        rows = [*examine(facts, args, job.backend.rpartition(":")[2]), *rows]
        if args.json:
            os.write(out, json.dumps([row._asdict() for row in rows], indent=2).encode())
        for row in [] if args.json else rows:
            fix = f"\n{'':23}-> {row.fix}" if row.fix else ""
            print(f"{row.check:<12}  {row.state:<7}  {row.found}{fix}", flush=True)
    status = largest(int(any(row.state == FAILURE for row in rows)))
    dist.destroy_process_group()
    return status


def main() -> int:
    output.protect()
    signals.install_handlers()
    parser = config.build_parser("ddp", __doc__)  # the flags of the run, but shorter timeouts
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.set_defaults(technique="ddp", rdzv_timeout=30.0, timeout=30.0)
    args = parser.parse_args()
    if problem := config.find_conflict(args):
        parser.error(problem)
    return launch(run, args)


if __name__ == "__main__":
    sys.exit(main())
