"""A rank loads a file while another one saves it: what does it get?

This happens if all ranks save to one file, or if no barrier is between the save and the load.

a) The old file, until the save is complete.
b) An error, because half of the file is there, or nothing.
c) The new file, because torch.load waits for the save.

Usually it is a matter of milliseconds. Here each case imitates the wrong moment, so that it happens
each time.
"""

import os
import tempfile
import time
from pathlib import Path
from unittest import mock

import _lesson as lesson
import torch
import torch.distributed as dist

lesson.start(__doc__, answer="b")
MODEL = torch.tensor(2.0)


def load(path: Path) -> float:
    return torch.load(path, map_location="cpu", weights_only=True).item()


def in_place(rank: int, world_size: int, path: Path) -> float:
    if rank == 1:  # is in the middle of a torch.save, which empties the file and then fills it
        torch.save(MODEL, path)
        os.truncate(path, path.stat().st_size // 2)
    dist.barrier()
    return load(path)


def no_barrier(rank: int, world_size: int, path: Path) -> float:
    if rank == 0:
        time.sleep(1)  # as long as a large model takes
        torch.save(MODEL, path)
    return load(path)


def no_second_barrier(rank: int, world_size: int, path: Path) -> float:
    if rank == 0:
        torch.save(MODEL, path)
    dist.barrier()
    if rank == 0:
        path.unlink()  # the next save would also replace it
        return 0.0
    time.sleep(1)  # a slow disk
    return load(path)


def right(rank: int, world_size: int, path: Path) -> float:
    if rank == 0:
        time.sleep(1)  # slow here, too, so that the barrier matters
        torch.save(MODEL, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)  # a reader gets the old file or the new one
    dist.barrier()  # nobody loads before rank 0 has saved
    loaded = load(path)
    dist.barrier()  # all have loaded: now rank 0 may remove or replace the file
    return loaded


found = []
for work in (in_place, no_barrier, no_second_barrier, right):
    with tempfile.TemporaryDirectory() as folder:
        ranks = lesson.run(work, 2, Path(folder, "model.pt"), may_fail=True)
    told = [str(text).replace(folder, "...")[:75] for text in ranks]
    print(f"{work.__name__:18}rank 0: {told[0]}\n{'':18}rank 1: {told[1]}")
    found.append(ranks)
# A save in place: the reader finds half a file.
assert "PytorchStreamReader failed" in found[0][0]
# Rank 1 loads before rank 0 has saved, or after rank 0 has removed the file.
assert "FileNotFoundError" in found[1][1]
assert "FileNotFoundError" in found[2][1]
assert found[3] == [2, 2]

# A file keeps the device of its tensors. The dict of old tutorials gives each rank its own device.
# "cpu" is simpler: load_state_dict copies each tensor to where its parameter is.
with tempfile.NamedTemporaryFile() as file:
    with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
        torch.save(MODEL, file.name)
    said = lesson.error_of(lambda: torch.load(file.name))
    print(f"saved on cuda:0, loaded without a GPU: {said[:75]}...")
    assert "deserialize object on a CUDA device" in said
    assert torch.load(file.name, map_location={"cuda:0": "cpu"}) == load(Path(file.name)) == 2

lesson.claim("rank 0 alone saves, through a temporary file; barriers before and after the loads.")
