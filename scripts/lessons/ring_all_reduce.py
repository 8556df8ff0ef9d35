"""Ring all-reduce by hand: each rank gets the sum, and exchanges data with two neighbours only.

It prints what each rank holds after each step, and the bytes that it has sent.
"""

from typing import Any

import torch
import torch.distributed as dist
from _lesson import start, values
from torch import Tensor

WORLD_SIZE = 4
CHUNK_SIZE = 1000  # float64 numbers in each of the WORLD_SIZE chunks


def ring_all_reduce(tensor: Tensor, rank: int, world_size: int) -> tuple[list[list[int]], int]:
    """Sum ``tensor`` over all ranks in place, over two neighbours only.

    Returns:
        The first number of each chunk after each step; the bytes that this rank sent.
    """
    chunks = tensor.chunk(world_size)  # views: writing to a chunk changes the tensor
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    history, bytes_sent = [], 0
    for step in range(2 * (world_size - 1)):
        given = chunks[(rank - step) % world_size]
        taken = chunks[(rank - step - 1) % world_size]
        received = torch.empty_like(taken)
        # Both at once: if every rank waited for its own send first, no rank would receive.
        requests: list[Any] = [dist.isend(given, right), dist.irecv(received, left)]
        for request in requests:
            request.wait()
        if step < world_size - 1:
            taken += received  # reduce-scatter: a chunk collects one more rank's part
        else:
            taken.copy_(received)  # all-gather: a finished chunk is passed on
        bytes_sent += given.nbytes
        history.append([int(chunk[0]) for chunk in chunks])
    return history, bytes_sent


def work(rank: int, world_size: int) -> dict[str, Any]:
    # Rank 0 holds 1, rank 1 holds 10, rank 2 holds 100: a sum's digits name its ranks.
    tensor = torch.full((world_size * CHUNK_SIZE,), 10.0**rank, dtype=torch.float64)
    reference = tensor.clone()
    history, bytes_sent = ring_all_reduce(tensor, rank, world_size)
    dist.all_reduce(reference)
    equal = torch.equal(tensor, reference)
    return {"history": history, "sent": bytes_sent, "nbytes": tensor.nbytes, "equal": equal}


def main() -> dict[str, bool]:
    ranks = values(work, WORLD_SIZE)
    steps, n = len(ranks[0]["history"]), WORLD_SIZE
    print(f"{n} ranks, {n} chunks each. A chunk's digits: 0101 holds the parts of ranks 0 and 2.")
    print(f"{'':24}" + "".join(f"rank {rank:<16}" for rank in range(n)))
    for step in range(steps):
        phase = "reduce-scatter" if step < n - 1 else "all-gather"
        columns = [" ".join(f"{chunk:04}" for chunk in rank["history"][step]) for rank in ranks]
        print(f"step {step + 1}  {phase:<16} " + "  ".join(columns))

    nbytes, sent = ranks[0]["nbytes"], [rank["sent"] for rank in ranks]
    print(f"\ntensor: {nbytes:,} bytes; sent by each rank: {sent}")
    print(f"one rank that sums for all would receive and send {2 * (n - 1) * nbytes:,} bytes")
    reduced, before, after = ([rank["history"][i] for rank in ranks] for i in (n - 2, -2, -1))
    return {
        "the result equals that of dist.all_reduce on every rank": all(
            rank["equal"] for rank in ranks
        ),
        f"after n - 1 = {n - 1} steps each rank has finished a different chunk": (
            sorted(row.index(1111) for row in reduced if row.count(1111) == 1) == list(range(n))
        ),
        f"it takes 2(n - 1) = {2 * (n - 1)} steps, not n = {n}": (
            steps == 2 * (n - 1) and after == [[1111] * n] * n != before
        ),
        f"each rank sends 2(n - 1)/n = {2 * (n - 1) / n} times the data, less than twice for any "
        "number of ranks": sent == [2 * (n - 1) * nbytes // n] * n,
    }


if __name__ == "__main__":
    start(main)
