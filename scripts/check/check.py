"""Does a DDP script do it right? Run it in a few CPU processes, and compare what they did.

    cd your_project
    python .../scripts/check train.py --its-flag 3
    python .../scripts/check --nodes 2 train.py       # one GPU on each of two hosts
    python .../scripts/check -m their.train           # as for python -m

Start it in the folder in which you start your script, and with the Python that has the script's
packages. It needs no GPU and changes nothing: the script runs in a copy of its project, for two
short epochs, with pretended GPUs. Exit status: 0 nothing wrong, 1 something wrong (a WRONG, and
with --strict a WARN), 2 usage, 3 not judged.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path
from subprocess import STDOUT, Popen
from typing import Any

import project
import reading
import verdict

RANK = Path(__file__).resolve().with_name("rank.py")
MOST_RANKS = 8
GRACE = 10  # seconds in which the other ranks may end after one that failed
UNUSED = "Expected to have finished reduction"  # DDP's error for parameters without gradients
# Samples of each rank in an epoch: in the first run, in one with the script's own numbers, and in
# one with whole data sets, which some evaluations need.
SAMPLES = (16, 64, 10**9)
# Variables of launchers, which a script must not find here, and those that ask for another one.
LAUNCHERS = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|(GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)"
    "|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|SLURM(?!_CPUS|_NODEID).*|PMIX?_.*|OMPI_.*|MV2_COMM_.*"
)
OTHERS = re.compile("SLURM_(PROCID|JOB_?ID)|OMPI_COMM_WORLD_RANK|PMI_RANK")
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
# With INFO, DDP names the parameters that it missed.
SETTINGS |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
SETTINGS |= {"HYDRA_FULL_ERROR": "1"}  # else Hydra catches what a script raises
TALKING = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")  # to other ranks


def check(script: Path, package: str | None, args: argparse.Namespace) -> verdict.Verdict:
    """Run a script, and judge it. Run it again if it starts its ranks itself, or wants others.

    It runs in the current folder. ``package`` is the package of a script that is run as a module.
    A run that fails with smaller numbers is made again with the script's own.
    """
    began, script, folder = time.monotonic(), script.resolve(), Path.cwd()
    home = project.home_of(script, folder)
    inner = folder.relative_to(home) if folder.is_relative_to(home) else folder
    fixed = {"nodes": args.nodes, "limit": args.limit, "arguments": args.arguments}
    fixed |= {"script": str(script.relative_to(home)), "folder": str(inner), "package": package}
    fixed |= {"home": str(home), "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
    text = "".join(map(project.text_of, sorted(script.parent.glob("*.py"))[:20]))
    report: dict[str, Any] = {}
    earlier: list[Any] = []  # a run that found parameters without gradients, and had to end
    tried: list[Any] = []
    wanted: dict[str, Any] = {"world": args.ranks, "mode": "torchrun", "size": 0}
    wanted["finds_unused"] = False
    allowed = range(args.nodes, MOST_RANKS + 1, args.nodes)
    while wanted not in tried and wanted["world"] in allowed and wanted["world"] > 1:
        tried.append(wanted)
        is_small = not wanted["size"]
        with tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True) as place:
            place = os.path.realpath(place)
            root = Path(place, *home.parts[1:][-4:-1], home.name or "code")
            project.bound(wanted["world"], is_small)
            project.copy(home, root, [script, folder])
            request = fixed | wanted | {"root": str(root), "place": place}
            request |= {"is_small": is_small, "samples": SAMPLES[wanted["size"]]}
            told = request | run(request) | {"strict": args.strict, "earlier": earlier}
        kinds = {event["kind"] for event in told["events"]}
        hows = {end["how"] for end in told["ends"].values()}
        has_changes = any(end.get("changed") for end in told["ends"].values())
        if not is_small and "time" in hows and "step" not in kinds:
            break  # the numbers are not the reason
        report = told | {"failed": "" if is_small else report["failed"] or verdict.failed(report)}
        has_failed = hows & {"error", "waited"}
        is_elsewhere = OTHERS.search(text) and wanted["mode"] == "torchrun"
        if is_elsewhere and ("group" not in kinds or "error" in hows):
            wanted = wanted | {"mode": "all"}
        elif any(UNUSED in end.get("message", "") for end in told["ends"].values()):
            earlier = [told]
            wanted = wanted | {"finds_unused": True}
        elif has_failed and is_small and ("group" in kinds or has_changes):
            wanted = wanted | {"size": 1}
        elif "error" in hows and has_changes:
            wanted = wanted | {"size": 2}
        for end in report["ends"].values():
            if "wants" in end:
                wanted = wanted | {"size": 0} | end["wants"]
    return verdict.judge(report | {"seconds": time.monotonic() - began})


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the script once, in a process for each rank, and return what the ranks told."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        request = request | {"port": free.getsockname()[1]}
    request["until"] = time.time() + request["limit"]
    kept = dict(os.environ)
    if request["mode"] != "spawn":  # else the user may set variables of MPI for the script
        kept = {name: text for name, text in kept.items() if not LAUNCHERS.fullmatch(name)}
    processes = []
    root = Path(request["root"])
    # Scripts ask a terminal for its size. Whoever reads from it finds its end.
    keyboard, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    os.write(keyboard, b"\x04" * 64)
    for rank in range(request["world"]):
        command = [sys.executable, str(RANK), json.dumps(request | {"rank": rank})]
        # Ranks differ in the order of sets of strings. Sessions, so that what they start ends, too.
        setting = kept | SETTINGS | {"PYTHONHASHSEED": str(rank + 1)}
        with open(root / f".out{rank}", "w") as output:
            outputs: dict[str, Any] = {"stdout": output, "stderr": STDOUT, "stdin": terminal}
            processes.append(Popen(command, env=setting, start_new_session=True, **outputs))
    try:
        _wait(processes, request["until"] + GRACE)
        late = "stopped" if any(process.poll() for process in processes) else "time"
        hows = [late if process.poll() is None else "error" for process in processes]
    finally:  # also after Ctrl-C
        os.close(terminal)
        os.close(keyboard)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    events: list[Any] = []
    ends: dict[int, Any] = {}
    for rank, process in enumerate(processes):
        lines = project.text_of(root / f".told{rank}").splitlines()
        told = [json.loads(line) for line in lines if line.endswith("}")]
        printed = project.text_of(root / f".out{rank}").strip().splitlines() or [""]
        end = {"how": hows[rank], "message": "the process died", "line": ""}
        if process.returncode == -signal.SIGABRT:
            end["line"], talks = _aborted(root, rank)
            end["how"] = "waited" if talks else "error"
        ends[rank] = told.pop() if told and told[-1]["kind"] == "end" else end
        ends[rank]["output"] = printed[-1][:200]
        events += told
    names = dict.fromkeys(event["path"] for event in events if event["kind"] == "code")
    events += reading.read(root, list(names))
    if any(end["how"] == "time" for end in ends.values()):  # the others have waited for these
        for end in ends.values():
            end["how"] = "time" if end["how"] == "waited" else end["how"]
    return {"events": events, "ends": ends}


def _wait(processes: list[Popen[bytes]], until: float) -> None:
    while any(process.poll() is None for process in processes) and time.time() < until:
        time.sleep(0.1)
        # A rank that fails, or that asks for another start, leaves with 1. The others may wait.
        if any(process.poll() for process in processes):
            until = min(until, time.time() + GRACE)


def _aborted(root: Path, rank: int) -> tuple[str, bool]:
    """Return the line at which a rank aborted, and whether it waited for other ranks there."""
    stack = re.findall(r'File "(.*)", line (\d+) in', project.text_of(root / f".stack{rank}"))
    for at, (file, line) in enumerate(stack):  # the innermost call first
        if file.startswith(str(root)):
            talks = any(part in inner for inner, _ in stack[:at] for part in TALKING)
            return f"{os.path.relpath(file, root)}:{line}", talks
    return "", False


def main() -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may end the printing
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="number of processes (default: 2)")
    add("--nodes", type=int, default=1, help="number of hosts that they play (default: 1)")
    add("--limit", type=float, default=120.0, help="seconds (default: 120)")
    add("--json", action="store_true", help="print one JSON object")
    add("--strict", action="store_true", help="exit status 1 for a WARN, too")
    add("-m", action="store_true", help="SCRIPT is a module, as for python -m")
    add("script", nargs="?")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own; {node} is the host's number")
    args = parser.parse_args()
    if not args.script:
        parser.error("give the script that you want to check")
    script, package = Path(args.script), None
    if args.m:
        script = Path(*args.script.split(".")).with_suffix(".py")
        package = args.script.rpartition(".")[0]
        if (script.with_suffix("") / "__main__.py").is_file():
            script, package = script.with_suffix("") / "__main__.py", args.script
    if not script.is_file():
        parser.error(f"there is no file {script}")
    if not 2 <= args.ranks <= MOST_RANKS or args.nodes < 1 or args.ranks % args.nodes:
        parser.error(f"--ranks is 2 to {MOST_RANKS}, and a multiple of --nodes")
    if not importlib.util.find_spec("torch"):
        parser.error(f"{sys.executable} has no torch: use the Python of your script")
    found = check(script, package, args)
    print(json.dumps(found, default=vars, indent=2) if args.json else found)
    return found.status


if __name__ == "__main__":
    sys.exit(main())
