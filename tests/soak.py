"""Kill ranks and loader workers at random moments, resume, and compare with an undisturbed run.

    python tests/soak.py --rounds 100 --forked
    python tests/soak.py --rounds 10 --restarts 1     torchrun --standalone --max_restarts
    python tests/soak.py --rounds 10 --restarts 2     two static nodes
    python tests/soak.py --elastic                    a node joins, is killed, joins again

Not part of the test run. Each run is killed (-9) some times on the way, goes on, and has to end in
the weights, the metrics and the summary of a run that nobody touched. Half of the kills come
anywhere, half in the second after the last save, while the evaluation is still owed.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests import processes, short
from tests.processes import finish, free_port, run, script, start, summary
from tests.test_scripts import command, final_state
from tests.test_stop import marked, ranks, status

LAYOUTS = [("single", 1), ("ddp", 3), ("dp", 2), ("ddp", 5), ("ddp", 2)]
MAX_STEPS, SAVE_EVERY = 32, 4  # the last step is one that is saved
HARD: list[Any] = ["--max-steps", MAX_STEPS, "--save-every-steps", SAVE_EVERY, "--seed", 5]
HARD += ["--batch-size", 16, "--grad-accum-steps", 2, "--num-workers", 1, "--no-tensorboard"]
HARD += ["--keep", MAX_STEPS]  # what was saved can be seen by the names
KILLS_OF_A_RUN = 3
TEST_IMAGES = 2000
END_SECONDS = 90  # for a run, one of whose processes was killed, to end: five ranks on two cores
# In summary.json, what differs between two runs that trained the same.
MEASURED = {"startup_seconds", "train_seconds", "total_seconds", "train_images_per_second"}
MEASURED |= {"peak_memory_bytes", "resumed_from"}


def arguments(
    technique: str, processes: int, folder: Path, data_dir: Path, *more: Any
) -> list[Any]:
    # Dropout and several buckets; with dropout DataParallel does not repeat itself.
    model = ["--model", "convnet" if technique == "dp" else "basic"]
    buckets = ["--bucket-cap-mb", 0.25] if technique == "ddp" else []
    where = ["--dataset", "synthetic", "--data-dir", data_dir, "--run-dir", folder]
    return command(technique, processes, *where, *HARD, *model, *buckets, *more)


def loader_workers() -> list[int]:
    """Return the pids of the children of ranks."""
    parents = set(ranks().values())
    found = []
    for pid in marked():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        # The second field after the command's closing bracket, see proc(5).
        if int(stat.rpartition(")")[2].split()[1]) in parents:
            found.append(pid)
    return found


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def whole_state(folder: Path) -> dict[str, Any]:
    """Return what a complete run left behind, without what was measured.

    Raises:
        ValueError: NaN, or anything else that is not JSON.
    """
    texts = (
        (folder / "summary.json").read_text(),
        *(folder / "metrics.jsonl").read_text().split("\n"),
    )
    for text in filter(None, texts):
        json.loads(text, parse_constant=refuse_constant)
    weights, rows = final_state(folder)
    facts = {key: value for key, value in summary(folder).items() if key not in MEASURED}
    told = {key: status(folder)[key] for key in ("state", "epoch", "global_step")}
    return {"weights": weights, "metrics": rows, "summary": facts, "status": told}


def find_difference(folder: Path, expected: dict[str, Any]) -> str:
    """Return in what a run differs from the undisturbed one, or nothing."""
    try:
        state = whole_state(folder)
    except (OSError, ValueError) as error:
        return f"NOT COMPLETE: {error}"
    for name, value in expected.items():
        if state[name] != value:
            return f"OTHER {name}: {state[name]}, undisturbed {value}"
    return ""


def wait_for_moment(folder: Path, at_end: bool, seconds: float, process: Any) -> None:
    """Wait until a random moment of the run, or one in the second after its last save."""
    before_last = folder / "checkpoints" / f"step-{MAX_STEPS - SAVE_EVERY:08d}.pt"
    if not at_end or before_last.exists():  # already there: anywhere in the evaluation
        time.sleep(seconds)
        return
    deadline = time.monotonic() + 300
    # It gets this name when the checkpoint of the last step takes its place.
    while not before_last.exists() and process.poll() is None:
        assert time.monotonic() < deadline, "stands still"
        time.sleep(0.005)


def kill_one(choose: random.Random, want_worker: bool) -> str:
    """Kill a rank or a loader worker; return which, or nothing where none is there."""
    workers = loader_workers() if want_worker else []
    victims = workers or list(ranks().values())
    if not victims:
        return ""
    try:
        os.kill(choose.choice(victims), signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return "worker" if workers else "rank"


def soak_kills(rounds: int, seed: int, folder: Path) -> bool:
    """Kill ranks and loader workers at random moments and resume by hand."""
    choose = random.Random(seed)
    calm: dict[tuple[str, int], tuple[dict[str, Any], float]] = {}
    count: Counter[str] = Counter()
    while count["kill"] < rounds:
        layout = LAYOUTS[count["run"] % len(LAYOUTS)]
        if layout not in calm:
            begin = time.monotonic()
            result = run(*arguments(*layout, folder / "calm", folder / "data"), timeout=300)
            assert result.returncode == 0, result.text
            calm[layout] = whole_state(folder / "calm"), time.monotonic() - begin
            shutil.rmtree(folder / "calm")
        expected, seconds = calm[layout]
        hits: list[str] = []
        problem = ""
        begin = time.monotonic()
        while not problem:
            process = start(*arguments(*layout, folder / "run", folder / "data", "--resume"))
            if len(hits) < KILLS_OF_A_RUN and count["kill"] < rounds:
                at_end, want_worker = choose.random() < 0.5, choose.random() < 0.5
                moment = choose.uniform(0.3, 0.9) * seconds
                wait_for_moment(folder / "run", at_end, moment, process)
                if at_end:
                    time.sleep(choose.uniform(0, 1))
                victim = kill_one(choose, want_worker) if process.poll() is None else ""
                if victim:
                    hits.append(f"{victim}{' at the end' if at_end else ''}")
                    count.update(["kill", victim, *(["end"] if at_end else [])])
            try:
                result = finish(process, timeout=max(END_SECONDS, 3 * seconds))
            except AssertionError as error:  # and what was still running is gone
                problem = f"HANGS: {str(error).strip().splitlines()[-1]}"
                break
            if result.returncode == 0:
                break
            # torchrun itself ends every failure in a traceback.
            if layout[0] != "ddp" and "Traceback" in result.stderr:
                problem = f"TRACEBACK: {result.stderr.strip().splitlines()[-1]}"
            if time.monotonic() - begin > 20 * END_SECONDS:
                problem = f"DOES NOT END: {result.stderr[-300:]}"
        problem = problem or find_difference(folder / "run", expected)
        count.update(["run", "bad" if problem else "same"])
        print(
            f"{layout[0]} on {layout[1]}: killed {', '.join(hits) or 'nothing'}:"
            f" {problem or 'same'}; {count['kill']} kills in all",
            flush=True,
        )
        shutil.rmtree(folder / "run")
    print(
        f"{count['kill']} kills, {count['rank']} of ranks and {count['worker']} of loader workers,"
        f" {count['end']} of them after the last save; {count['same']} of {count['run']} runs ended"
        " as if undisturbed"
    )
    return count["same"] == count["run"]


def soak_restarts(rounds: int, nodes: int, seed: int, folder: Path) -> bool:
    """Kill ranks of one torchrun job, which has to go on by itself after each."""
    choose = random.Random(seed)
    port, own = free_port(), folder / f"restarts-{nodes}"
    steps = ["--model", "mlp", "--max-steps", 100 * rounds, "--save-every-steps", 10, "--seed", 5]
    where = ["--dataset", "synthetic", "--data-dir", folder / "data", "--no-tensorboard"]

    def begin(run_dir: Path, restarts: int) -> list[subprocess.Popen[str]]:
        rendezvous = ["--standalone", "--nproc_per_node", 2]
        if nodes == 2:
            rendezvous = ["--nnodes", 2, "--master_addr", "127.0.0.1", "--master_port", port]
        common = script("train_ddp.py", *where, *steps, "--run-dir", run_dir)[1:]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--max_restarts", restarts]
        numbers = [["--node_rank", node] for node in range(nodes)] if nodes > 1 else [[]]
        return [
            start(*launcher, *rendezvous, *number, *common, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            for number in numbers
        ]

    def attempt() -> int:
        found = [variables for line, variables in marked().values() if "train_ddp" in line]
        return max((int(v.get("TORCHELASTIC_RESTART_COUNT", 0)) for v in found), default=0)

    def saved() -> float:
        path = own / "checkpoints" / "last.pt"
        return path.stat().st_mtime if path.exists() else 0.0

    for process in begin(folder / "calm", 0):
        result = finish(process, timeout=300)
        assert result.returncode == 0, result.text
    jobs, at_first, killed = begin(own, rounds), 0, 0.0
    try:
        for number in range(rounds):
            # A checkpoint of this attempt, so that each restart has something of its own to keep.
            before, deadline = time.time(), time.monotonic() + 120
            while saved() <= before:
                assert time.monotonic() < deadline, f"stands still after kill {number}"
                time.sleep(0.02)
            if number:
                at_first += attempt() == number
                seconds = time.monotonic() - killed
                print(f"kill {number}: attempt {attempt()} saves again after {seconds:.1f} s")
            time.sleep(choose.uniform(0, 0.3))
            os.kill(choose.choice(list(ranks().values())), signal.SIGKILL)
            killed = time.monotonic()
        wait = time.monotonic() + 120
        while attempt() < rounds and time.monotonic() < wait:
            time.sleep(0.05)
        at_first += attempt() == rounds
    finally:
        ended = [finish(job, timeout=300) for job in jobs]
    equal = final_state(own) == final_state(folder / "calm")
    print(
        f"{nodes} node{'s' if nodes > 1 else ''}: {at_first} of {rounds} restarts went on at the"
        f" first attempt, exit {[e.returncode for e in ended]}, {'same' if equal else 'DIFFERENT'}"
    )
    return at_first == rounds and equal


def soak_elastic(folder: Path) -> bool:
    """One node; a second joins, is killed, and joins again."""
    run_dir, port = folder / "elastic", free_port()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--max_restarts"]
    launcher += [9, "--nproc_per_node", 1, "--rdzv_backend", "c10d", "--rdzv_id", "soak"]
    launcher += ["--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv-conf"]
    launcher += ["join_timeout=120,last_call_timeout=3"]
    flags = ["--dataset", "synthetic", "--data-dir", folder / "data", "--model", "linear"]
    flags += ["--run-dir", run_dir, "--no-tensorboard", "--epochs", 100, "--save-every-steps", 50]
    logs = [folder / "node0", folder / "node1"]

    def begin(node: int) -> subprocess.Popen[str]:
        command = shlex.join(map(str, [*launcher, *script("train_ddp.py", *flags)[1:]]))
        return start(
            "bash", "-c", f"exec {command} >> {logs[node]} 2>&1",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )  # fmt: skip

    def wait_for_world(size: int, what: str) -> None:
        began, seen = time.monotonic(), metrics_time()
        while True:
            ours = [v for line, v in marked().values() if "train_ddp" in line and "RANK" in v]
            worlds = {variables["WORLD_SIZE"] for variables in ours}
            if worlds == {str(size)} and metrics_time() > seen:
                break
            assert time.monotonic() - began < 120, (what, logs[0].read_text()[-3000:])
            seen = metrics_time() if worlds != {str(size)} else seen
            time.sleep(0.1)
        print(f"{what}: trains on {size} after {time.monotonic() - began:.1f} s", flush=True)

    def metrics_time() -> float:
        path = run_dir / "checkpoints" / "last.pt"
        return path.stat().st_mtime if path.exists() else 0.0

    nodes = [begin(0)]
    wait_for_world(1, "start")
    nodes.append(begin(1))
    wait_for_world(2, "the second node joins")
    os.killpg(nodes[1].pid, signal.SIGKILL)
    wait_for_world(1, "the second node is killed")
    finish(nodes.pop(), timeout=10)
    nodes.append(begin(1))
    wait_for_world(2, "the second node joins again")
    codes = [finish(node, timeout=600).returncode for node in nodes]
    print(f"exit {codes}")
    return codes == [0, 0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=50, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restarts", type=int, metavar="NODES", help="leave it to torchrun")
    parser.add_argument("--elastic", action="store_true", help="nodes that come and go")
    parser.add_argument("--forked", action="store_true", help="fork processes: many more kills")
    options = parser.parse_args()
    processes.use_fork_server = options.forked
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    # Enough that a kill can come while they are evaluated.
    short.make(folder / "data", TEST_IMAGES, folder / "whole")
    try:
        if options.elastic:
            good = soak_elastic(folder)
        elif options.restarts:
            good = soak_restarts(options.rounds, options.restarts, options.seed, folder)
        else:
            good = soak_kills(options.rounds, options.seed, folder)
    finally:
        for pid in marked():
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
