"""Examine a machine, or all that a job is going to use, before a training does.

    python scripts/tools/doctor.py
    torchrun --standalone --nproc_per_node 2 scripts/tools/doctor.py
    srun python scripts/tools/doctor.py --json

Start it with the launcher, the settings and the flags of the training. Rank 0 prints a table of
checks, each with what was found and how to mend it; the exit status is 1 if one failed.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import threading
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from collectives import largest, time_all_reduce
from host import (
    FAILURE,
    OK,
    WARNING,
    Facts,
    Finding,
    check_gpus,
    check_limits,
    facts_of_device,
    facts_of_driver,
    facts_of_host,
    judge,
)

import data
from utils import config, distributed, signals
from utils.cluster import members
from utils.cluster.launch import Job, launch
from utils.datasets.sources import RAW_FILES
from utils.device import select_devices, setup_device, usable_cores

SLOW_FACTOR = 1.5  # times the median
SIZES = (4, 2**10, 2**20, 2**24)  # bytes to all-reduce


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("torchvision", "numpy"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "nccl": str(torch.cuda.nccl.version())}
    return found


def address_of(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def describe_data(name: str, data_dir: str) -> dict[str, Any]:
    """Return a checksum of the data, and what tells one disk from another; or nothing."""
    path = Path(data_dir) / data.SOURCES[name].folder / "raw" / RAW_FILES[0]
    if not path.exists():
        return {}
    checksum = 0
    for part in data.load_dataset(name, data_dir):
        for tensor in (part.images, part.labels):
            checksum = zlib.crc32(tensor.numpy().tobytes(), checksum)
    status = path.stat()
    return {"sum": checksum, "file": (status.st_ino, status.st_mtime_ns)}


def facts_of_this_rank(args: argparse.Namespace) -> dict[str, Any]:
    kept = ("GLOO_", "NCCL_", "TORCH_", "LOCAL_WORLD_SIZE")
    return {
        "host": members.host_identity(),
        "name": socket.gethostname(),
        "address": address_of(socket.gethostname()),
        "versions": versions(),
        "variables": {k: v for k, v in os.environ.items() if k.startswith(kept)},
        "data": describe_data(args.dataset, args.data_dir),
        "cores": usable_cores(),
        **facts_of_host(),
    }


def seconds_of_work(device: torch.device) -> float:
    """Return the seconds of a fixed piece of work, the best of five."""
    matrix, times = torch.full((384, 384), 1 / 384, device=device), []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(5):
            matrix = matrix @ matrix
        matrix.sum().item()  # waits for a GPU
        times.append(time.perf_counter() - begin)
    return min(times)


def check_all_reduce(device: torch.device, world_size: int) -> list[Finding]:
    """Check sums, latency and bandwidth, over the size of the message. Collective."""
    told, wrong = [], []
    for size, (seconds, is_right) in time_all_reduce(SIZES, device).items():
        # A ring moves 2(n-1)/n of the message over each link.
        rate = size * 2 * (world_size - 1) / world_size / seconds / 1e6
        told.append(f"{size:,} B {seconds * 1e3:.2f} ms {rate:,.1f} MB/s")
        if not is_right:
            wrong.append(f"{size} bytes")
    if wrong:
        return [Finding("all-reduce", FAILURE, f"wrong sums at {wrong}", "try --backend gloo")]
    return [Finding("all-reduce", OK, "; ".join(told))]


def unreachable_hosts(facts: Facts, rank: int) -> list[str]:
    """Return the hosts that this one cannot reach by what their own names resolve to. Collective.

    The address that a host finds for itself is the one that programs tell to the others.
    """
    found: list[str] = []
    with socket.create_server(("", 0), backlog=1024) as listener:
        ports: list[Any] = [None] * len(facts)
        dist.all_gather_object(ports, listener.getsockname()[1])
        others = {
            fact["host"]: (fact, port) for fact, port in zip(facts, ports, strict=True)
        }.values()

        def probe(fact: dict[str, Any], port: int) -> None:
            if fact["host"] != facts[rank]["host"]:
                try:
                    if fact["address"].startswith("127."):
                        raise OSError("that is each host itself")
                    socket.create_connection((fact["address"], port), timeout=2).close()
                except OSError:
                    found.append(f"{fact['name']} resolves to {fact['address'] or 'nothing'}")

        threads = [threading.Thread(target=probe, args=other) for other in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.barrier()  # before the listener goes
    return found


def differing(facts: Facts, key: str) -> list[str]:
    """Return the names under ``key`` whose values the ranks do not share."""
    names = sorted({name for fact in facts for name in fact[key]})
    return [name for name in names if len({fact[key].get(name) for fact in facts}) > 1]


def examine(facts: Facts, args: argparse.Namespace, backend: str) -> list[Finding]:
    """Turn the facts of all ranks into rows."""
    hosts: dict[str, Facts] = {}
    for fact in facts:
        hosts.setdefault(fact["host"], []).append(fact)
    groups = [(group[0]["name"], group) for group in hosts.values()]
    rows = []

    def row(check: str, problems: list[str], found: str, fix: str, state: str = WARNING) -> None:
        rows.append(judge(check, problems, found, fix, state))

    row("rendezvous", [], ", ".join(f"{len(g)} processes on {name}" for name, g in groups), "")
    problems = [
        f"{name} {' / '.join(sorted({fact['versions'].get(name, '-') for fact in facts}))}"
        for name in differing(facts, "versions")
    ]
    found = ", ".join(" ".join(item) for item in facts[0]["versions"].items())
    row("versions", problems, found, "install the same packages on every host", FAILURE)

    names = [n for n in differing(facts, "variables") if not n.endswith(("IFNAME", "WORLD_SIZE"))]
    problems = [f"{name} is not the same on all ranks" for name in names]
    for name, group in groups:
        told = group[0]["variables"].get("LOCAL_WORLD_SIZE", str(len(group)))
        if told != str(len(group)):
            problems.append(f"LOCAL_WORLD_SIZE={told} for {len(group)} processes on {name}")
    row("variables", problems, "consistent", "export them on every host")

    problems = [text for fact in facts for text in fact["unreachable"]]
    fix = "in /etc/hosts, give the name the address that others use; or set GLOO_SOCKET_IFNAME"
    row("hostnames", problems, "resolve to where the others can reach them", fix)
    chosen = {f"{f['interface'] or 'where the hostname leads'} on {f['name']}" for f in facts}
    row("interface", [], f"{backend}: {', '.join(sorted(chosen))}", "")

    rows += check_gpus(facts, backend) + check_limits(facts)

    where, sums = f"{args.dataset} in {args.data_dir}", {f["data"].get("sum") for f in facts}
    files = {fact["data"].get("file") for fact in facts}
    found = where + (", one disk" if len(files) == 1 else ", a copy on each host")
    absent = [f"no {where} on {fact['name']}" for fact in facts if not fact["data"]]
    if absent:
        row("data", absent, "", "the first process will fetch and prepare it")
    else:
        problems = [f"{where} differs from host to host"] if len(sums) > 1 else []
        row("data", problems, found, "delete the copies and have them prepared anew", FAILURE)

    problems = [
        f"{sum(fact['threads'] for fact in group)} threads on {group[0]['cores']} cores of {name}"
        for name, group in groups
        if sum(fact["threads"] for fact in group) > group[0]["cores"]
    ]
    found = ", ".join(f"{g[0]['threads']} x {len(g)} on {g[0]['cores']} cores" for _, g in groups)
    row("threads", problems, found, "start fewer processes, or lower --threads")

    median = statistics.median(fact["work"] for fact in facts)
    problems = [
        f"rank {rank} on {fact['name']} takes {fact['work'] / median:.1f} x the median"
        for rank, fact in enumerate(facts)
        if fact["work"] > SLOW_FACTOR * median
    ]
    found = f"every rank within {SLOW_FACTOR} x the median"
    row("speed", problems, found, "all wait for it: see what else runs there")
    return rows


def run(args: argparse.Namespace, job: Job) -> int:
    """Examine, report from rank 0, and return the exit status."""
    out = reserve_stdout() if args.json else None
    own, driver = facts_of_this_rank(args), facts_of_driver()
    rank, local_rank, world_size = (
        int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    )
    devices = select_devices(args.device, args.devices)
    device = devices[local_rank % len(devices)]
    setup_device(device, args.threads, job.ranks_sharing_cores)
    backend = distributed.choose_backend(args.backend, device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=job.rendezvous(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=args.timeout),
        device_id=device if backend == "nccl" else None,
    )
    own |= facts_of_device(device, devices, driver)
    own |= {"threads": torch.get_num_threads(), "interface": os.environ.get("GLOO_SOCKET_IFNAME")}
    own["work"] = seconds_of_work(device)
    facts: Facts = [{}] * world_size
    dist.all_gather_object(facts, own)
    own["unreachable"] = unreachable_hosts(facts, rank)
    dist.all_gather_object(facts, own)
    reduced = check_all_reduce(device, world_size)
    rows = [*examine(facts, args, backend), *reduced] if rank == 0 else []
    if rank == 0:
        report(rows, out)
    return largest(int(any(row.state == FAILURE for row in [*rows, *reduced])))


def reserve_stdout() -> TextIO:
    """Return standard output for the JSON alone: gloo writes there, too (torch 2.9)."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def report(rows: list[Finding], json_file: TextIO | None) -> None:
    if json_file is not None:
        found = [row._asdict() for row in rows]
        print(json.dumps(found, indent=2), file=json_file, flush=True)
        return
    for row in rows:
        fix = f"\n{'':21}-> {row.fix}" if row.fix and row.state != OK else ""
        print(f"{row.check:<11}  {row.state:<7}  {row.found}{fix}", flush=True)


def main() -> int:
    signals.install_handlers()
    flags = [flag for flag in sys.argv[1:] if flag != "--json"]
    # The flags of the training, but less patience: what comes later on the line wins.
    args = config.parse_args("ddp", __doc__, ["--rdzv-timeout=30", "--timeout=30", *flags])
    args.json = "--json" in sys.argv
    return launch(run, args)


if __name__ == "__main__":
    sys.exit(main())
