"""Break it: a mean of means, when ranks or micro-batches have unequal numbers of tokens.

It prints each loss beside the right one, for ranks and for micro-batches. Asked in
huggingface/transformers#34242, pytorch/torchtitan#2206 and modelscope/ms-swift#10165.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _lesson import start, values
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[Tensor, Tensor]
TOKENS = ((9, 1), (3, 3))  # in the micro-batches of each rank; 16 in all
TOTAL = sum(map(sum, TOKENS))
CASES = (
    "mean of each micro-batch / micro-batches",
    "sum / tokens of this rank",
    "sum / tokens of all ranks",
    "sum / tokens of all ranks * world size",
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def batches(rank: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(n, 4, generator=generator).double() for n in TOKENS[rank]]
    return [(x, torch.randint(3, (len(x),), generator=generator)) for x in inputs]


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def work(rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the gradient that the optimizer would see, for each way to divide the loss."""
    mine, found = batches(rank), {}
    tokens = torch.tensor(sum(TOKENS[rank]))
    dist.all_reduce(tokens)  # known before the first backward: one small collective a step
    for case in CASES:
        divisor = {
            CASES[1]: sum(TOKENS[rank]),
            CASES[2]: int(tokens),
            CASES[3]: int(tokens) / world_size,  # DDP divides the sum of the ranks by world_size
        }
        model = DistributedDataParallel(build())
        for i, (inputs, labels) in enumerate(mine):
            model.require_backward_grad_sync = i == len(mine) - 1
            total = F.cross_entropy(model(inputs), labels, reduction="sum")
            # The mean of a micro-batch divides by its own number of tokens.
            (total / divisor.get(case, len(labels) * len(mine))).backward()
        found[case] = gradient(model)
    return found


def main() -> dict[str, bool]:
    print(f"tokens in the micro-batches: rank 0 {TOKENS[0]}, rank 1 {TOKENS[1]}, in all {TOTAL}")
    single = build()
    inputs, labels = map(torch.cat, zip(*batches(0), *batches(1), strict=True))
    F.cross_entropy(single(inputs), labels).backward()
    right = gradient(single)
    off = {}
    for case, found in values(work, 2)[0].items():
        off[case] = float((found - right).norm() / right.norm())
        print(f"  {case:42}{off[case]:6.3f} off the gradient of all tokens at once")
    return {
        "a mean of means weights one token like nine others": off[CASES[0]] > 0.1,
        "divided by this rank's tokens, the micro-batches are right and the ranks are wrong": (
            0.01 < off[CASES[1]] < off[CASES[0]]
        ),
        "divided by the tokens of all ranks, the gradient is too small by the world size": (
            abs(off[CASES[2]] - 0.5) < 1e-9
        ),
        "cure: times the world size, it is the gradient of one device": off[CASES[3]] < 1e-12,
    }


if __name__ == "__main__":
    start(main, "Two ranks have unequal numbers of tokens. Is the mean of their means the mean?")
