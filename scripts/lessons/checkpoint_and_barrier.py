"""One rank saves, all load: why a barrier stands between, and what map_location is for.

python scripts/lessons/checkpoint_and_barrier.py
"""

import os
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from _lesson import first_line, run_ranks, start
from torch import nn

SAVE_SECONDS = 1.0  # as long as a large model takes


def save(model: nn.Module, path: Path) -> None:
    """Save as if the weights were on cuda:0; here they are on the CPU."""
    time.sleep(SAVE_SECONDS)
    temporary = path.with_suffix(".tmp")
    with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):
        torch.save(model.state_dict(), temporary)
    os.replace(temporary, path)  # this name never holds an incomplete file


def work(rank: int, world_size: int, folder: str, with_barrier: bool) -> tuple[float, float]:
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    torch.manual_seed(rank)  # each rank starts with other weights
    model = nn.Linear(2, 2).to(device)
    before = float(model.weight.detach().sum())
    path = Path(folder) / "model.pt"
    if rank == 0:
        save(model, path)
    if with_barrier:
        dist.barrier()  # no rank passes before rank 0 comes here, which is after saving
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state)
    dist.barrier()  # all ranks have loaded: rank 0 may delete the file
    if rank == 0:
        path.unlink()
    return before, float(model.weight.detach().sum())


def load_anywhere(folder: str) -> str:
    """Load the file without map_location; return where it landed, or the error."""
    path = Path(folder) / "other.pt"
    save(nn.Linear(2, 2), path)
    try:
        return f"on {torch.load(path, weights_only=True)['weight'].device}, whichever rank asked"
    except RuntimeError as error:
        return first_line(error)


def main() -> dict[str, bool]:
    with tempfile.TemporaryDirectory() as folder:
        without = run_ranks(work, 2, folder, False)[1].error.replace(folder, "...")
    with tempfile.TemporaryDirectory() as folder:
        fixed = run_ranks(work, 2, folder, True)
        unmapped = load_anywhere(folder)
    print("without a barrier after saving:")
    print(f"  rank 1: {without}")
    print("with it:")
    for outcome in fixed:
        before, after = outcome.value
        print(f"  rank {outcome.rank}: weights sum to {before:+.4f}, after loading to {after:+.4f}")
    print("a file saved on cuda:0, loaded without map_location:")
    print(f"  {unmapped[:160]}")
    first = fixed[0].value[0]
    return {
        "without the barrier rank 1 loads before the file exists": without.startswith(
            "FileNotFoundError: [Errno 2] No such file or directory"
        ),
        "cure: with the barrier all ranks continue with rank 0's weights": first
        != fixed[1].value[0]
        and all(outcome.value[1] == first for outcome in fixed),
        "a file keeps the device of its tensors: without map_location every rank loads onto that "
        "device, or fails if there is none (cure: map_location, as above)": unmapped.startswith(
            "on cuda:0"
        )
        or "Attempting to deserialize object on a CUDA device" in unmapped,
    }


if __name__ == "__main__":
    start(main)
