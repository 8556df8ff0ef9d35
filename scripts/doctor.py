"""Examine a machine, or all that a job is going to use, before a training does.

    python scripts/doctor.py
    torchrun --standalone --nproc_per_node 2 scripts/doctor.py
    srun python scripts/doctor.py --json

Start it with the launcher, the settings and the flags of the training. Rank 0 prints a table of
checks, each with what was found and how to mend it; the exit status is 1 if one failed.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
import zlib
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import data
from utils import config, distributed, rendezvous, runtime, signals

OTHERS_MIB = 100  # of memory in use on a GPU that are worth a warning
SLOW_FACTOR = 1.5  # times the median
SIZES = (4, 2**10, 2**20, 2**24)  # bytes to all-reduce
OK, WARNING, FAILURE = "ok", "warning", "failure"
Facts = list[dict[str, Any]]  # of all ranks, in their order


class Finding(NamedTuple):
    """A row of the table."""

    check: str
    state: str
    found: str
    fix: str = ""


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
    path = Path(data_dir) / data.SOURCES[name].folder / data.PREPARED_NAME
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
        "host": rendezvous.host_identity(),
        "name": socket.gethostname(),
        "address": address_of(socket.gethostname()),
        "versions": versions(),
        "variables": {k: v for k, v in os.environ.items() if k.startswith(kept)},
        "data": describe_data(args.dataset, args.data_dir),
        "cores": runtime.usable_cores(),
    }


def memory_in_use() -> dict[str, int]:
    """Return the MiB in use on each GPU by its uuid; asked before this job takes any."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        lines = subprocess.check_output(query, text=True, timeout=10).splitlines()
        return {uuid.strip(): int(used) for uuid, used in (line.split(",") for line in lines)}
    return {}


def facts_of_device(device: torch.device, in_use: dict[str, int]) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"
    return {"device": f"{device} {properties.name}", "uuid": uuid, "used": in_use.get(uuid, 0)}


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
    for size, (seconds, is_right) in distributed.time_all_reduce(SIZES, device).items():
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
        text = "; ".join(sorted(set(problems)))
        rows.append(Finding(check, state, text, fix) if text else Finding(check, OK, found))

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

    uuids = [fact.get("uuid", str(rank)) for rank, fact in enumerate(facts)]
    problems = [
        f"rank {rank} shares {facts[rank]['device']}"
        for rank, uuid in enumerate(uuids)
        if uuids.count(uuid) > 1
    ]
    found = ", ".join(sorted({fact["device"] for fact in facts}))
    state = FAILURE if backend == "nccl" else WARNING
    row("devices", problems, found, "start one process for each GPU", state)
    problems = [
        f"{fact['used']} MiB of {fact['device']} on {fact['name']} in use by other programs"
        for fact in facts
        if fact.get("used", 0) > OTHERS_MIB
    ]
    row("GPU memory", problems, "free", "see nvidia-smi, or choose others with --devices")

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


def run(args: argparse.Namespace) -> int:
    """Examine, report from rank 0, and return the exit status."""
    out = reserve_stdout() if args.json else None
    own, in_use = facts_of_this_rank(args), memory_in_use()
    try:
        device, rank, world_size, backend = distributed.setup_process_group(
            args.backend,
            args.device,
            args.devices,
            args.threads,
            init_method=args.init_method,
            rdzv_timeout=args.rdzv_timeout,
            timeout=args.timeout,
            must_agree=config.shared(args),
        )
    except rendezvous.RendezvousError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            report([Finding("rendezvous", FAILURE, str(error))], out)
        return 1
    own |= facts_of_device(device, in_use)
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
    return distributed.largest(int(any(row.state == FAILURE for row in [*rows, *reduced])))


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
    return distributed.launch(run, args)


if __name__ == "__main__":
    sys.exit(main())
