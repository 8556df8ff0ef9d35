"""Does a DDP script do it right? Run it on a few CPU processes, and compare what they did.

    cd your_project
    python .../scripts/check/check.py train.py --its-flag 3
    python .../scripts/check/check.py --nodes 2 train.py       # one GPU on each of two hosts
    python .../scripts/check/check.py -m their.train            # as for python -m

Start it in the folder in which you start your script, and with the Python that has the script's
packages. It needs no GPU and changes nothing: the script runs in a copy of its project, for two
short epochs, with pretended GPUs. Exit status: 0 nothing wrong, 1 something wrong, 2 usage, 3 not
judged.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import project
import verdict

PROBE = Path(__file__).resolve().with_name("probe.py")
MOST_RANKS = 8
# Variables of launchers, which a script must not find here.
LAUNCHERS = re.compile(
    "RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|(GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)"
    "|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|SLURM(?!_CPUS).*|PMIX?_.*|OMPI_.*|MV2_COMM_.*"
)
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
# With INFO, DDP names the parameters that it missed.
SETTINGS |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
OTHERS = {"SLURM_PROCID": "slurm", "OMPI_COMM_WORLD_RANK": "mpi", "PMI_RANK": "mpi"}


class Ranks:
    """Processes with torch loaded, one for each rank. Each script runs in forks of them."""

    def __init__(self) -> None:
        self.processes: list[Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.home = os.path.realpath(tempfile.mkdtemp(prefix="check-"))

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def stop(self) -> None:
        """End all processes, and those that run a script."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes, self.connections = [], []

    def start(self, count: int) -> None:
        """Have at least as many processes as ranks. They differ in the order of sets of strings."""
        if any(process.poll() is not None for process in self.processes):
            self.stop()
        kept = {name: text for name, text in os.environ.items() if not LAUNCHERS.fullmatch(name)}
        new = range(len(self.processes), count)
        for rank in new:
            ours, theirs = Pipe()
            command = [sys.executable, str(PROBE), str(theirs.fileno())]
            # A session of its own, so that what it starts ends with it.
            how: dict[str, Any] = {"start_new_session": True, "pass_fds": [theirs.fileno()]}
            how["env"] = kept | SETTINGS | {"PYTHONHASHSEED": str(rank + 1)}
            self.processes.append(Popen(command, stdin=DEVNULL, stdout=DEVNULL, **how))
            self.connections.append(ours)
            theirs.close()
        for rank in new:
            # A rank that does not start has told why. To run the script then fails.
            if self.connections[rank].poll(180):
                with contextlib.suppress(EOFError, OSError):
                    self.connections[rank].recv()

    def check(
        self,
        script: Path,
        arguments: list[str],
        ranks: int = 2,
        nodes: int = 1,
        limit: float = 120.0,
        folder: Path | None = None,
        package: str | None = None,
        launcher: str = "torchrun",
    ) -> verdict.Verdict:
        """Run a script, and judge it. Run it again if it starts its ranks itself, or wants others.

        It runs in ``folder``, or in the current one, for at most ``limit`` seconds. ``package`` is
        that of a script which is run as a module.
        """
        began, script, folder = time.monotonic(), script.resolve(), (folder or Path.cwd()).resolve()
        home = project.home_of(script, folder)
        inner = folder.relative_to(home) if folder.is_relative_to(home) else folder
        request: dict[str, Any] = {"nodes": nodes, "limit": limit, "arguments": arguments}
        request |= {"script": str(script.relative_to(home)), "folder": str(inner)}
        request["package"] = package
        with socket.create_server(("127.0.0.1", 0)) as free:
            request["port"] = free.getsockname()[1]
        tried: list[tuple[int, str]] = []
        wanted = (ranks, launcher)
        while wanted not in tried and 2 <= wanted[0] <= MOST_RANKS and wanted[0] % nodes == 0:
            tried.append(wanted)
            run = Path(tempfile.mkdtemp(dir=self.home))
            root = Path(run, *home.parts[1:][-3:-1], home.name or "code")
            project.link_around(home, root)
            project.copy_code(home, root, script, folder)
            request |= {"world": wanted[0], "mode": wanted[1], "root": str(root)}
            self.start(wanted[0])
            job = Job(self.connections[: wanted[0]], request)
            if not job.follow():
                self.stop()
            report = job.report(root)
            shutil.rmtree(run, ignore_errors=True)
            wanted = job.wanted() or self._other_launcher(script, job, wanted)
        return verdict.judge(request | report | {"seconds": time.monotonic() - began})

    def _other_launcher(self, script: Path, job: "Job", tried: tuple[int, str]) -> tuple[int, str]:
        """Return the launcher whose variables the script names, if it made no process group."""
        text = "".join(map(project.text_of, sorted(script.parent.glob("*.py"))[:20]))
        is_alone = all(event["kind"] != "group" for event in job.events)
        others = [mode for name, mode in OTHERS.items() if name in text]
        return (tried[0], others[0]) if is_alone and others and tried[1] == "torchrun" else tried


