"""Eight samples on one device, or on two: is the step the same?

The samples are the numbers 1 to 8, and the target of each is twice the number. The model multiplies
by one weight, which is 0 at first, and the loss is the mean squared error. Each of two devices gets
four samples.

a) Only with DP: DDP averages gradients, so its step is smaller.
b) With DP and with DDP.
c) With neither, because each device sees only half of the samples.

docs/concepts.md follows these numbers. DP is imitated here in three lines, and
03_data_parallel_by_hand shows all its steps.
"""

import _lesson as lesson
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

lesson.start(__doc__, answer="b")
numbers = torch.arange(1.0, 9.0)
dataset = TensorDataset(numbers, 2 * numbers)


class Line(nn.Module):
    """One weight, which is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs


def ddp(rank: int, world_size: int) -> tuple[float, float, float]:
    """Return this rank's own gradient, the gradient after the backward, and the new weight."""
    raw_model = Line()
    model = DistributedDataParallel(raw_model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own: list[float] = []
    raw_model.weight.register_hook(lambda gradient: own.append(gradient.item()))
    sampler: DistributedSampler = DistributedSampler(dataset, shuffle=False)
    for inputs, targets in DataLoader(dataset, batch_size=4, sampler=sampler):
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert raw_model.weight.grad is not None
    return own[0], raw_model.weight.grad.item(), raw_model.weight.item()


model = Line()
F.mse_loss(model(numbers), 2 * numbers).backward()
assert model.weight.grad is not None
gradient = model.weight.grad.item()
print(f"one device: gradient {gradient:.0f}, new weight {-0.01 * gradient:.2f}")

# DP: each copy of the weight multiplies one half. The loss is that of all outputs together.
weight = torch.zeros(1, requires_grad=True)
copies = [weight.clone(), weight.clone()]
outputs = torch.cat([copy * half for copy, half in zip(copies, numbers.chunk(2), strict=True)])
loss = F.mse_loss(outputs, 2 * numbers)
shares = [share.item() for share in torch.autograd.grad(loss, copies, retain_graph=True)]
loss.backward()
assert weight.grad is not None
print(f"DP:         {shares[0]:.0f} and {shares[1]:.0f}, together {weight.grad.item():.0f}")
# Each loss is divided by 8, so the gradients of the halves add up.
assert sum(shares) == weight.grad.item() == gradient

ranks = lesson.run(ddp, 2)
for rank, (own, averaged, new) in enumerate(ranks):
    print(f"DDP rank {rank}: alone {own:.0f}, averaged {averaged:.0f}, new weight {new:.2f}")
# Each rank's loss is divided by its own 4 samples, so the mean of the ranks is right.
assert (ranks[0][0] + ranks[1][0]) / 2 == ranks[0][1] == ranks[1][1] == gradient
assert ranks[0][2] == ranks[1][2] == torch.tensor(-0.01 * gradient).item()

lesson.claim("DP adds up its shares' gradients, DDP averages them, and both make the same step.")
