"""Break it: a model's forward changes some state, which is lost with DataParallel's replicas.

It prints what a counter in the model says after some steps of DP and of DDP. The documentation of
torch.nn.DataParallel warns of this.
"""

from typing import Any

import torch
from _lesson import start, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from utils.data_parallel import CPUDataParallel  # DataParallel's forward, on threads

BATCH, STEPS = 4, 3


class Noting(nn.Module):
    """A layer that counts its calls and its samples in the usual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.calls = 0
        self.in_place: Tensor
        self.assigned: Tensor
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.in_place += len(inputs)
        self.assigned = self.assigned + len(inputs)
        seen = torch.ones(len(inputs), 1)  # one for each sample; the caller adds them up
        return torch.cat((self.linear(inputs), seen), dim=1)


def train(model: nn.Module, raw_model: Noting, inputs: Tensor) -> dict[str, Any]:
    """Make some forwards; return what ``raw_model`` has counted."""
    returned = sum(int(model(inputs)[:, 1].sum()) for _ in range(STEPS))
    return {
        "self.calls += 1": raw_model.calls,
        "self.buffer += n": int(raw_model.in_place),
        "self.buffer = self.buffer + n": int(raw_model.assigned),
        "returned, added up outside": returned,
    }


def on_rank(rank: int, world_size: int) -> dict[str, Any]:
    raw_model = Noting()
    model = DistributedDataParallel(raw_model)
    return train(model, raw_model, torch.ones(BATCH // world_size, 2))


def main() -> dict[str, bool]:
    inputs = torch.ones(BATCH, 2)
    plain, wrapped = Noting(), Noting()
    single = train(plain, plain, inputs)
    dp = train(CPUDataParallel(wrapped, 2), wrapped, inputs)
    ddp = values(on_rank, 2)
    print(f"after {STEPS} forwards of {BATCH} samples: one device, DP on 2, rank 0 and 1 of DDP")
    for way, value in single.items():
        cells = (value, dp[way], *(rank[way] for rank in ddp))
        print(f"  {way:32}" + "".join(f"{cell!s:>6}" for cell in cells))
    calls, in_place, assigned, returned = dp.values()
    total = BATCH * STEPS
    return {
        "an attribute that forward sets belongs to a replica, and is discarded with it": calls == 0,
        "a buffer that forward replaces is discarded, too": assigned == 0,
        "a buffer that forward changes in place keeps the first replica's half only": in_place
        == total // 2,
        "cure: the outputs of forward are gathered from all replicas, so count outside": returned
        == total,
        "cure: DDP has no replicas, and each process keeps the state of its own share": all(
            rank["self.calls += 1"] == STEPS and rank["returned, added up outside"] == total // 2
            for rank in ddp
        ),
    }


if __name__ == "__main__":
    start(main, "A forward counts its calls. What does the counter say after steps with DP?")
