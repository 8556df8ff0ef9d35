"""A model lies on two devices: does DDP average the gradients of both halves?

A model that is too large for one GPU can be cut into halves (model parallelism), and each rank then
has two GPUs: 2 * local rank and the next one.

a) Yes, if the model is wrapped without `device_ids`.
b) Yes, if both devices are in `device_ids`.
c) Only those of the first half.

DP wants all weights on its first GPU. With four GPUs this lesson uses them. Otherwise both devices
are the CPU: the calls are the same, and all weights are in one memory.
"""

import os
from typing import Any

os.environ["LESSON_GPUS"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")  # not hidden here
# Read when torch is imported. torch 2.15's new NCCL class wants all tensors on one GPU.
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")

import _lesson as lesson
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="a")
WIDTH = 64
events: list[str] = []


class TwoHalves(nn.Module):
    """Two halves on two devices. Inputs go to the first one, outputs are on the second one."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.first = nn.Linear(WIDTH, WIDTH).to(devices[0])
        self.second = nn.Linear(WIDTH, WIDTH).to(devices[1])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.to(self.devices[0]))
        events.append("first half forward")
        # Autograd knows this copy, too: the backward copies the gradient to the first device.
        outputs = self.second(hidden.to(self.devices[1]))
        events.append("second half forward")
        return outputs


def work(rank: int, world_size: int) -> tuple[list[list[Tensor]], list[str], str]:
    """Return the gradients without and with DDP, what happened in which order, and an error."""
    has_gpus = torch.cuda.device_count() >= 2 * world_size
    devices = [torch.device(f"cuda:{2 * rank + i}" if has_gpus else "cpu") for i in (0, 1)]
    if has_gpus:
        torch.cuda.set_device(devices[0])
    torch.manual_seed(rank)  # other weights, until DDP has broadcast rank 0's, and other samples
    raw_model: Any = TwoHalves(devices)
    group: Any = dist.new_group(backend="nccl" if has_gpus else "gloo")
    model = DistributedDataParallel(raw_model, process_group=group)  # no device_ids
    for name, half in raw_model.named_children():
        half.weight.register_hook(lambda _, name=name: events.append(f"{name} half backward"))
    inputs, targets = torch.randn(2, 16, WIDTH)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        # The outputs are on the second device, so the targets and the loss are there, too.
        F.mse_loss(model(inputs), targets.to(devices[1])).backward()
        return [half.weight.grad.cpu() for half in raw_model.children()]

    with model.no_sync():
        found = [gradients()]
    events.clear()
    found.append(gradients())
    said = lesson.error_of(lambda: DistributedDataParallel(raw_model, device_ids=[0]))
    return found, events, said


ranks = lesson.run(work, 2)
for i, half in enumerate(("first", "second")):
    own, averaged = ([found[way][i] for found, _, _ in ranks] for way in (0, 1))
    for words, tensors in (("alone", own), ("with DDP", averaged)):
        print(f"{half} half {words}:", *(f"{tensor[0, 0].item():.6f}" for tensor in tensors))
    assert not torch.equal(own[0], own[1])
    assert torch.equal(averaged[0], averaged[1])
    assert torch.allclose(averaged[0], (own[0] + own[1]) / 2, atol=1e-7)
print("in a step:", ", ".join(ranks[0][1]))
# One half begins when the other has ended. So one of the two devices always waits.
order = [f"{half} half forward" for half in ("first", "second")]
order += [f"{half} half backward" for half in ("second", "first")]
assert ranks[0][1] == ranks[1][1] == order
print(f"DDP with device_ids: {ranks[0][2]}")
assert "single-device" in ranks[0][2]  # on the CPU, DDP says so of every model

lesson.claim("DDP averages both halves without device_ids; the halves compute one after the other.")
