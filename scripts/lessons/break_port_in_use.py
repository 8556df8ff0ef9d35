"""Break it: the port of rank 0 is taken, by another job or by the last one's leftover process.

python scripts/lessons/break_port_in_use.py
"""

import socket
import sys

import torch.distributed as dist
from _lesson import conclude, first_line


def start_as_rank_0(port: int) -> str:
    """Join a world of one at ``port``; return the error, or nothing."""
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    except dist.DistNetworkError as error:
        return first_line(error)
    dist.destroy_process_group()
    return ""


def free_port() -> int:
    """Ask the system for a port; another process can still take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> int:
    with socket.socket() as other:  # plays the other job
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = start_as_rank_0(port)
        print(f"MASTER_PORT={port}, taken:\n  {taken}")
        elsewhere = start_as_rank_0(free_port())
        print(f"a free port, while the other job runs: {elsewhere or 'joined'}")
    afterwards = start_as_rank_0(port)
    print(f"MASTER_PORT={port} again, once the other has ended: {afterwards or 'joined'}")
    # torchrun --standalone does this: the system chooses, and nothing can come in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(f"a TCPStore asked for port 0 listens on {store.port}")
    return conclude(
        {
            "rank 0 cannot listen on a port that is taken": "EADDRINUSE" in taken
            and f"port: {port}" in taken,
            "any free port will do, if all ranks are told the same": not elsewhere,
            "the port is free again once its owner has ended": not afterwards,
            "port 0 lets the system choose one": store.port not in (0, port),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
