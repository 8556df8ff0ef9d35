"""Examine the machines of a job that does not start or is slow. Start it like the job:

    torchrun --standalone --nproc_per_node 2 scripts/tools/doctor.py
    python scripts/tools/doctor.py                                     this process alone

With several machines torchrun itself waits until all of them are there, and does not say which one
is missing. So start the doctor without torchrun, on each machine with another RANK:

    RANK=1 WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29500 python scripts/tools/doctor.py

Rank 0 prints a line for each finding. The exit status is 1 if one of them is an error.
"""

import argparse
import json
import os
import resource
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

RANK, LOCAL_RANK = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
HOST, ADDRESS = socket.gethostname(), os.environ.get("MASTER_ADDR", "localhost")
PORT = int(os.environ.get("MASTER_PORT", 0))  # 0: one that is free
SHM_MIB = 512  # a container has 64 by default
OPEN_FILES = 1024  # what most systems allow a process


def stop(text: str) -> NoReturn:
    """Print ``text`` and end this process, even if its main thread is stuck in C++."""
    print(f"doctor.py: error: rank {RANK} on {HOST}: {text}", file=sys.stderr, flush=True)
    os._exit(1)


@contextmanager
def limit(seconds: float, text: str) -> Iterator[None]:
    """Stop with ``text`` if the block takes longer. Not every call of PyTorch has a limit."""
    timer = threading.Timer(seconds, stop, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def connect(seconds: float) -> dist.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT. Rank 0 serves it, or torchrun does."""
    is_server = RANK == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where, end = f"{ADDRESS}:{PORT} (MASTER_ADDR, MASTER_PORT)", time.monotonic() + seconds
    while not is_server:
        try:
            socket.create_connection((ADDRESS, PORT), timeout=2).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                stop(f"no rank 0 at {where}, {error}: was it started? Does a firewall block it?")
            time.sleep(0.2)
    doubt = f"does MASTER_ADDR={ADDRESS} lead to this machine? {PORT} may be in use on the other"
    if not is_server:
        doubt = f"another program answers at {where}: choose another MASTER_PORT"
    timeout = timedelta(seconds=seconds)
    try:
        with limit(seconds + 5, doubt):
            store = dist.TCPStore(ADDRESS, PORT, None, is_server, timeout, wait_for_workers=False)
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store
            return dist.PrefixStore(f"doctor {attempt}", store)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            doubt = f"port {PORT} is in use, by another program or a second rank 0: choose another"
        stop(doubt)


def call_the_roll(store: dist.Store, seconds: float) -> None:
    """Wait for all ranks, and name those that did not come, or came twice."""
    me = f"process {os.getpid()} on {HOST}"
    number = store.add(f"processes of rank {RANK}", 1)
    store.set(f"{RANK}/{number}", me)
    if number > 1:
        first = store.get(f"{RANK}/1").decode()
        stop(f"this rank was started twice, {first} and {me}: give each process its own RANK")
    try:
        store.wait([f"{r}/1" for r in range(WORLD_SIZE)], timedelta(seconds=seconds))
    except RuntimeError:
        with suppress(RuntimeError):  # rank 0 has ended, after it said the same
            came = [r for r in range(WORLD_SIZE) if store.check([f"{r}/1"])]
            there = "; ".join(f"{r}: {store.get(f'{r}/1').decode()}" for r in came)
            if came[0] == RANK:
                missing = ", ".join(str(r) for r in range(WORLD_SIZE) if r not in came)
                stop(
                    f"missing after {seconds:g} s: rank {missing} of {WORLD_SIZE}. Were they"
                    f" started, with this MASTER_ADDR and WORLD_SIZE? Those here are {there}"
                )
        os._exit(1)


def find_facts() -> dict[str, Any]:
    """Return what this rank knows of its machine and of its GPU."""
    name_leads_to = "nowhere"
    with suppress(OSError):
        name_leads_to = socket.gethostbyname(HOST)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ADDRESS, PORT))  # sends nothing, but chooses the address to send from
        address = probe.getsockname()[0]
    shm = os.statvfs("/dev/shm")
    facts = {
        "host": HOST,
        "versions": f"torch {torch.__version__}",
        "address": address,
        "name_leads_to": name_leads_to,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "shm": shm.f_bavail * shm.f_frsize // 2**20,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpu": "no GPU",
    }
    if torch.cuda.is_available():
        index = LOCAL_RANK % torch.cuda.device_count()  # as train_ddp.py chooses it
        torch.cuda.set_device(index)
        properties = torch.cuda.get_device_properties(index)
        facts["versions"] += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        facts["gpu"] = f"GPU {index} of {HOST} ({properties.name}, {properties.uuid})"
        facts["free"], facts["memory"] = (n / 2**30 for n in torch.cuda.mem_get_info())
    return facts


def ranks_by(name: str, ranks: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Return which ranks have each value of a fact."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(facts[name], []).append(rank)
    return found


def examine(ranks: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the findings about the facts of all ranks. Each begins with its gravity."""
    versions, hosts, gpus = (ranks_by(name, ranks) for name in ("versions", "host", "gpu"))
    for version, users in versions.items():
        state, advice = ("error", ": install the same on all") if len(versions) > 1 else ("ok", "")
        yield f"{state}: ranks {users} have {version}{advice}"
    for host, users in hosts.items():
        facts = ranks[users[0]]
        gloo = facts["interface"] or facts["name_leads_to"]
        if len(hosts) > 1 and gloo.startswith(("127.", "nowhere")):
            yield (
                f"error: on {host} the name {host} leads to {gloo}, where gloo waits, and the other"
                f" machines do not find it: write {facts['address']} into its /etc/hosts, or set"
                " GLOO_SOCKET_IFNAME there to the interface with this address (ip addr)"
            )
        else:
            yield f"ok: ranks {users} are on {host}, where gloo uses {gloo}"
        if facts["shm"] < SHM_MIB:
            yield (
                f"warning: {facts['shm']} MiB free in /dev/shm of {host}, for loader workers and"
                " NCCL: docker run --shm-size 1g (Kubernetes: an emptyDir with medium: Memory)"
            )
        if facts["files"] < OPEN_FILES:
            yield f"warning: {host} allows {facts['files']} open files a process: ulimit -n 65536"
    for gpu, users in gpus.items():
        facts = ranks[users[0]]
        has_gpu = gpu != "no GPU"
        if has_gpu and facts["free"] < 0.8 * facts["memory"]:
            free = f"{facts['free']:.0f} of {facts['memory']:.0f} GiB free"
            yield f"warning: {free} on {gpu}: nvidia-smi shows which program uses it"
        is_wrong = len(users) > 1 if has_gpu else len(gpus) > 1
        state, advice = ("error", ": each rank needs its own") if is_wrong else ("ok", "")
        yield f"{state}: ranks {users} have {gpu}{advice}"


def measure(backend: str) -> str:
    """Return latency and bandwidth of an all-reduce, in words. Collective.

    Raises:
        RuntimeError: what PyTorch says, or the sum is wrong.
    """
    n, medians, device = WORLD_SIZE, [], "cpu" if backend == "gloo" else "cuda"
    group: Any = dist.new_group(backend=backend)
    large = 2**22 if backend == "gloo" else 2**26
    for size in (4, large):
        seconds = []
        for _ in range(6):
            values = torch.full([size // 4], RANK + 1.0, device=device)
            values[0].item()  # waits for the GPU
            start = time.perf_counter()
            dist.all_reduce(values, group=group)
            values[0].item()
            seconds.append(time.perf_counter() - start)
            if not (values == n * (n + 1) / 2).all():
                raise RuntimeError("the sum is wrong")
        medians.append(statistics.median(seconds[1:]))  # the first one connects
    rate = 2 * (n - 1) / n * large / medians[1] / 1e9  # what a ring sends over each link
    return f"{1e6 * medians[0]:,.0f} us for 4 bytes, {rate:,.2f} GB/s for {large // 2**20} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--timeout", type=float, default=30, help="seconds of each wait (30)")
    seconds = parser.parse_args().timeout
    if RANK >= WORLD_SIZE:
        stop(f"this is not below WORLD_SIZE={WORLD_SIZE}: the first rank is 0")
    store = connect(seconds)
    call_the_roll(store, seconds)
    store.set(f"facts {RANK}", json.dumps(find_facts()))
    status = 0
    with limit(3 * seconds, "a rank does not answer"):
        if RANK == 0:
            ranks = [json.loads(store.get(f"facts {r}")) for r in range(WORLD_SIZE)]
            findings = list(examine(ranks))
            print(*findings, sep="\n", flush=True)
            status = int(any(line.startswith("error") for line in findings))
            # torch 2.15 has two classes for NCCL.
            names = ["gloo", *(["nccl", "nccl-legacy"] if "free" in ranks[0] else [])]
            works = [name for name in names if dist.is_backend_available(name) and not status]
            store.set("backends", " ".join(works if WORLD_SIZE > 1 else []))
        backends = store.get("backends").decode().split()
    for backend in backends:
        try:
            with limit(2 * seconds, f"{backend} does not answer: does a firewall block its ports?"):
                if not dist.is_initialized():
                    time_out = timedelta(seconds=seconds)
                    dist.init_process_group("gloo", None, time_out, WORLD_SIZE, RANK, store)
                found = measure(backend)
        except RuntimeError as error:
            stop(f"{backend}: {' '.join(str(error).split())[:300]}")
        if RANK == 0:
            print(f"ok: {backend}: {found}", flush=True)
    if RANK == 0:
        time.sleep(1)  # it serves the store, which the others still read
    return status


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # gloo's threads may abort an ordinary end (pytorch/pytorch#179291)
