"""DDP around a model that lies on two devices: each rank has two devices of its own.

A model that is too large for one GPU can be cut into halves (model parallelism). The forward sends
the activations from the first half to the second, and the backward sends their gradients back. DDP
averages the gradients of both halves over the ranks, if it is given no ``device_ids``.

With four GPUs rank 0 takes the first two, and rank 1 the others (2 x local rank and the next one).
Otherwise both devices of a rank are the CPU. The steps are the same then, but all weights are in
one memory.

With GPUs this needs TORCH_DIST_USE_NCCL2=0 and a process group without a device_id. Otherwise NCCL
takes tensors of one GPU only: "Expected tensor on cuda:0 but found tensor on cuda:1", torch 2.15.

It prints a gradient of each half, a drawing of who computes when, and what DDP and DP refuse.
"""

import os
import time
from typing import Any

# Before torch is imported, which reads it. See above.
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _lesson import error_of, start, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WORLD_SIZE, WIDTH, BATCH = 2, 512, 256
COLUMNS = 64  # of the drawing
HALVES = ("first", "second")


def build_half() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


class TwoHalves(nn.Module):
    """Two halves on two devices. Inputs go to the first one, outputs are on the second one."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.first = build_half().to(devices[0])
        self.second = build_half().to(devices[1])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        # Autograd knows this copy, too: the backward copies the gradient to the first device.
        return self.second(hidden.to(self.devices[1]))


def note_spans(model: TwoHalves) -> list[tuple[str, str, float]]:
    """Return a list to which each half adds when it begins and ends to compute."""
    moments: list[tuple[str, str, float]] = []

    def note(half: str, what: str) -> Any:
        def hook(*_: Any) -> None:
            for device in model.devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # a GPU works on when Python has gone on
            moments.append((half, what, time.perf_counter()))

        return hook

    for half in HALVES:
        module = getattr(model, half)
        module.register_forward_pre_hook(note(half, "forward"))
        module.register_forward_hook(note(half, "forward"))
        module.register_full_backward_pre_hook(note(half, "backward"))
        module.register_full_backward_hook(note(half, "backward"))
    return moments


def draw(moments: list[tuple[str, str, float]]) -> list[str]:
    """Return a row for each half: F and B where it computes, a point where it waits."""
    begin, end = moments[0][2], moments[-1][2]
    rows = {half: ["."] * COLUMNS for half in HALVES}
    for (half, what, since), (_, _, until) in zip(moments[::2], moments[1::2], strict=True):
        left, right = (int((COLUMNS - 1) * (t - begin) / (end - begin)) for t in (since, until))
        for column in range(left, right):
            rows[half][column] = what[0].upper()
    return ["".join(row) for row in rows.values()]


def work(rank: int, world_size: int, has_gpus: bool) -> dict[str, Any]:
    """Return this rank's own gradients and DDP's, when each half computed, and what is refused."""
    devices = [torch.device("cpu")] * 2
    if has_gpus:
        devices = [torch.device("cuda", 2 * rank), torch.device("cuda", 2 * rank + 1)]
        torch.cuda.set_device(devices[0])
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)  # other weights, until DDP has broadcast rank 0's, and other samples
    raw_model = TwoHalves(devices)
    group = dist.new_group(backend="nccl" if has_gpus else "gloo")
    model = DistributedDataParallel(raw_model, process_group=group)  # no device_ids
    inputs = torch.randn(BATCH, WIDTH, device=devices[0], requires_grad=True)
    targets = torch.randn(BATCH, WIDTH, device=devices[1])  # where the outputs and the loss are

    def gradients() -> list[Tensor]:
        model.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        return [getattr(raw_model, half)[0][0].weight.grad.cpu() for half in HALVES]

    with model.no_sync():
        own = gradients()
    averaged = gradients()
    moments = note_spans(raw_model)
    gradients()
    refused = [error_of(lambda: DistributedDataParallel(raw_model, device_ids=[2 * rank]))]
    if has_gpus:
        refused += [error_of(lambda: nn.DataParallel(raw_model, devices)(inputs))]
    return {"own": own, "averaged": averaged, "moments": moments, "refused": refused}


def main() -> dict[str, bool]:
    has_gpus = torch.cuda.device_count() >= 2 * WORLD_SIZE
    print("each rank has two GPUs" if has_gpus else "both devices of a rank are the CPU")
    ranks = values(work, WORLD_SIZE, has_gpus)
    is_averaged = True
    print("a gradient of each half, on both ranks:")
    for i, half in enumerate(HALVES):
        own, averaged = ([rank[key][i] for rank in ranks] for key in ("own", "averaged"))
        is_averaged &= not torch.equal(*own)
        for gradient in averaged:
            is_averaged &= torch.allclose(gradient, sum(own) / WORLD_SIZE, atol=1e-12)
        for words, found in (("alone", own), ("with DDP", averaged)):
            told = ", ".join(f"{gradient[0, 0]:.4e}" for gradient in found)
            print(f"  {half} half {words}: {told}")
    print("one step, from left to right; F is forward, B is backward, a point is waiting")
    for number, rank in enumerate(ranks):
        for half, row in zip(HALVES, draw(rank["moments"]), strict=True):
            print(f"  rank {number}, {half:6} device {row}")
    by_ddp, *by_dp = ranks[0]["refused"]
    print(f"DDP with device_ids:\n  {by_ddp}")
    print(f"DataParallel:\n  {' '.join(by_dp) or 'without GPUs it calls the model, and no more'}")
    spans = [[moment[:2] for moment in rank["moments"]] for rank in ranks]
    forward, backward = ([(half, what) for half in HALVES] for what in ("forward", "backward"))
    order = forward + backward[::-1]
    claims = {
        "DDP averages the gradients of both halves": is_averaged,
        "a half begins when the other one has ended, so one of two devices always waits": all(
            rank[::2] == rank[1::2] == order for rank in spans
        ),
        "DDP takes such a model without device_ids only": "only work with single-device" in by_ddp,
    }
    if has_gpus:
        claims["DP takes no such model"] = "module must have its parameters" in by_dp[0]
    return claims


if __name__ == "__main__":
    start(main)
