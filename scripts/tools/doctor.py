"""Examine the machines of a job that does not start or is slow. Start it like the job:

    torchrun --standalone --nproc_per_node 2 scripts/tools/doctor.py
    python scripts/tools/doctor.py                                     this process alone

With several machines torchrun itself waits until all of them are there, and does not say which one
is missing. So start the doctor without torchrun, on each machine with another RANK:

    RANK=1 WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500 python scripts/tools/doctor.py

Rank 0 prints a line for each finding, and measures an all-reduce of each size, over NCCL if there
are GPUs, and over gloo otherwise. The bandwidth is what nccl-tests calls bus bandwidth: the bytes
that a ring sends over each link, per second. The last line is OK or FAILED, and the exit status of
all ranks is 0 or 1. So a prolog of Slurm can examine its node, and refuse it:

    torchrun --standalone --nproc_per_node gpu scripts/tools/doctor.py --min-gbps 100

This file runs alone, in a copy too.
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

# PyTorch's C++ code prints twenty lines when a connection fails. This is read when torch is loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch
import torch.distributed as dist

Facts = dict[str, Any]

RANK, LOCAL_RANK = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
HOST, ADDRESS = socket.gethostname(), os.environ.get("MASTER_ADDR", "localhost")
PORT = int(os.environ.get("MASTER_PORT", 0))  # 0: one that is free
SHM_MIB = 512  # a container has 64 by default
LOOPBACK = ("127.", "::1")  # how addresses begin that only the machine itself can use
SIZES = [8 * 32**i for i in range(6)]  # bytes, from 8 to 256 MiB


def complaint(text: str) -> str:
    return f"doctor.py: error: rank {RANK} on {HOST}: {text}"


def stop(text: str) -> NoReturn:
    sys.exit(complaint(text))


@contextmanager
def limit(seconds: float, text: str) -> Iterator[None]:
    """End the process with ``text`` if the block takes longer.

    A call of PyTorch may wait for ever, and then no exception ends it.
    """

    def end() -> None:
        print(complaint(text), file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def lookup(name: str) -> str | None:
    """Return the first address of a name, of IPv4 or IPv6, or None."""
    with suppress(OSError):
        return str(socket.getaddrinfo(name, None)[0][4][0])
    return None


def connect(seconds: float) -> dist.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 serves, or torchrun."""
    is_server = RANK == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"{ADDRESS}:{PORT} (MASTER_ADDR, MASTER_PORT)"
    found = lookup(ADDRESS)
    if found is None:
        stop(f"MASTER_ADDR={ADDRESS} is no name that this machine knows: use rank 0's address")
    own = f", which is always the machine itself ({found})" * found.startswith(LOOPBACK)
    end = time.monotonic() + seconds
    while not is_server:
        try:
            socket.create_connection((ADDRESS, PORT), timeout=2).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                stop(f"no rank 0 at {where}{own}, {error}: not started, or a firewall?")
            time.sleep(0.2)
    doubt = f"does MASTER_ADDR={ADDRESS} lead to this machine? {PORT} may be in use on the other"
    if not is_server:
        doubt = f"another program answers at {where}: choose another MASTER_PORT"
    timeout = timedelta(seconds=seconds)
    try:
        with limit(seconds + 5, doubt):
            store = dist.TCPStore(ADDRESS, PORT, None, is_server, timeout, wait_for_workers=False)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            doubt = f"port {PORT} is in use, by another program or a second rank 0: choose another"
        stop(doubt)
    return dist.PrefixStore("doctor", store)


def call_the_roll(store: dist.Store, seconds: float) -> None:
    """Wait for all ranks, and name those that did not come, came twice, or count otherwise."""
    me = f"process {os.getpid()} on {HOST}"
    number = store.add(f"processes of rank {RANK}", 1)
    store.set(f"{RANK}/{number}", json.dumps([me, WORLD_SIZE]))
    if number > 1:
        first, _ = json.loads(store.get(f"{RANK}/1"))
        stop(f"this rank was started twice, {first} and {me}: give each process its own RANK")
    with suppress(RuntimeError):  # a rank has not come in time
        store.wait([f"{r}/1" for r in range(WORLD_SIZE)], timedelta(seconds=seconds))
    try:
        came = [r for r in range(WORLD_SIZE) if store.check([f"{r}/1"])]
        names, sizes = zip(*(json.loads(store.get(f"{r}/1")) for r in came), strict=True)
    except RuntimeError:  # rank 0 has ended, after it said the same
        sys.exit(1)
    there = "; ".join(f"{r}: {name}" for r, name in zip(came, names, strict=True))
    if len(set(sizes)) > 1:
        stop(f"the ranks have different WORLD_SIZE, {dict(zip(came, sizes, strict=True))}: {there}")
    if missing := [str(r) for r in range(WORLD_SIZE) if r not in came]:
        if RANK > 0:
            sys.exit(1)
        stop(
            f"missing after {seconds:g} s: rank {', '.join(missing)} of {WORLD_SIZE}. Started, with"
            f" this MASTER_ADDR? Those here are {there}"
        )


