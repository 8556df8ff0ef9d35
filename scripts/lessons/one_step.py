"""One step by hand and by PyTorch: eight samples on two devices, with DataParallel and with DDP.

It prints the gradient of each share, the joined gradient and the new weight. docs/concepts.md
follows these numbers.
"""

import torch
import torch.nn.functional as F
from _lesson import start, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from utils.data_parallel import CPUDataParallel

NUMBERS = torch.arange(1.0, 9.0)
DATASET = TensorDataset(NUMBERS, 2 * NUMBERS)  # the target of each sample is twice its number
UNEQUAL = [range(5), range(5, 8)]


class Line(nn.Module):
    """One weight, at first 0. The model keeps the gradient of each share before any exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.shares: list[tuple[list[int], float]] = []  # the replicas of DataParallel share it

    def forward(self, inputs: Tensor) -> Tensor:
        numbers = inputs.int().tolist()
        self.weight.register_hook(lambda grad: self.shares.append((numbers, grad.item())))
        return self.weight * inputs


def step(raw_model: Line, model: nn.Module, loader: DataLoader) -> tuple[list, float, float]:
    """Make one step; return the gradients of the shares, the joined gradient and the weight."""
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.01)
    for inputs, targets in loader:  # there is one batch
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    assert raw_model.weight.grad is not None
    return sorted(raw_model.shares), raw_model.weight.grad.item(), raw_model.weight.item()


def with_ddp(rank: int, world_size: int, equal: bool) -> tuple[list, float, float]:
    raw_model = Line()
    model = DistributedDataParallel(raw_model)
    sampler: DistributedSampler = DistributedSampler(DATASET, shuffle=False)
    data = DATASET if equal else Subset(DATASET, UNEQUAL[rank])
    return step(raw_model, model, DataLoader(data, 5, sampler=sampler if equal else None))


def show(name: str, result: tuple[list, float, float]) -> None:
    shares, gradient, weight = result
    for numbers, own in shares:
        print(f"{name:24}{numbers} alone: {own:.2f}")
    print(f"{name:24}gradient {gradient:.2f}, new weight {weight:.4f}")


def adam(gradient: float) -> float:
    """Return the length of Adam's first step."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.tensor([gradient])
    torch.optim.Adam([weight], lr=0.01).step()
    return weight.item()


def main() -> dict[str, bool]:
    raw_model = Line()
    single = step(raw_model, raw_model, DataLoader(DATASET, batch_size=8))
    show("one device", single)
    raw_model = Line()
    dp = step(raw_model, CPUDataParallel(raw_model, 2), DataLoader(DATASET, batch_size=8))
    show("DataParallel", dp)
    ddp, unequal = values(with_ddp, 2, True), values(with_ddp, 2, False)
    for name, ranks in (("DDP", ddp), ("unequal shares", unequal)):
        for rank, result in enumerate(ranks):
            show(f"{name}, rank {rank}", result)
    total = single[1] * len(NUMBERS)
    first = {gradient: adam(gradient) for gradient in (single[1], total)}
    print("Adam's first step:      ", {g: round(length, 4) for g, length in first.items()})
    return {
        "one device, DataParallel and DDP make the same step": (
            single[1:] == dp[1:] == ddp[0][1:] == ddp[1][1:]
        ),
        "DataParallel sums the gradients of its shares": sum(own for _, own in dp[0]) == dp[1],
        "DDP averages those of its ranks": (ddp[0][0][0][1] + ddp[1][0][0][1]) / 2 == ddp[0][1],
        "with unequal shares the mean over ranks is wrong": abs(unequal[0][1] - single[1]) > 1,
        "Adam hides a sum that should be a mean": abs(first[single[1]] - first[total]) < 1e-6,
    }


if __name__ == "__main__":
    start(main)
