"""DDP around a model that is itself spread over two devices, and the arguments it then refuses.

python scripts/lessons/model_parallel.py

Uses two GPUs for each of two processes where there are four, and the CPU twice otherwise.
"""

import sys
from typing import Any

import torch
from _lesson import conclude, first_line, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE, BATCH = 2, 8


class TwoDevices(nn.Module):
    """The front half of a network on one device, the back half on another."""

    def __init__(self, front: torch.device, back: torch.device) -> None:
        super().__init__()
        self.front_device, self.back_device = front, back
        self.front = nn.Linear(6, 4).to(front)
        self.back = nn.Linear(4, 2).to(back)

    def forward(self, inputs: Tensor) -> Tensor:
        # DDP moves no inputs here: the model places them, and hands on what passes between.
        hidden = torch.relu(self.front(inputs.to(self.front_device)))
        return self.back(hidden.to(self.back_device))


def devices_of(rank: int) -> tuple[torch.device, torch.device]:
    """Return the two devices of a rank; no two ranks share one where there are GPUs enough."""
    if torch.cuda.device_count() < 2 * WORLD_SIZE:
        return torch.device("cpu"), torch.device("cpu")
    return torch.device("cuda", 2 * rank), torch.device("cuda", 2 * rank + 1)


def gradients(model: nn.Module, inputs: Tensor) -> Tensor:
    model(inputs).square().mean().backward()
    return torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])


def refusal(model: nn.Module, **arguments: Any) -> str:
    try:
        DistributedDataParallel(model, **arguments)
    except ValueError as error:
        return first_line(error)
    return "accepted"


def work(rank: int, world_size: int) -> dict[str, Any]:
    front, back = devices_of(rank)
    inputs = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(1))
    raw_model = TwoDevices(front, back)
    model = DistributedDataParallel(raw_model)  # device_ids stays None
    alone = TwoDevices(torch.device("cpu"), torch.device("cpu"))
    alone.load_state_dict(model.module.state_dict())
    difference = gradients(model, inputs[rank::world_size]) - gradients(alone, inputs)
    return {
        "devices": f"{front} and {back}",
        "difference": float(difference.abs().max()),
        "one id": refusal(raw_model, device_ids=[0]),
        "two ids": refusal(raw_model, device_ids=[0, 1]),
    }


def main() -> int:
    ranks = [outcome.value for outcome in run_ranks(work, WORLD_SIZE)]
    for rank, facts in enumerate(ranks):
        print(
            f"rank {rank}: model over {facts['devices']}; its gradients differ from those of the "
            f"whole batch in one process by {facts['difference']:.0e}"
        )
    print("device_ids=[0, 1], one model copied to two devices as PyTorch once did:")
    print(f"  {ranks[0]['two ids']}")
    print("device_ids=[0], though the model has placed itself:")
    print(f"  {ranks[0]['one id']}")
    return conclude(
        {
            "with device_ids=None each rank's gradients are those of the whole batch": all(
                facts["difference"] < 1e-6 for facts in ranks
            ),
            "DDP copies no model within a process any more": "device_ids can only be None or "
            "contain a single element" in ranks[0]["two ids"],
            "a model over several devices, or on the CPU, takes no device_ids": "only work with "
            "single-device/multiple-device GPU modules or CPU modules" in ranks[0]["one id"],
        }
    )


if __name__ == "__main__":
    sys.exit(main())
