"""A right script that fails if its numbers are made small, and asks for the terminal's width."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Images, network, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, random_split

_, width = map(int, os.popen("stty size", "r").read().split())
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--decay-epoch", type=int, default=100)
args = parser.parse_args()
rank, world_size = start()
assert args.epochs > args.decay_epoch, "the decay must start before the training ends"

whole_set = Images(640)
count = len(whole_set) // 20 + 1
kept = torch.Generator().manual_seed(0)
train_set, valid_set = random_split(whole_set, [len(whole_set) - count, count], generator=kept)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, 16, sampler=sampler)
valid_loader = DataLoader(valid_set, 16, sampler=range(rank, len(valid_set), world_size))
raw_model = network(nn.BatchNorm1d(16)).cuda()
model = DistributedDataParallel(raw_model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
best = 0.0
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
    for buffer in raw_model.buffers():
        dist.broadcast(buffer, 0)
    model.eval()
    sums = torch.zeros(2).cuda()
    with torch.no_grad():
        for images, labels in valid_loader:
            answers = raw_model(images.cuda()).argmax(dim=1)
            sums += torch.tensor([(answers == labels.cuda()).sum(), len(labels)])
    dist.all_reduce(sums)
    if sums[0] / sums[1] > best:
        best = sums[0] / sums[1]
        if rank == 0:
            torch.save(raw_model.state_dict(), "best.pt")
    dist.barrier()
    torch.load("best.pt", map_location="cpu")
    with torch.no_grad():
        pictures = [raw_model(images.cuda()) for images, _ in DataLoader(Images(300), 64)]
    assert len(torch.cat(pictures)) == 300, "the metric needs them all"
dist.destroy_process_group()
