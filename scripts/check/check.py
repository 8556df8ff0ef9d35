"""Does a DDP script do it right? Run it on a few CPU processes, and compare what they did.

    python scripts/check/check.py their_train.py --their-flag 3
    python scripts/check/check.py --nodes 2 their_train.py       # one device on each of two hosts

The script runs in a copy of its folder, for two short epochs, with pretended GPUs. Exit status: 0
nothing wrong, 1 something wrong, 2 usage, 3 not judged. docs/check.md says what is judged.
"""

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import verdict

HERE = Path(__file__).resolve().parent
CODE = {".py", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt"}
SKIPPED = {".git", "__pycache__", "node_modules", ".venv", "venv", "env", "wandb", "runs"}
SMALL, ENTRIES = 2**20, 5000  # bytes of a file that is copied; entries that are looked at
MOST_RANKS = 8
LAUNCHERS = re.compile(  # variables of launchers, which a script must not find here
    "RANK$|WORLD_SIZE$|LOCAL_|GROUP_|NODE_RANK|MASTER_|TORCHELASTIC|CUDA_VIS|SLURM|OMPI|PMI"
)
PR_SET_PDEATHSIG = 1


class Ranks:
    """Processes with torch loaded, one for each rank. Each script runs in forks of them."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: dict[int, Connection] = {}
        # A short path: that of a socket is limited.
        self.home = os.path.realpath(tempfile.mkdtemp(prefix="check-", dir="/tmp"))
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(f"{self.home}/s")
        self.server.listen(2 * MOST_RANKS)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.server.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def accept(self, seconds: float) -> tuple[int, int, Connection]:
        self.server.settimeout(seconds)
        channel, _ = self.server.accept()
        channel.setblocking(True)
        connection = Connection(channel.detach())
        return *connection.recv(), connection

    def start(self, count: int) -> None:
        """Have at least as many processes as ranks. They differ in the order of sets of strings."""
        kept = {k: v for k, v in os.environ.items() if not LAUNCHERS.search(k)}
        kept |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "MPLBACKEND": "Agg"}
        new = range(len(self.processes), count)
        for rank in new:
            command = [sys.executable, str(HERE / "probe.py"), f"{self.home}/s", str(rank)]
            environment = kept | {"PYTHONHASHSEED": str(rank + 1), "CUDA_VISIBLE_DEVICES": ""}
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            process = subprocess.Popen(command, env=environment, preexec_fn=_mortal, **quiet)  # type: ignore[call-overload]
            self.processes.append(process)
        for _ in new:
            rank, _, connection = self.accept(180)
            self.connections[rank] = connection

    def check(
        self, script: Path, arguments: list[str], ranks: int = 2, nodes: int = 1, **options: Any
    ) -> "verdict.Verdict":
        """Run a script, once more with as many ranks as it wants if that differs, and judge it.

        Args:
            options: limit, in seconds; launch, "torchrun" or "spawn"; folder, the current one;
                module, the script's name as a module.
        """
        began, script = time.monotonic(), script.resolve()
        text = script.read_text(errors="replace")
        own = re.search(r"\b(spawn|start_processes|Process)\s*\(", text)
        mode = options.pop("launch", None) or ("spawn" if own else "torchrun")
        tried: set[tuple[int, str]] = set()
        while True:
            tried.add((ranks, mode))
            report = self._run(script, arguments, ranks, nodes, mode, **options)
            ends = report["ends"].values()
            wanted = next((end["wanted"] for end in ends if "wanted" in end), ranks)
            started = report["conflict"] or any(e["kind"] == "group" for e in report["events"])
            if 2 <= wanted <= MOST_RANKS and wanted % nodes == 0 and (wanted, mode) not in tried:
                ranks = wanted
            elif (
                mode == "spawn"
                and wanted == ranks
                and not started
                and (ranks, "torchrun") not in tried
            ):
                mode = "torchrun"  # a script that can start its ranks itself, but did not
            else:
                report |= {
                    "seconds": time.monotonic() - began,
                    "polls": "while not os.path" in text,
                }
                return verdict.judge(report)

    def _run(
        self,
        script: Path,
        arguments: list[str],
        count: int,
        nodes: int,
        mode: str,
        limit: float = 120.0,
        folder: Path | None = None,
        module: str = "",
    ) -> dict[str, Any]:
        self.start(count)
        root = f"{tempfile.mkdtemp(prefix='run', dir=self.home)}/code"
        where = (folder or Path.cwd()).resolve()
        base = _base(script, where)
        copy_code(base, Path(root))
        place = Path(root, script.relative_to(base))
        where = Path(root, where.relative_to(base)) if _is_in(where, base) else place.parent
        each, port = count // nodes, _free_port()
        request: dict[str, Any]
        request = {"root": root, "world": count, "nodes": nodes, "mode": mode, "folder": str(where)}
        request |= {"script": str(place), "arguments": arguments, "unset": ["CUDA_VISIBLE_DEVICES"]}
        request["module"] = module
        for rank in range(count):
            given: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank % each}
            given |= {"LOCAL_WORLD_SIZE": each, "GROUP_RANK": rank // each, "MASTER_PORT": port}
            given |= {"NODE_RANK": rank // each, "MASTER_ADDR": "127.0.0.1"}
            given |= {"TORCHELASTIC_RUN_ID": "check", "TORCHELASTIC_RESTART_COUNT": 0}
            given = {"TMPDIR": root} | (given if mode == "torchrun" else {})
            environment = {name: str(value) for name, value in given.items()}
            self.connections[rank].send(request | {"rank": rank, "environment": environment})
        job = Job(self, count, limit, root)
        try:
            job.follow()
            report = job.report()
        finally:
            job.close()
            shutil.rmtree(os.path.dirname(root), ignore_errors=True)
        return {**report, "script": script.name, "ranks": count, "nodes": nodes, "mode": mode}


class Job:
    """One run of a script: answer the ranks' collectives, and gather what they tell."""

    def __init__(self, ranks: Ranks, count: int, limit: float, root: str) -> None:
        self.ranks, self.count, self.root, self.limit = ranks, count, root, limit
        self.deadline = time.monotonic() + limit
        self.connections: dict[Connection, int] = {}
        self.children: dict[int, int] = {}
        self.waiting: dict[int, tuple[str, tuple[int, ...], dict[str, Any], str]] = {}
        self.ends: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.conflict: dict[str, Any] | None = None
        self.stands: dict[int, str] = {}

    def follow(self) -> None:
        while len(self.ends) < self.count:
            left = self.deadline - time.monotonic()
            if left <= 0:
                return self._look()
            for item in wait([*self.connections, self.ranks.server], left):
                if item is self.ranks.server:
                    rank, self.children[rank], connection = self.ranks.accept(10)
                    self.connections[connection] = rank
                else:
                    self._read(item)  # type: ignore[arg-type]
            self._resolve()

    def _read(self, connection: Connection) -> None:
        rank = self.connections[connection]
        try:
            kind, *what = connection.recv()
        except (EOFError, OSError):
            del self.connections[connection]
            self.ends.setdefault(rank, {"how": "died", "rank": rank, "line": ""})
            return
        if kind == "call":
            self.waiting[rank] = tuple(what)  # type: ignore[assignment]
        elif what[0]["kind"] == "end":
            self.ends[rank] = what[0]
        else:
            self.events.append(what[0])

    def _answer(self, ranks: Any, answer: str) -> None:
        for connection, rank in self.connections.items():
            if rank in ranks and rank in self.waiting:
                del self.waiting[rank]
                with contextlib.suppress(OSError):
                    connection.send(answer)

    def _resolve(self) -> None:
        """Let a collective begin for which all its ranks have come, or find why it never will."""
        for rank, (name, members, signature, _) in list(self.waiting.items()):
            calls = [self.waiting[member] for member in members if member in self.waiting]
            complete = len(calls) == len(members) and all(call[1] == members for call in calls)
            if rank not in self.waiting or not complete:
                continue
            if name == "init_process_group" and all(call[0] == name for call in calls):
                if sorted(call[2]["given"] for call in calls) != list(range(self.count)):
                    return self._disagree("ranks")
            elif any(call[0] != name or call[2] != signature for call in calls):
                return self._disagree("calls")
            late = time.monotonic() > self.deadline - 0.4 * self.limit
            self._answer(members, "cut" if late else "go")
        if self.waiting and len(self.waiting.keys() | self.ends.keys()) == self.count:
            if all(end["how"] == "ended" for end in self.ends.values()):
                self._disagree("alone" if self.ends else "calls")
            else:  # the others wait for a rank that failed, or that the check has ended itself
                self._answer(list(self.waiting), "stop")

    def _disagree(self, kind: str) -> None:
        self.conflict = {"kind": kind, "calls": dict(self.waiting), "ended": list(self.ends)}
        self._answer(list(self.waiting), "stop")

    def _look(self) -> None:
        """Ask each rank that is left where it stands."""
        for rank, pid in self.children.items():
            if rank not in self.ends:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR2)
                time.sleep(0.3)
                text = _text(f"{self.root}/.stack{rank}")
                own = re.findall(rf'File "{re.escape(self.root)}/([^"]+)", line (\d+)', text)
                self.stands[rank] = ":".join(own[0]) if own else "outside of its own files"
        for rank in range(self.count):
            self.ends.setdefault(rank, {"how": "time", "rank": rank, "line": ""})

    def report(self) -> dict[str, Any]:
        outputs = [_text(f"{self.root}/.out{rank}")[-3000:] for rank in range(self.count)]
        found = {"events": self.events, "ends": self.ends, "conflict": self.conflict}
        return {**found, "outputs": outputs, "stands": self.stands, "limit": self.limit}

    def close(self) -> None:
        living = [r for r in self.children if self.ends.get(r, {"how": "time"})["how"] == "time"]
        for pid in (self.children[rank] for rank in living):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for connection in self.connections:
            connection.close()


