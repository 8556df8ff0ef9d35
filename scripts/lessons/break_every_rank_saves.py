"""Break it: every rank saves to one path, a reader finds half a file, or comes before the save.

It prints how many saves and loads failed in each case, and what a rank loads without a barrier.
"""

import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from _lesson import error_of, run_ranks, start, values

SECONDS, PATIENCE = 1.0, 20.0  # of each case at least, and at most if nothing has failed yet
READER = 2  # the rank that only reads
# The ranks that write, and whether they write a temporary file first.
CASES = {
    "every rank, in place": ((0, 1), False),
    "every rank, through the same temporary file": ((0, 1), True),
    "rank 0, in place": ((0,), False),
    "rank 0, through a temporary file": ((0,), True),
}
CURE = [*CASES][-1]


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
    path, failed, ends = Path(folder) / "last.pt", Path(folder) / "failed", Counter[str]()
    state = {"weight": torch.full((50_000,), float(rank))}
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < PATIENCE:
        if passed > SECONDS and (case == CURE or failed.exists()):
            break
        if rank in writers:
            error = error_of(lambda: save(state, path, replace))
        elif rank == READER and path.exists():
            error = error_of(lambda: torch.load(path, weights_only=True))
        else:
            continue
        ends[error.partition("\n")[0].replace(f"{folder}/", "") or "fine"] += 1
        if error:
            failed.touch()
    return ends


def save_and_load(rank: int, world_size: int, folder: str, with_barrier: bool) -> list[float]:
    """Save on rank 0, as if from cuda:0, and load on all ranks; return the sum before and after."""
    state, path = {"weight": torch.full((2,), float(rank))}, Path(folder) / "model.pt"
    if rank == 0:
        time.sleep(SECONDS)  # as long as a large model takes
        with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
            save(state, path, replace=True)
    if with_barrier:
        dist.barrier()  # no rank passes before rank 0 comes here, which is after saving
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    dist.barrier()  # all ranks have loaded: rank 0 may delete the file
    return [float(state["weight"].sum()), float(loaded["weight"].sum())]


def main() -> dict[str, bool]:
    failures = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            *saves, loads = values(work, 3, case, folder)
        print(f"{case}:")
        for what, ends in (("saves", sum(saves, Counter[str]())), ("loads", loads)):
            for end, count in ends.most_common(3):
                print(f"  {count:6} {what}: {end[:96]}")
            failures[case, what] = sum(ends.values()) - ends["fine"]
    with tempfile.TemporaryDirectory() as folder:
        early = run_ranks(save_and_load, 2, folder, False)[1].error.replace(folder, "...")
    with tempfile.TemporaryDirectory() as folder:
        sums = values(save_and_load, 2, folder, True)
        unmapped = error_of(lambda: torch.load(f"{folder}/model.pt", weights_only=True))
    print(f"loads without a barrier after the save: {early}")
    print(f"with a barrier, the sum of each rank's weights before and after: {sums}")
    unmapped = unmapped or "loaded onto cuda:0, whichever rank asks"
    print(f"a file saved on cuda:0, loaded without map_location: {unmapped[:160]}")
    in_place, same_temporary, alone, _ = CASES
    return {
        "a file that is written in place is incomplete for its readers, even with one writer": (
            failures[in_place, "loads"] > 0 < failures[alone, "loads"]
        ),
        "ranks that share a temporary file spoil each other's": (
            failures[same_temporary, "saves"] + failures[same_temporary, "loads"] > 0
        ),
        "cure: one rank writes a temporary file, then replaces the old one": (
            failures[CURE, "saves"] == failures[CURE, "loads"] == 0
        ),
        "without a barrier rank 1 loads before the file exists": early.startswith(
            "FileNotFoundError: [Errno 2] No such file or directory"
        ),
        "cure: with a barrier after the save all ranks load rank 0's weights": (
            sums[0][0] == sums[0][1] == sums[1][1] != sums[1][0]
        ),
        "a file keeps the device of its tensors: without map_location every rank loads onto that "
        "device, or fails if there is none": torch.cuda.is_available()
        or "Attempting to deserialize object on a CUDA device" in unmapped,
    }


if __name__ == "__main__":
    start(main, "Two ranks save to one file, and a third reads it. Which of them fail?")
