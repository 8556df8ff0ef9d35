"""Two ranks with unequal numbers of tokens: is the mean of their means the mean?

Rank 0 has two micro-batches of 9 tokens and 1, and rank 1 two of 3 tokens each. DDP averages the
ranks' gradients. By what has each rank to divide its summed losses, so that each of the 16 tokens
has the same weight?

a) By its own tokens: 10 and 6.
b) By the tokens of all ranks: 16.
c) By the tokens of all ranks divided by the world size: 8.

Asked in huggingface/transformers#34242, pytorch/torchtitan#2206 and modelscope/ms-swift#10165.
"""

import _lesson as lesson
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

lesson.start(__doc__, answer="c")
TOKENS = ((9, 1), (3, 3))  # in the two micro-batches of each rank; 16 in all
WAYS = (
    "mean of each micro-batch / micro-batches",
    "sum / tokens of this rank",
    "sum / tokens of all ranks",
    "sum / tokens of all ranks * world size",
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(rank)
    return [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in TOKENS[rank]]


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def work(rank: int, world_size: int) -> list[Tensor]:
    """Return the gradient that the optimizer would see, for each way to divide the loss."""
    found = []
    own = sum(TOKENS[rank])
    of_all = torch.tensor(own)
    dist.all_reduce(of_all)  # before the first backward: one small collective in each step
    # DDP divides the ranks' sum by world_size. The last divisor undoes that.
    divisors = (None, own, of_all.item(), of_all.item() / world_size)
    for divisor in divisors:
        model = DistributedDataParallel(build())
        for i, (inputs, labels) in enumerate(batches(rank)):
            model.require_backward_grad_sync = i == 1
            loss = F.cross_entropy(model(inputs), labels, reduction="sum")
            (loss / (divisor or 2 * len(labels))).backward()
        found.append(gradient(model))
    return found


single = build()
inputs, labels = map(torch.cat, zip(*batches(0), *batches(1), strict=True))
F.cross_entropy(single(inputs), labels).backward()
right = gradient(single)
print(f"Tokens in the micro-batches: rank 0 {TOKENS[0]}, rank 1 {TOKENS[1]}")
off = []
for way, found in zip(WAYS, lesson.run(work, 2)[0], strict=True):
    off.append(((found - right).norm() / right.norm()).item())
    print(f"  {way:42}{off[-1]:6.3f} off the gradient of all tokens at once")
# A mean of means gives one token the weight of nine others.
assert off[0] > 0.1
# Divided by a rank's own tokens, the micro-batches are right, and the ranks are still wrong.
assert 0.01 < off[1] < off[0]
# Divided by the tokens of all ranks, the gradient is too small by the world size.
assert abs(off[2] - 0.5) < 1e-9
assert off[3] < 1e-12

lesson.claim("divide a step's summed losses by all ranks' tokens, and multiply by the world size.")
