"""Break it: every rank saves to one path, a reader finds half a file, or comes before the save.

Usually this is a matter of milliseconds. Here the ranks wait for each other at the wrong moment, so
that it happens each time.

It prints how the saves and the loads of each rank end.
"""

import os
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from _lesson import error_of, run_ranks, start

OLD, NEW = torch.tensor(1.0), torch.tensor(2.0)  # what a checkpoint holds
IN_PLACE = "every rank saves in place"
SHARED = "every rank saves through one temporary file"
EARLY = "rank 1 loads without a barrier after the save"
CURE = "rank 0 alone saves through a temporary file, with a barrier after that"


def save_half(path: Path) -> None:
    """Come to the middle of a torch.save, which empties the file and then fills it."""
    torch.save(NEW, path)
    os.truncate(path, path.stat().st_size // 2)


def load(path: Path) -> float:
    return float(torch.load(path, map_location="cpu", weights_only=True))


def work(rank: int, world_size: int, case: str, folder: Path) -> str:
    """Save or load; return how that ended."""
    path, temporary = folder / "last.pt", folder / "last.tmp"
    if case == SHARED:
        torch.save(NEW, temporary)
        dist.barrier()
        os.replace(temporary, path)
        return "saved"
    if case == EARLY:
        if rank == 0:
            time.sleep(1)  # as long as a large model takes
            torch.save(NEW, folder / "model.pt")
        return f"loaded {load(folder / 'model.pt')}"
    if rank == 0:
        torch.save(OLD, path)
    dist.barrier()
    if case == IN_PLACE and rank == 1:
        save_half(path)
    if case == CURE and rank == 0:
        save_half(temporary)
    dist.barrier()
    meanwhile = load(path)
    dist.barrier()
    if case == CURE and rank == 0:
        torch.save(NEW, temporary)
        os.replace(temporary, path)  # atomic: a reader gets the old file or the new one
    dist.barrier()  # no rank loads before rank 0 has saved
    return f"loaded {meanwhile}, and then {load(path)}"


def main() -> dict[str, bool]:
    ends = {}
    for case in (IN_PLACE, SHARED, EARLY, CURE):
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_ranks(work, 2, case, Path(folder))
        ends[case] = [(o.error or o.value).replace(folder, "...") for o in outcomes]
        print(f"{case}:")
        for rank, end in enumerate(ends[case]):
            print(f"  rank {rank}: {end[:96]}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
            torch.save(NEW, path)
        unmapped = error_of(lambda: torch.load(path)) or "loaded onto cuda:0, whichever rank asks"
        mapped = load(path)
    print(f"a file saved on cuda:0, loaded without map_location: {unmapped[:160]}")
    return {
        "a file that a rank writes in place is incomplete for its readers": (
            "PytorchStreamReader failed" in ends[IN_PLACE][0]
        ),
        "ranks that share a temporary file spoil each other's": (
            sum("FileNotFoundError" in end for end in ends[SHARED]) == 1
        ),
        "without a barrier rank 1 loads before the file exists": (
            "FileNotFoundError" in ends[EARLY][1]
        ),
        "cure: one rank writes a temporary file, then replaces the old one, and the others load "
        "after a barrier": ends[CURE] == ["loaded 1.0, and then 2.0"] * 2,
        "a file keeps the device of its tensors: without map_location every rank loads onto that "
        "device, or fails if there is none": mapped == 2
        and (torch.cuda.is_available() or "deserialize object on a CUDA device" in unmapped),
    }


if __name__ == "__main__":
    start(main, "Two ranks save to one file. What does a rank load while the other one saves?")
