"""Evaluations of other weights, averages of means, and samples that repeat or are left out."""

import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Images, network, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler


class Padded(Sampler):
    """Repeats the first samples, so that all ranks have the same number."""

    def __init__(self, count: int) -> None:
        self.indices = [*range(count), *range(-count % world_size)][rank::world_size]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


rank, world_size = start()
train_set, test_set = Images(640), Images(203, seed=1)
sampler = DistributedSampler(train_set, drop_last=True)
loader = DataLoader(train_set, 16, sampler=sampler, drop_last=True)
part = range(rank, len(test_set), world_size)
every_second = DataLoader(test_set, 32, sampler=part)  # finds: evaluates other weights
third = DataLoader(test_set, 32, sampler=part)  # finds: evaluates other weights
means = DataLoader(test_set, 32, sampler=part)  # finds: mean of means
batches = DataLoader(test_set, 32, sampler=part)  # finds: mean of means
sent = DataLoader(test_set, 32, sampler=part)  # finds: mean of means
pads = DataLoader(  # finds: padded evaluation
    test_set, batch_sampler=BatchSampler(Padded(len(test_set)), 32, False)
)
drops = DataLoader(  # finds: samples left out + padded evaluation
    test_set, 32, sampler=DistributedSampler(test_set, shuffle=False), drop_last=True
)
even_set = Images(128, seed=1)
even = DataLoader(even_set, 32, sampler=DistributedSampler(even_set, shuffle=False))
halves = DataLoader(even_set, 32, sampler=DistributedSampler(even_set, shuffle=False))

raw_model = network().cuda()
early = copy.deepcopy(raw_model)
model = DistributedDataParallel(raw_model)
of_rank_0 = copy.deepcopy(raw_model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def evaluated(model: nn.Module, loader: DataLoader) -> torch.Tensor:
    """Return the correct answers of each batch, and the samples in it."""
    with torch.set_grad_enabled(loader is drops):  # some models need gradients for their answers
        answers = [(model(images.cuda()).argmax(dim=1), labels.cuda()) for images, labels in loader]
    return torch.tensor([((own == labels).sum(), len(labels)) for own, labels in answers])


for epoch in range(2):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
        averages = [early, of_rank_0] if rank == 0 else [early]
        for average in averages:
            for mean, parameter in zip(average.parameters(), raw_model.parameters(), strict=True):
                mean.data.lerp_(parameter.data, 0.1)

    for tested, share in (
        (early, every_second),
        (of_rank_0, third),
        (raw_model, pads),
        (raw_model, drops),
        (raw_model, even),
    ):
        sums = evaluated(tested, share).sum(dim=0)
        dist.all_reduce(sums)
    found = evaluated(raw_model, means).sum(dim=0)
    accuracy = 0 * found[0] / found[1]  # a model that is never right
    dist.all_reduce(accuracy)
    accuracy /= world_size
    found = evaluated(raw_model, batches)
    accuracy = (found[:, 0] / found[:, 1]).mean()
    dist.all_reduce(accuracy)
    print(accuracy.item() / world_size)
    found = evaluated(raw_model, sent).sum(dim=0)
    accuracies = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(accuracies, found[:1] / found[1:])
    print(torch.cat(accuracies).mean())
    found = evaluated(raw_model, halves).sum(dim=0)
    accuracy = found[0] / found[1]  # of equal shares
    dist.all_reduce(accuracy)
    accuracy /= world_size
    if rank == 0:
        torch.save({"accuracy": accuracy.item(), "count": [0] * sums[1].item()}, "last.pt")
        torch.load("last.pt", weights_only=True)
dist.destroy_process_group()
