"""Break it: every rank saves to the same path, and a reader finds an incomplete file.

python scripts/lessons/break_every_rank_saves.py
"""

import os
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from _lesson import first_line, run_ranks, start

SECONDS = 1.0  # of each case
READER = 2  # the rank that only reads
# The ranks that write, and whether they write a temporary file first.
CASES = {
    "every rank, in place": ((0, 1), False),
    "every rank, through the same temporary file": ((0, 1), True),
    "rank 0, in place": ((0,), False),
    "rank 0, through a temporary file": ((0,), True),
}


def save(state: dict[str, torch.Tensor], path: Path, replace: bool) -> None:
    if not replace:
        torch.save(state, path)  # empties the file, then fills it
        return
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)  # atomic: a reader gets the old file or the new one


def work(rank: int, world_size: int, case: str, folder: str) -> Counter[str]:
    """Save or load for a while. Return how often it worked, and how often each error was raised."""
    writers, replace = CASES[case]
    path, ends = Path(folder) / "last.pt", Counter[str]()
    state = {"weight": torch.full((50_000,), float(rank))}
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        try:
            if rank in writers:
                save(state, path, replace)
            elif rank == READER and path.exists():
                torch.load(path, weights_only=True)
            else:
                continue
            ends["fine"] += 1
        except Exception as error:  # its type depends on what another rank is doing
            ends[first_line(error).replace(f"{folder}/", "")] += 1
    return ends


def main() -> dict[str, bool]:
    failed = {}
    for case, (writers, _) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            ranks = [outcome.value for outcome in run_ranks(work, 3, case, folder)]
        saves, loads = sum((ranks[rank] for rank in writers), Counter[str]()), ranks[READER]
        print(f"{case}:")
        for what, ends in (("saves", saves), ("loads", loads)):
            for end, count in ends.most_common(3):
                print(f"  {count:6} {what}: {end[:96]}")
        failed[case] = sum(saves.values()) - saves["fine"], sum(loads.values()) - loads["fine"]
    in_place, same_temporary, alone, right = failed.values()
    return {
        "a file that is written in place is incomplete for its readers, even with one writer": (
            in_place[1] > 0 < alone[1]
        ),
        "ranks that share a temporary file move it away from each other": same_temporary[0] > 0,
        "cure: one rank writes a temporary file, then replaces the old one": right == (0, 0),
    }


if __name__ == "__main__":
    start(main)