def find_facts() -> Facts:
    """Return what this rank knows of its machine and of its GPU."""
    shm = os.statvfs("/dev/shm")
    facts: Facts = {
        "host": HOST,
        "versions": f"torch {torch.__version__}",
        "name_leads_to": lookup(HOST),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "shm": shm.f_bavail * shm.f_frsize // 2**20,
        "gpu": "no GPU",
    }
    if torch.cuda.is_available():
        index = LOCAL_RANK % torch.cuda.device_count()  # if a launcher shows each rank one GPU
        torch.cuda.set_device(index)
        properties = torch.cuda.get_device_properties(index)
        facts["versions"] += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        facts["gpu"] = f"GPU {index} of {HOST} ({properties.name}, {properties.uuid})"
        facts["free"], facts["memory"] = (n / 2**30 for n in torch.cuda.mem_get_info())
    return facts


def ranks_by(name: str, ranks: list[Facts]) -> dict[str, list[int]]:
    """Return which ranks have each value of a fact."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(facts[name], []).append(rank)
    return found


def examine_name(facts: Facts, ranks: list[Facts]) -> Iterator[str]:
    """Yield a warning if a machine's own name does not lead to an address that others can use."""
    host = facts["host"]
    leads_to = facts["name_leads_to"]
    is_alone = all(other["host"] == host for other in ranks)
    is_found = leads_to is not None and not leads_to.startswith(LOOPBACK)
    if not is_alone and not is_found and not facts["interface"]:
        yield (
            f"warning: on {host} the name {host} leads to {leads_to or 'no address'}, where the"
            " others do not find what gloo offers (on CPUs): write the address that they use"
            " (hostname -I) into its /etc/hosts, or set GLOO_SOCKET_IFNAME there (ip addr)"
        )


def examine(ranks: list[Facts]) -> Iterator[str]:
    """Yield the findings about the facts of all ranks. Each begins with its gravity."""
    versions, hosts, gpus = (ranks_by(name, ranks) for name in ("versions", "host", "gpu"))
    for version, users in versions.items():
        state, advice = ("error", ": install the same on all") if len(versions) > 1 else ("ok", "")
        yield f"{state}: ranks {users} have {version}{advice}"
    for host, users in hosts.items():
        facts = ranks[users[0]]
        yield f"ok: ranks {users} are on {host} ({facts['name_leads_to'] or 'no address'})"
        yield from examine_name(facts, ranks)
        if facts["shm"] < SHM_MIB:
            yield (
                f"warning: {facts['shm']} MiB free in /dev/shm of {host}, for loader workers and"
                " NCCL: docker run --shm-size 1g (Kubernetes: an emptyDir with medium: Memory)"
            )
    for gpu, users in gpus.items():
        facts = ranks[users[0]]
        has_gpu = gpu != "no GPU"
        if has_gpu and facts["free"] < 0.8 * facts["memory"]:
            free = f"{facts['free']:.0f} of {facts['memory']:.0f} GiB free"
            yield f"warning: {free} on {gpu}: nvidia-smi shows which program uses it"
        is_wrong = len(users) > 1 if has_gpu else len(gpus) > 1
        state, advice = ("error", ": each rank needs its own") if is_wrong else ("ok", "")
        yield f"{state}: ranks {users} have {gpu}{advice}"


