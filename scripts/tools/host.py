"""What a host gives to a job, and what of it is amiss: limits, shared memory, GPUs, driver.

For doctor.py, which gathers these facts from all ranks.
"""

import os
import resource
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils import distributed

OK, WARNING, FAILURE = "ok", "warning", "failure"
OTHERS_MIB = 100  # of memory in use on a GPU that are worth a warning
SHM_MIB = 512  # a container has 64 unless it is given more
OPEN_FILES = 1024  # what most systems give
INFINIBAND = Path("/sys/class/infiniband")
Facts = list[dict[str, Any]]  # of all ranks, in their order


class Finding(NamedTuple):
    """A row of the doctor's table."""

    check: str
    state: str
    found: str
    fix: str = ""


def judge(check: str, problems: list[str], found: str, fix: str, state: str = WARNING) -> Finding:
    """Return a row: the problems, in that state, with their cure; or what was found."""
    text = "; ".join(sorted(set(problems)))
    return Finding(check, state, text, fix) if text else Finding(check, OK, found)


def facts_of_host() -> dict[str, Any]:
    """Return MiB free in /dev/shm, what ``ulimit`` allows, and whether there is InfiniBand.

    Locked memory is in KiB; None stands for any number.
    """
    facts: dict[str, Any] = {"shm": None}
    with suppress(OSError):  # not on every system
        status = os.statvfs("/dev/shm")
        facts["shm"] = status.f_bavail * status.f_frsize // 2**20
    for name, limit, unit in (
        ("open_files", resource.RLIMIT_NOFILE, 1),
        ("locked", resource.RLIMIT_MEMLOCK, 1024),
    ):
        soft = resource.getrlimit(limit)[0]
        facts[name] = None if soft == resource.RLIM_INFINITY else soft // unit
    return facts | {"infiniband": INFINIBAND.is_dir() and any(INFINIBAND.iterdir())}


def ask_driver(query: str) -> list[list[str]]:
    """Return the cells of a table of nvidia-smi's; no rows where there is none, or no answer."""
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL)
        return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    return []


def facts_of_driver() -> dict[str, Any]:
    """Return the driver's version, and MiB in use and programs by the UUID of each GPU.

    By UUID, as nvidia-smi and CUDA number GPUs in orders of their own. To be asked before this job
    takes memory itself.
    """
    facts: dict[str, Any] = {"driver": "", "in_use": {}, "users": {}}
    for uuid, used, driver in ask_driver("gpu=uuid,memory.used,driver_version"):
        facts["driver"] = driver
        facts["in_use"][uuid] = int(used) if used.isdecimal() else 0  # "[N/A]"
    for uuid, pid, *name in ask_driver("compute-apps=gpu_uuid,pid,process_name"):
        facts["users"].setdefault(uuid, []).append(f"pid {pid} {Path(','.join(name)).name}")
    return facts


def facts_of_device(
    device: torch.device, visible: list[torch.device], driver: dict[str, Any]
) -> dict[str, Any]:
    """Return what is known of this rank's device, and of its way to the others that it sees."""
    facts: dict[str, Any] = {"device": device.type, "driver": driver["driver"]}
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    uuid = f"GPU-{properties.uuid}"
    return facts | {
        "device": f"{device} {properties.name}",
        "uuid": uuid,
        "visible": distributed.find_gpus(visible),
        "used": driver["in_use"].get(uuid, 0),
        "users": driver["users"].get(uuid, []),
        "far": [
            str(other)
            for other in visible
            if other != device and not torch.cuda.can_device_access_peer(device, other)
        ],
    }


def check_limits(facts: Facts) -> list[Finding]:
    """Return the rows about what the hosts allow."""
    enough = max(OPEN_FILES, 4 * len(facts))  # rank 0 holds a connection to each rank, or several
    small = [
        f"{fact['shm']} MiB free on {fact['name']}"
        for fact in facts
        if fact["shm"] is not None and fact["shm"] < SHM_MIB
    ]
    few = [
        f"{fact['open_files']} for a process on {fact['name']}"
        for fact in facts
        if fact["open_files"] is not None and fact["open_files"] < enough
    ]
    bound = [
        f"{fact['locked']} KiB on {fact['name']}, which has InfiniBand"
        for fact in facts
        if fact["infiniband"] and fact["locked"] is not None
    ]
    shm, files = (
        ", ".join(sorted({str(fact[name] or "-") for fact in facts}))
        for name in ("shm", "open_files")
    )
    return [
        judge(
            *("/dev/shm", small, f"{shm} MiB free"),
            "--shm-size=1g for a container, in Kubernetes a volume emptyDir with medium: Memory",
        ),
        judge("open files", few, f"{files} for a process", "ulimit -n 65536"),
        judge("locked mem", bound, "enough", "ulimit -l unlimited, where the job is started"),
    ]


def check_gpus(facts: Facts, backend: str) -> list[Finding]:
    """Return the rows about devices, who else uses them, peer access and the driver."""
    uuids = [fact.get("uuid", str(rank)) for rank, fact in enumerate(facts)]
    shared = [
        f"rank {rank} shares {fact['device']}"
        for rank, fact in enumerate(facts)
        if uuids.count(uuids[rank]) > 1
    ]
    devices = {
        f"{fact['device']} ({fact['uuid'][:12]}, one of {len(fact['visible'])} visible)"
        if "uuid" in fact
        else fact["device"]
        for fact in facts
    }
    used = [
        f"{fact['used']} MiB of {fact['device']} on {fact['name']} in use by "
        + (", ".join(fact["users"]) or "other programs")
        for fact in facts
        if fact.get("used", 0) > OTHERS_MIB
    ]
    far = [
        f"none between {fact['device']} and {other} on {fact['name']}"
        for fact in facts
        for other in fact.get("far", ())
    ]
    drivers = {fact["driver"] for fact in facts}
    differ = [f"{fact['driver'] or 'none'} on {fact['name']}" for fact in facts]
    state = FAILURE if backend == "nccl" else WARNING
    return [
        judge("devices", shared, ", ".join(sorted(devices)), "one process for each GPU", state),
        judge("GPU memory", used, "free", "see nvidia-smi, or choose others with --devices"),
        judge(
            *("peer access", far, "between all GPUs that a rank sees"),
            "it is slower without; if the first collective hangs: NCCL_P2P_DISABLE=1",
        ),
        judge(
            *("driver", differ if len(drivers) > 1 else [], ", ".join(drivers) or "none"),
            "install the same on every host",
        ),
    ]
