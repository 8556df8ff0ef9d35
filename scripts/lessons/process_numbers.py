"""Who is who: the numbers of the processes on two machines, and where a script finds them.

Two launchers on this machine play two machines with two processes each. The older launcher also
passes a flag, which a script has to know. mp.spawn numbers the processes of one machine only.

It prints the numbers that each process gets, and its arguments.
"""

import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _lesson import start

# A rank prints its line with one call, so that lines of several ranks do not mix.
RANK = """import os, sys
names = ("GROUP_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")
numbers = [f"{name}={os.environ[name]}" for name in names]
sys.stdout.write(f"{' '.join(numbers)} arguments={sys.argv[1:]}\\n")
"""
SPAWN = """import sys
import torch.multiprocessing as mp
def work(index):
    sys.stdout.write(f"index={index}\\n")
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


def lines_of(*command: str) -> list[str]:
    """Run a command with this Python; return the lines of its processes, sorted."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # or torchrun prints a warning
    finished = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=100
    )
    assert finished.returncode == 0, finished.stderr
    return sorted(line for line in finished.stdout.splitlines() if "=" in line)


def main() -> dict[str, bool]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2"]
    torchrun += ["--master_addr", "127.0.0.1", "--master_port", port]
    older = ["-m", "torch.distributed.launch", "--nproc_per_node", "2", "--master_port", "0"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        rank, spawn = Path(folder, "rank.py"), Path(folder, "spawn.py")
        rank.write_text(RANK)
        spawn.write_text(SPAWN)
        commands = {
            "torchrun, machine 0": [*torchrun, "--node_rank", "0", str(rank)],
            "torchrun, machine 1": [*torchrun, "--node_rank", "1", str(rank)],
            "torch.distributed.launch": [*older, str(rank)],
            "mp.spawn(work, nprocs=2)": [str(spawn)],
        }
        started = {way: pool.submit(lines_of, *command) for way, command in commands.items()}
        shown = {way: lines.result() for way, lines in started.items()}
    for way, lines in shown.items():
        print(f"{way}:", *lines, sep="\n  ")
    numbers = [f"GROUP_RANK={rank // 2} LOCAL_RANK={rank % 2} RANK={rank}" for rank in range(4)]
    first, second, plain, spawned = shown.values()
    machines = first + second
    return {
        "rank = node_rank * nproc_per_node + local rank, where node_rank (GROUP_RANK) is the "
        "machine's number": [line.partition(" WORLD")[0] for line in machines] == numbers,
        "the world size is nnodes * nproc_per_node, and not nproc_per_node": all(
            "WORLD_SIZE=4" in line for line in machines
        ),
        "LOCAL_RANK is set without --use_env, too": "LOCAL_RANK=1" in plain[1],
        "without --use_env the older launcher also passes --local-rank, and a script that does not "
        "know this flag ends with `unrecognized arguments`": "--local-rank=1" in plain[1],
        "mp.spawn gives the index on this machine: on the second of two machines it would be 0 and "
        "1 again": spawned == ["index=0", "index=1"],
    }


if __name__ == "__main__":
    start(main)