def _mortal() -> None:
    """Let the kernel end a process with the one that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _text(path: str) -> str:
    return Path(path).read_text(errors="replace") if Path(path).exists() else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_in(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def _base(script: Path, folder: Path) -> Path:
    """Return the folder to copy: the current one, or that of the script's repository."""
    if _is_in(script, folder) and folder not in (Path.home(), Path("/"), Path("/tmp")):
        return folder
    return next((p for p in script.parents if (p / ".git").exists()), script.parent)


def copy_code(source: Path, target: Path) -> None:
    """Copy what may be read as code. Link large files, data, and folders of many files."""
    target.mkdir()
    left, folders = ENTRIES, [(source, target)]
    while folders:
        old, new = folders.pop(0)
        for entry in os.scandir(old):
            path, left = Path(new, entry.name), left - 1
            if entry.name in SKIPPED:
                continue
            if entry.is_dir() and left > 0 and not entry.is_symlink():
                path.mkdir()
                folders.append((Path(entry.path), path))
            elif path.suffix in CODE and entry.is_file() and entry.stat().st_size <= SMALL:
                shutil.copyfile(entry.path, path)
            elif entry.is_file() or entry.is_dir():
                path.symlink_to(os.path.realpath(entry.path))


def main() -> int:
    parser = argparse.ArgumentParser(description="Does a DDP script do it right?")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--nodes", type=int, default=1, help="hosts that the ranks stand for")
    parser.add_argument("--launch", choices=["torchrun", "spawn"], help="if it is not recognised")
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
    options = {"launch": args.launch, "limit": args.limit, "module": args.script * args.m}
    with Ranks() as ranks:
        try:
            found = ranks.check(script, args.arguments, args.ranks, args.nodes, **options)
        except (TimeoutError, EOFError):
            print("could not run your script: the check's own ranks did not start: see above")
            return 3
    print(json.dumps(found.as_dict(), indent=2) if args.json else found)
    return found.status


if __name__ == "__main__":
    sys.exit(main())
