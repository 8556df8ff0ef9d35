"""Break it: parameters get no gradient, although DDP waits for their gradients.

It prints which step raises an error for each cure, and what it says.
"""

import os

import torch
import torch.distributed as dist
from _lesson import error_of, start, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    """A network whose forward may leave out its second output layer."""

    def __init__(self, use_both: bool) -> None:
        super().__init__()
        self.use_both = use_both
        self.body, self.head, self.spare = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        return self.head(hidden) + (self.spare(hidden) if self.use_both else 0)


def work(rank: int, world_size: int, case: str) -> tuple[float, str]:
    """Make two steps; return the first one's gradient (summed) and what the second one raised."""
    if case == "unused, TORCH_DISTRIBUTED_DEBUG=INFO":
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"  # a user sets it in the shell
        dist.set_debug_level_from_env()
    raw_model = TwoHeads(use_both=case == "used in forward")
    if case == "frozen":
        raw_model.spare.requires_grad_(False)
    find = case == "find_unused_parameters=True"
    model = DistributedDataParallel(raw_model, find_unused_parameters=find)
    inputs = torch.full((3, 4), float(rank + 1))
    model(inputs).square().sum().backward()
    gradient = float(raw_model.body.weight.grad.sum())  # type: ignore[union-attr]
    return gradient, error_of(lambda: model(inputs).square().sum().backward())


def show(case: str) -> tuple[bool, str]:
    """Run a case; return whether the ranks had the same gradient, and the error of rank 0."""
    first, second = values(work, 2, case)
    print(f"{case}: the ranks' gradients of step 1 are {first[0]:.3f} and {second[0]:.3f}")
    for line in first[1].splitlines():
        if "Expected to have finished" in line or line.startswith("Parameter"):
            print(f"  {line.split('. ')[0]}")
    return first[0] == second[0], first[1]


def main() -> dict[str, bool]:
    unused = show("unused")
    named = show("unused, TORCH_DISTRIBUTED_DEBUG=INFO")
    used, frozen = show("used in forward"), show("frozen")
    found = show("find_unused_parameters=True")
    return {
        "step 2 fails": "Expected to have finished reduction in the prior iteration" in unused[1],
        "step 1 was already wrong: the bucket with the unused parameters was never averaged, and "
        "each rank kept its own gradient": not unused[0],
        "TORCH_DISTRIBUTED_DEBUG=INFO adds their names": (
            "spare.weight" in named[1] and "spare.weight" not in unused[1]
        ),
        "cure: use the parameters, or freeze them before wrapping": used == frozen == (True, ""),
        "cure: find_unused_parameters=True, which searches every graph": found == (True, ""),
    }


if __name__ == "__main__":
    start(main, "One layer gets no gradient in a step. In which step does DDP raise an error?")
