"""Kill random ranks at random moments, resume, and compare with an undisturbed run.

    python tests/soak.py --rounds 50
    python tests/soak.py --rounds 10 --restarts 1     torchrun --standalone --max_restarts
    python tests/soak.py --rounds 10 --restarts 2     two static nodes
    python tests/soak.py --elastic                    a node joins, is killed, joins again

Not part of the test run. Each run is killed (-9) some times on the way, goes on, and has to end in
the weights and the metrics of a run that nobody touched.
"""

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import data
from tests.processes import finish, run, script, start
from tests.test_launch import free_port
from tests.test_scripts import command, final_state
from tests.test_stop import marked, ranks

LAYOUTS = [("single", 1), ("ddp", 2), ("ddp", 3), ("ddp", 4)]
HARD: list[Any] = ["--model", "basic", "--max-steps", 30, "--save-every-steps", 4, "--seed", 5]
HARD += ["--batch-size", 16, "--grad-accum-steps", 2, "--num-workers", 1, "--no-tensorboard"]


def arguments(
    technique: str, processes: int, folder: Path, data_dir: Path, *more: Any
) -> list[Any]:
    buckets = ["--bucket-cap-mb", 0.25] if technique == "ddp" else []
    where = ["--dataset", "synthetic", "--data-dir", data_dir, "--run-dir", folder]
    return command(technique, processes, *where, *HARD, *buckets, *more)


def soak_kills(rounds: int, seed: int, folder: Path) -> bool:
    """Kill ranks at random moments and resume by hand."""
    choose = random.Random(seed)
    calm: dict[tuple[str, int], Any] = {}
    kills = same = completions = 0
    while kills < rounds:
        layout = LAYOUTS[completions % len(LAYOUTS)]
        if layout not in calm:
            begin = time.monotonic()
            result = run(*arguments(*layout, folder / "calm", folder / "data"), timeout=300)
            assert result.returncode == 0, result.text
            calm[layout] = final_state(folder / "calm"), time.monotonic() - begin
            shutil.rmtree(folder / "calm")
        expected, seconds = calm[layout]
        hits = 0
        while True:
            process = start(*arguments(*layout, folder / "run", folder / "data", "--resume"))
            if hits < 3 and kills < rounds:
                time.sleep(choose.uniform(0.3, 0.9) * seconds)
                alive = ranks()
                if alive and process.poll() is None:
                    os.kill(choose.choice(list(alive.values())), signal.SIGKILL)
                    hits, kills = hits + 1, kills + 1
            result = finish(process, timeout=300)
            if result.returncode == 0:
                break
        equal = final_state(folder / "run") == expected
        completions, same = completions + 1, same + equal
        print(
            f"{layout[0]} on {layout[1]}: {hits} kills, {'same' if equal else 'DIFFERENT'};"
            f" {kills} kills in all, {same} of {completions} runs ended as if undisturbed",
            flush=True,
        )
        shutil.rmtree(folder / "run")
    return same == completions


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
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    data.prepare("synthetic", str(folder / "data"))
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
