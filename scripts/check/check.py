"""Does a DDP script do it right? Run it on a few CPU processes, and compare what they did.

    python scripts/check/check.py their_train.py --their-flag 3
    python scripts/check/check.py --nodes 2 their_train.py       # one device on each of two hosts
    python scripts/check/check.py -m their.train                 # as for python -m

The script runs in a copy of its folder, for two short epochs, with pretended GPUs. Exit status: 0
nothing wrong, 1 something wrong, 2 usage, 3 not judged. docs/check.md says what is judged.
"""

import argparse
import contextlib
import itertools
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

import verdict

PROBE = Path(__file__).resolve().with_name("probe.py")
CODE = {".py", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt"}
SKIPPED = {".git", "__pycache__", "node_modules", ".venv", "venv", "env", "wandb", "runs"}
SMALL, ENTRIES = 2**20, 5000  # bytes of a file that is copied; entries that are looked at
MOST_RANKS = 8
# Variables of launchers, which a script must not find here.
LAUNCHERS = re.compile("RANK$|WORLD_SIZE$|LOCAL_|GROUP_|MASTER_|TORCHELASTIC|SLURM(?!_CPUS)|PMI")
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
# With INFO, DDP names the parameters that it missed.
SETTINGS |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_DISTRIBUTED_DEBUG": "INFO"}


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
        kept = {name: value for name, value in os.environ.items() if not LAUNCHERS.search(name)}
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
        module: str = "",
    ) -> verdict.Verdict:
        """Run a script, and judge it. Run it again if it starts its ranks itself, or wants others.

        It runs in ``folder``, or in the current one, for at most ``limit`` seconds.
        """
        began, script, folder = time.monotonic(), script.resolve(), (folder or Path.cwd()).resolve()
        home = _home(script, folder)
        folder = folder if folder.is_relative_to(home) else script.parent
        about: dict[str, Any] = {"nodes": nodes, "limit": limit, "arguments": arguments}
        about |= {"script": str(script.relative_to(home)), "folder": str(folder.relative_to(home))}
        with socket.create_server(("127.0.0.1", 0)) as free:
            about["port"] = free.getsockname()[1]
        about |= {"module": module, "polls": "while not os.path" in _text(script)}
        tried: list[tuple[int, str]] = []
        wanted = (ranks, "torchrun")
        while wanted not in tried and 2 <= wanted[0] <= MOST_RANKS and wanted[0] % nodes == 0:
            tried.append(wanted)
            run = Path(tempfile.mkdtemp(dir=self.home))
            root = Path(run, *home.parts[1:][-3:-1], home.name or "code")
            link_around(home, root)
            copy_code(home, root)
            about |= {"world": wanted[0], "mode": wanted[1], "root": str(root)}
            self.start(wanted[0])
            job = Job(self.connections[: wanted[0]], about)
            if not job.follow():
                self.stop()
            report = job.report(root)
            shutil.rmtree(run, ignore_errors=True)
            wanted = next((end["wants"] for end in job.ends.values() if "wants" in end), wanted)
        return verdict.judge(about | report | {"seconds": time.monotonic() - began})


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
                    told = connection.recv()
                except (EOFError, OSError):
                    told = {"kind": "over"}
                rank = left[connection]
                if told["kind"] == "over":
                    died = {"how": "error", "message": "the process died", "line": ""}
                    self.ends.setdefault(rank, died)
                    del left[connection]
                elif told["kind"] == "end":
                    self.ends[rank] = told
                elif told["kind"] == "call":
                    self.waiting[rank] = told
                else:
                    self.events.append(told)
            if not ready:
                self.ends |= {rank: {"how": "time"} for rank in left.values()}
                return False
            self._resolve()
        return True

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
        told = [f"rank {call['rank']} calls {call['what']} at {call['line']}" for call in calls]
        told += [f"rank {rank} has ended" for rank in sorted(self.ends)]
        self.events.append(calls[0] | {"kind": kind, "what": "; ".join(told)})
        self._answer(self.waiting, "stop")

    def report(self, root: Path) -> dict[str, Any]:
        """Return what the ranks told, and where they stood shortly before the end of their time."""
        stood = re.compile(rf'Timeout \(.*?File "{re.escape(str(root))}/([^"]+)", line (\d+)', re.S)
        for rank, end in self.ends.items():
            output = _text(root / f".out{rank}")
            end["output"] = (output.strip().splitlines() or [""])[-1][:200]
            if end["how"] == "time":
                place = stood.search(output)
                end["line"] = ":".join(place.groups()) if place else "outside of its own files"
        return {"events": self.events, "ends": self.ends}


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _home(script: Path, folder: Path) -> Path:
    """Return the folder to copy: the current one, or that of the script's repository."""
    if script.is_relative_to(folder) and folder not in (Path.home(), Path("/"), Path("/tmp")):
        return folder
    return next((p for p in script.parents if (p / ".git").exists()), script.parent)


def link_around(source: Path, target: Path) -> None:
    """Let ../data and ../../data lead from the copy to where they lead from the folder itself."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for real, own in list(zip(source.parents, target.parents, strict=False))[:2]:
        listed = os.scandir(real) if real.name and os.access(real, os.R_OK) else ()
        for entry in itertools.islice(listed, ENTRIES):
            if not (own / entry.name).exists() and entry.path != str(source):
                (own / entry.name).symlink_to(entry.path)


def copy_code(source: Path, target: Path) -> None:
    """Copy what this user may read and is code. Link large files, data, and folders of many."""
    left, folders = ENTRIES, [(source, target)]
    for old, new in folders:  # which grows meanwhile
        new.mkdir()
        wanted = (entry for entry in os.scandir(old) if entry.name not in SKIPPED)
        for entry in (entry for entry in wanted if os.access(entry.path, os.R_OK)):
            path, left = new / entry.name, left - 1
            if entry.is_dir(follow_symlinks=False) and left > 0:
                folders.append((Path(entry.path), path))
            elif path.suffix in CODE and entry.is_file() and entry.stat().st_size <= SMALL:
                shutil.copyfile(entry.path, path)
            elif entry.is_file() or entry.is_dir():
                path.symlink_to(os.path.realpath(entry.path))


def main() -> int:
    parser = argparse.ArgumentParser(description="Does a DDP script do it right?")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--nodes", type=int, default=1, help="hosts that the ranks stand for")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds (default: 120)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-m", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    args = parser.parse_args()
    script = Path(args.script.replace(".", "/") + ".py" if args.m else args.script)
    if not script.is_file():
        parser.error(f"there is no file {script}")
    if not 2 <= args.ranks <= MOST_RANKS or args.nodes < 1 or args.ranks % args.nodes:
        parser.error(f"--ranks is 2 to {MOST_RANKS}, and a multiple of --nodes")
    counts, module = (args.ranks, args.nodes, args.limit), args.script if args.m else ""
    with Ranks() as ranks:
        found = ranks.check(script, args.arguments, *counts, module=module)
    print(json.dumps(found, default=vars, indent=2) if args.json else found)
    return found.status


if __name__ == "__main__":
    sys.exit(main())
