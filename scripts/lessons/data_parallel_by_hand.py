"""nn.DataParallel in its four steps, by hand: their cost, and where the gradients are summed.

It prints the time of each step, and where the gradients are before and after it. A loss that
forward computes: asked in Lightning-AI/pytorch-lightning#249 and huggingface/trl#7018.
"""

import copy
import time
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from _lesson import start
from torch import Tensor, nn
from utils.data_parallel import CPUDataParallel  # DataParallel's forward, on threads

import models

REPLICAS = 2
ROUNDS = 10
STEPS = ("scatter the batch", "replicate the model", "parallel apply", "gather", "backward")


class WithLoss(nn.Module):
    """A model that computes its loss itself, which takes work off the first device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(self.model(images), labels, reduction=reduction)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def by_hand(dp: CPUDataParallel, images: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
    """Do one forward and backward; return the logits and the seconds of each step."""
    times = [time.perf_counter()]
    shares, kwargs = dp.scatter((images,), {}, dp.device_ids)
    times.append(time.perf_counter())
    replicas = dp.replicate(dp.module, dp.device_ids)
    times.append(time.perf_counter())
    outputs = dp.parallel_apply(replicas, shares, kwargs)
    times.append(time.perf_counter())
    logits = dp.gather(outputs, dp.output_device)
    times.append(time.perf_counter())
    F.cross_entropy(logits, labels).backward()  # through the copies, into dp.module
    times.append(time.perf_counter())
    # A replica keeps no gradient: its weights are not parameters, but results of a copy.
    assert not any(list(replica.parameters()) for replica in replicas)
    return logits, [end - begin for begin, end in pairwise(times)]


def main() -> dict[str, bool]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    images, labels = torch.randn(512, 1, 28, 28), torch.randint(10, (512,))
    model = models.build_model("mlp")
    single = copy.deepcopy(model)
    dp = CPUDataParallel(model, REPLICAS)

    rounds = []
    for _ in range(ROUNDS):
        model.zero_grad()
        logits, seconds = by_hand(dp, images, labels)
        rounds.append(seconds)
    print(f"one step on {REPLICAS} replicas, batch {len(images)}, median of {ROUNDS}:")
    for name, times in zip(STEPS, zip(*rounds, strict=True), strict=True):
        print(f"  {name:<22}{median(times) * 1e3:8.2f} ms")

    F.cross_entropy(single(images), labels).backward()
    of_batch = gradients(single)
    single.zero_grad()
    for image_share, label_share in zip(images.chunk(2), labels.chunk(2), strict=True):
        # Each backward adds to the gradients.
        (F.cross_entropy(single(image_share), label_share, reduction="sum") / 512).backward()
    summed, same_logits = gradients(single), torch.equal(dp(images), logits)
    ten, three = (
        [len(share[0]) for share in dp.scatter((torch.zeros(n),), {}, range(4))[0]] for n in (10, 3)
    )
    print(f"batch 10 on 4 replicas is split {ten}, batch 3 {three}")

    images, labels = images[:10], labels[:10]
    loss = F.cross_entropy(single(images), labels)
    with_loss = CPUDataParallel(WithLoss(model), 4)
    shares = with_loss(images, labels, "mean")  # a scalar from each replica
    summed_loss = with_loss(images, labels, "sum").sum() / len(images)
    print(f"the loss of these 10 is {loss:.4f}; computed in forward, it is gathered as")
    print(f"  {[round(share, 4) for share in shares.tolist()]}, whose mean is {shares.mean():.4f}")
    return {
        "the four steps give the logits of DataParallel's own forward": same_logits,
        "the gradients are those of one device": torch.allclose(
            gradients(model), of_batch, atol=1e-12
        ),
        "they are a sum of the shares' gradients, not a mean, because each share's loss is divided "
        "by the size of the whole batch": torch.allclose(gradients(model), summed, atol=1e-12),
        "with fewer samples than devices some devices have no work": len(three) == 3,
        "a loss that forward computes is gathered as a vector": shares.shape == (4,),
        "its mean weights one sample like three others": abs((shares.mean() - loss).item()) > 1e-3,
        "cure: sums, divided by the size of the whole batch": torch.allclose(summed_loss, loss),
    }


if __name__ == "__main__":
    start(main)
