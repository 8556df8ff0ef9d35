"""Mistakes with data, evaluations, files and devices."""

import contextlib
import os
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from common import Images, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, random_split
from torch.utils.tensorboard import SummaryWriter

EPOCHS = 2


class Changed(Images):
    """Its transform is a module, as those of torchvision are, and its samples are objects."""

    def __getitem__(self, index: int) -> Any:
        return SimpleNamespace(image=OrderedDict(pixels=nn.Identity()(self.images[index])))


dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
torchvision.datasets.MNIST("data", download=True)  # finds: every rank downloads
writer = SummaryWriter("runs")  # finds: every rank logs
writer.add_scalar("ranks", 2, 0)
with contextlib.suppress(FileExistsError):
    if not os.path.exists("made"):  # finds: every rank makes a folder
        os.makedirs("made")

train_set, test_set = Images(600), Images(101, seed=1)
torch.manual_seed(rank)
train_part, _ = random_split(train_set, [0.8, 0.2])
torch.manual_seed(0)  # finds: equal random numbers
sampler = DistributedSampler(train_set)
shared = DataLoader(train_set, 64, sampler=sampler)  # finds: no set_epoch
sampler = DistributedSampler(train_part, shuffle=False)
other = DataLoader(  # finds: other data + never shuffled
    train_part, 64, sampler=sampler
)

raw_model = network(nn.BatchNorm1d(16), nn.Dropout(0.1)).cuda()
model = DistributedDataParallel(  # finds: two ranks on one device
    raw_model, find_unused_parameters=True
)
optimizer = torch.optim.SGD(model.parameters(), 0.1)


changed = Changed(640)
beside = DataLoader(  # finds: no set_epoch
    changed, 64, sampler=DistributedSampler(changed), collate_fn=list
)


def train(loader: DataLoader, epoch: int) -> None:
    for (images, labels), _ in zip(loader, beside, strict=False):
        beside.sampler.set_epoch(epoch)  # too late, since a batch is drawn
        loss = F.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def correct(loader: DataLoader, batches: int = 99) -> torch.Tensor:
    """Return the number of correct answers and of samples."""
    found = torch.zeros(2).cuda()
    with torch.no_grad():
        for number, (images, labels) in enumerate(loader):
            if number >= batches:
                break
            answers = raw_model(images.cuda()).argmax(dim=1)
            found += torch.tensor([(answers == labels.cuda()).sum(), len(labels)])
    return found


local_rank = rank
by_local_rank = DistributedSampler(test_set, rank=local_rank)  # finds: equal shares
part = range(rank, len(test_set), world_size)
padded = DataLoader(  # finds: padded evaluation + buffers differ
    test_set, 32, sampler=DistributedSampler(test_set)
)
means = DataLoader(test_set, 32, sampler=part)  # finds: mean of means + buffers differ
share = DataLoader(test_set, 32, sampler=part)  # finds: evaluates a share
whole = DataLoader(test_set, 32)  # finds: evaluates in training mode

for epoch in range(EPOCHS):
    train(other, 2 * epoch)
    train(shared, 2 * epoch + 1)

    model.eval()
    sums = correct(means)
    accuracy = sums[0] / sums[1]
    dist.all_reduce(accuracy)
    accuracy /= world_size
    sums = correct(padded)
    dist.all_reduce(sums)
    accuracy = sums[0] / sums[1]
    accuracy = correct(share, len(share) - 1)[0] / len(test_set)
    model.train()
    correct(whole)
    torch.save(model.module.state_dict(), "model.pt")  # finds: every rank saves
dist.destroy_process_group()
