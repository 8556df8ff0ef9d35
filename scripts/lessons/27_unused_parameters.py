"""One layer gets no gradient in a step: in which step does DDP raise an error?

DDP waits for the gradient of every parameter, and a bucket that is never full is never sent. The
forward leaves out the same layer in each step.

a) In the first one.
b) In the second one.
c) In none.
"""

import os

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="b")


class TwoHeads(nn.Module):
    """A network whose forward may leave out its second output layer."""

    def __init__(self, use_both: bool) -> None:
        super().__init__()
        self.use_both = use_both
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        return self.head(hidden) + (self.spare(hidden) if self.use_both else 0)


def work(rank: int, world_size: int, case: str) -> tuple[float, str]:
    """Make two steps; return the first one's gradient (summed) and what the second one raised."""
    if case == "TORCH_DISTRIBUTED_DEBUG=INFO":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"  # a user sets it in the shell
        dist.set_debug_level_from_env()
    raw_model = TwoHeads(use_both=case == "used in forward")
    if case == "frozen before wrapping":
        raw_model.spare.requires_grad_(False)
    find = case == "find_unused_parameters=True"
    model = DistributedDataParallel(raw_model, find_unused_parameters=find)
    inputs = torch.full((3, 4), rank + 1.0)
    model(inputs).square().sum().backward()
    assert raw_model.body.weight.grad is not None
    gradient = raw_model.body.weight.grad.sum().item()
    try:
        model(inputs).square().sum().backward()
    except RuntimeError as error:
        return gradient, str(error)
    return gradient, ""


def show(case: str) -> tuple[bool, str]:
    """Return whether the ranks had the same gradient in step 1, and the error of step 2."""
    (first, said), (second, _) = lesson.run(work, 2, case)
    print(f"{case}: the ranks' gradients of step 1 are {first:.2f} and {second:.2f}", end="; ")
    lines = [line for line in said.splitlines() if line.startswith(("Expected", "Parameter"))]
    print("step 2 is fine" if not said else "step 2 raises")
    for line in lines:
        print(f"  {line.split('. ')[0][:110]}")
    return first == second, said


same, said = show("one layer is unused")
assert "Expected to have finished reduction in the prior iteration" in said
# Step 1 was already wrong, and nobody said so: each rank kept its own gradient.
assert not same
assert "spare.weight" not in said
assert "spare.weight" in show("TORCH_DISTRIBUTED_DEBUG=INFO")[1]
# Three cures. The last one searches the graph of every step, which takes time.
for cure in ("used in forward", "frozen before wrapping", "find_unused_parameters=True"):
    assert show(cure) == (True, "")

lesson.claim("step 1 is wrong, and step 2 raises the error; use all parameters, or freeze them.")