def measure_all_reduce(size: int, device: torch.device) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes. Collective.

    Raises:
        RuntimeError: what PyTorch says, or the sum is wrong.
    """
    seconds = []
    for _ in range(21 if size < 2**20 else 6):
        values = torch.full([size // 4], RANK + 1.0, device=device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        values[0].item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        if not (values == WORLD_SIZE * (WORLD_SIZE + 1) / 2).all():
            raise RuntimeError("the sum of an all-reduce is wrong")
    return statistics.median(seconds[1:])  # the first one connects


def measure_pair(first: int, second: int, device: torch.device) -> float:
    """Return in how many seconds two ranks send the largest size to and fro. Collective."""
    values = torch.ones(SIZES[-1] // 4, device=device)
    seconds = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        if first == RANK:
            dist.send(values, second)
            dist.recv(values, second)
        if second == RANK:
            dist.recv(values, first)
            dist.send(values, first)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure(args: argparse.Namespace, store: dist.Store, ranks: list[Facts]) -> Iterator[Facts]:
    """Yield the rows of the table, then those of the pairs, as this rank sees them. Collective."""
    backend = args.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}")
    # After this time NCCL's watchdog aborts the process without a word, so limited() comes first.
    timeout = timedelta(seconds=args.timeout if backend == "gloo" else 10 * args.timeout)
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, timeout=timeout, world_size=WORLD_SIZE, rank=RANK, store=store, device_id=gpu
    )

    def row(name: str, size: int, sent: float, seconds: float) -> Facts:
        gbps = sent / seconds / 1e9
        text = f"{name} {size:>11,} B {seconds * 1e6:>11,.0f} us {gbps:8,.2f} GB/s"
        return {"name": name, "bytes": size, "us": seconds * 1e6, "gbps": gbps, "text": text}

    for size in SIZES:
        sent = 2 * (WORLD_SIZE - 1) / WORLD_SIZE * size
        yield row(f"{backend} all-reduce", size, sent, measure_all_reduce(size, device))
    members = [users[0] for users in ranks_by("host", ranks).values()]
    members = members if len(members) > 1 else list(range(WORLD_SIZE))
    for pair in itertools.combinations(members, 2) if args.pairs else ():
        name = " and ".join(f"rank {rank} on {ranks[rank]['host']}" for rank in pair)
        yield row(name, SIZES[-1], 2 * SIZES[-1], measure_pair(*pair, device))
    dist.destroy_process_group()


def limited(rows: Iterator[Facts], seconds: float, text: str) -> Iterator[Facts]:
    """Yield the rows, and end the process with ``text`` if one of them takes longer."""
    while True:
        with limit(seconds, text):
            row = next(rows, None)
        if row is None:
            return
        yield row


def diagnose(args: argparse.Namespace) -> int:
    """Examine the job, print what is found, and return the exit status. Collective."""
    store = connect(args.timeout)
    with limit(6 * args.timeout, "a rank does not answer"):
        call_the_roll(store, args.timeout)
        store.set(f"facts {RANK}", json.dumps(find_facts()))
        ranks = [json.loads(store.get(f"facts {r}")) for r in range(WORLD_SIZE)]
        store.set(f"done {RANK}", "")
        if RANK == 0:  # which serves the store, so it must not end before the others have read it
            store.wait([f"done {r}" for r in range(WORLD_SIZE)])
    findings = list(examine(ranks))  # the same on all ranks
    rows = []
    say = print if RANK == 0 and not args.json else lambda *lines, **options: None
    say(*findings, sep="\n", flush=True)
    if WORLD_SIZE > 1 and not any(line.startswith("error") for line in findings):
        is_named = any(" the name " in line for line in findings)
        cause = "Rank 0's warnings about names say why" if is_named else "is there a firewall?"
        table = measure(args, store, ranks)
        try:
            for row in limited(table, 3 * args.timeout, f"a rank does not answer: {cause}"):
                rows.append(row)
                say(row["text"], flush=True)
        except RuntimeError as error:
            stop(f"{' '.join(str(error).split())[:300]}: {cause}")
    slow = [row for row in rows if row["bytes"] == SIZES[-1] and row["gbps"] < args.min_gbps]
    errors = [f"error: below {args.min_gbps:g} GB/s: {row['text']}" for row in slow]
    findings += errors
    status = int(any(line.startswith("error") for line in findings))
    say(*errors, "FAILED" if status else "OK", sep="\n", flush=True)
    if RANK == 0 and args.json:
        print(json.dumps({"ok": not status, "findings": findings, "rows": rows, "ranks": ranks}))
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--timeout", type=float, default=30, help="seconds of each wait (30)")
    add("--backend", help="such as nccl-legacy (nccl with GPUs, otherwise gloo)")
    add("--pairs", action="store_true", help="measure each pair of machines, or of one's ranks")
    add("--min-gbps", type=float, default=0, help="GB/s below which the largest size is an error")
    add("--json", action="store_true", help="print an object of JSON instead of lines")
    args = parser.parse_args()
    if RANK >= WORLD_SIZE:
        parser.error(f"RANK={RANK} is not below WORLD_SIZE={WORLD_SIZE}: the first rank is 0")
    if args.min_gbps and WORLD_SIZE == 1:
        parser.error("--min-gbps needs two processes, between which something is sent")
    return diagnose(args)


if __name__ == "__main__":
    sys.exit(main())