class Job:
    """One run of a script: answer the ranks' collectives, and gather what they tell."""

    def __init__(self, connections: list[Connection], request: dict[str, Any]) -> None:
        self.connections, now = connections, time.monotonic()
        self.late, self.deadline = now + 0.6 * request["limit"], now + request["limit"]
        self.waiting: dict[int, dict[str, Any]] = {}  # the ranks' calls
        self.ends: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        for rank, connection in enumerate(connections):
            with contextlib.suppress(OSError):
                connection.send(request | {"rank": rank})

    def follow(self) -> bool:
        """Return whether all ranks ended by themselves."""
        left = {connection: rank for rank, connection in enumerate(self.connections)}
        while left:
            ready: list[Any] = wait(left, max(self.deadline - time.monotonic(), 0))
            for connection in ready:
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    message = {"kind": "over"}
                rank = left[connection]
                if message["kind"] == "over":
                    died = {"how": "error", "message": "the process died", "line": ""}
                    self.ends.setdefault(rank, died)
                    del left[connection]
                elif message["kind"] == "end":
                    self.ends[rank] = message
                elif message["kind"] == "call":
                    self.waiting[rank] = message
                else:
                    self.events.append(message)
            if not ready:
                self.ends |= {rank: {"how": "time"} for rank in left.values()}
                return False
            self._resolve()
        return True

    def wanted(self) -> tuple[int, str] | None:
        """Return the number of ranks and the launcher that a rank has asked for."""
        return next((end["wants"] for end in self.ends.values() if "wants" in end), None)

    def _answer(self, ranks: Any, answer: str) -> None:
        for rank in list(ranks):
            del self.waiting[rank]
            with contextlib.suppress(OSError):
                self.connections[rank].send(answer)

    def _resolve(self) -> None:
        """Let a collective begin for which all its ranks have come, or find why it never will."""
        for what, ranks in [(call["what"], call["ranks"]) for call in self.waiting.values()]:
            calls = [self.waiting[rank] for rank in ranks if rank in self.waiting]
            if len(calls) < len(ranks) or any(call["ranks"] != ranks for call in calls):
                continue
            if all(call["what"].startswith("init_process_group") for call in calls):
                if sorted(call["facts"]["rank"] for call in calls) != ranks:
                    return self._disagree("equal ranks")
            elif any(call["what"] != what for call in calls):
                return self._disagree("other collectives")
            self._answer(ranks, "cut" if time.monotonic() > self.late else "go")
        if self.waiting and len(self.waiting.keys() | self.ends.keys()) == len(self.connections):
            if all(end["how"] == "ended" for end in self.ends.values()):
                self._disagree("a rank stops alone" if self.ends else "other collectives")
            else:  # the others wait for a rank that failed, or that the check has ended itself
                self._answer(self.waiting, "stop")

    def _disagree(self, kind: str) -> None:
        calls = [call for _, call in sorted(self.waiting.items())]
        parts = [f"rank {call['rank']} calls {call['what']} at {call['line']}" for call in calls]
        parts += [f"rank {rank} has ended" for rank in sorted(self.ends)]
        self.events.append(calls[0] | {"kind": kind, "what": "; ".join(parts)})
        self._answer(self.waiting, "stop")

    def report(self, root: Path) -> dict[str, Any]:
        """Return what the ranks told, and where they stood shortly before the end of their time."""
        stood = re.compile(rf'Timeout \(.*?File "{re.escape(str(root))}/([^"]+)", line (\d+)', re.S)
        for rank, end in self.ends.items():
            output = project.text_of(root / f".out{rank}")
            end["output"] = (output.strip().splitlines() or [""])[-1][:200]
            if end["how"] == "time":
                place = stood.search(output)
                end["line"] = ":".join(place.groups()) if place else "outside of its own files"
        return {"events": self.events, "ends": self.ends}


def find_module(name: str) -> tuple[Path, str]:
    """Return the file of a module, as python -m finds it, and the package in which it lies."""
    path = Path(*name.split("."))
    if (path / "__main__.py").is_file():
        return path / "__main__.py", name
    return path.with_suffix(".py"), name.rpartition(".")[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print all that can be found, and end")
    add("--ranks", type=int, default=2, help="processes (default: 2)")
    add("--nodes", type=int, default=1, help="hosts that the processes stand for (default: 1)")
    modes = ["torchrun", "slurm", "mpi"]
    add("--launcher", choices=modes, default=modes[0], help="whose variables the script gets")
    add("--limit", type=float, default=120.0, help="seconds (default: 120)")
    add("--json", action="store_true", help="print one JSON object")
    add("-m", action="store_true", help="SCRIPT is a module, as for python -m")
    add("script", nargs="?")
    add("arguments", nargs=argparse.REMAINDER, help="the script's own; {node} is the host's number")
    args = parser.parse_args()
    if args.list:
        print(verdict.listed())
        return 0
    if not args.script:
        parser.error("give the script that you want to check")
    script, package = find_module(args.script) if args.m else (Path(args.script), None)
    if not script.is_file():
        parser.error(f"there is no file {script}")
    if not 2 <= args.ranks <= MOST_RANKS or args.nodes < 1 or args.ranks % args.nodes:
        parser.error(f"--ranks is 2 to {MOST_RANKS}, and a multiple of --nodes")
    if not importlib.util.find_spec("torch"):
        parser.error(f"{sys.executable} has no torch: use the Python of your script")
    counts = (args.ranks, args.nodes, args.limit)
    with Ranks() as ranks:
        how: dict[str, Any] = {"package": package, "launcher": args.launcher}
        found = ranks.check(script, args.arguments, *counts, **how)
    print(json.dumps(found, default=vars, indent=2) if args.json else found)
    return found.status


if __name__ == "__main__":
    sys.exit(main())
