"""How does each of n ranks get the sum, if it only talks to its two neighbours?

That is ring all-reduce. The tensor is cut into n chunks, and each rank passes one chunk to the
right in each step. How many steps does it take, and how much does each rank send?

a) n steps, and n times its data.
b) 2 (n - 1) steps, and less than twice its data.
c) 2 (n - 1) steps, and n - 1 times its data.

Rank 0 holds 1, rank 1 holds 10, rank 2 holds 100 and rank 3 holds 1000, so the digits of a chunk
tell whose parts are in it.
"""

from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import Tensor

lesson.start(__doc__, answer="b")
WORLD_SIZE = 4
CHUNK_SIZE = 1000


def ring_all_reduce(tensor: Tensor, rank: int, world_size: int) -> tuple[list[list[int]], int]:
    """Sum in place; return what is in each chunk after each step, and the bytes that were sent."""
    chunks = tensor.chunk(world_size)  # views: writing to a chunk changes the tensor
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    history = []
    sent = 0
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
        sent += given.nbytes
        history.append([int(chunk[0]) for chunk in chunks])
    return history, sent


def work(rank: int, world_size: int) -> tuple[list[list[int]], float, bool]:
    tensor = torch.full((world_size * CHUNK_SIZE,), 10.0**rank)
    reference = tensor.clone()
    history, sent = ring_all_reduce(tensor, rank, world_size)
    dist.all_reduce(reference)
    return history, sent / tensor.nbytes, torch.equal(tensor, reference)


ranks = lesson.run(work, WORLD_SIZE)
n = WORLD_SIZE
print("The four chunks of " + "".join(f"rank {rank}:".ljust(22) for rank in range(n)))
for step in range(len(ranks[0][0])):
    phase = "reduce-scatter" if step < n - 1 else "all-gather"
    columns = [" ".join(f"{chunk:04}" for chunk in history[step]) for history, _, _ in ranks]
    print(f"{step + 1}. {phase:16}" + "   ".join(columns))
# After n - 1 steps each rank has finished one chunk, another one than the others.
finished = [history[n - 2].index(1111) for history, _, _ in ranks]
assert sorted(finished) == list(range(n))
# It takes n - 1 steps more until all have everything: 2 (n - 1) in all, not n.
assert any(history[-2] != [1111] * n for history, _, _ in ranks)
assert all(history[-1] == [1111] * n for history, _, _ in ranks)
assert all(is_equal for _, _, is_equal in ranks)
# Each rank sends less than twice the data, whatever n is.
print(f"Each rank sends {ranks[0][1]:.2f} times the data. One rank that adds up for all the")
print(f"others would receive and send {2 * (n - 1)} times the data.")
assert all(sent == 2 * (n - 1) / n for _, sent, _ in ranks)

lesson.claim("it takes 2 (n - 1) steps, and each rank sends 2 (n - 1) / n times the data.")
