"""What a short run does not reach: a resume, a rare stop, an evaluation."""

import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import Images, loss_of, network, start
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def send(weights: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.broadcast(weights, src=0)
    else:
        dist.broadcast(weights, src=0)


def download() -> None:
    """Rank 0 alone comes here."""
    torch.hub.load_state_dict_from_url("https://localhost/weights.pt")


def prepare() -> None:
    if rank != 0:
        return
    download()


def convert() -> None:
    """Nothing calls this."""
    torch.save(torch.load("other.pt"), "converted.pt")


rank, world_size = start()
verbose = rank == 0
shutil.rmtree("old", ignore_errors=True)  # finds: every rank deletes
Path(time.strftime("%Y-%m-%d_%H-%M")).mkdir(exist_ok=True)  # finds: named by the clock
torch.ones(2).cuda(0)  # finds: uses another GPU
model = DistributedDataParallel(network().cuda())
ema = DistributedDataParallel(network().cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
patience = 0
total_loss, best_loss = 0.0, float("inf")
if os.path.exists("last.pt"):
    prepare()
    dist.broadcast(torch.ones(1), src=0, async_op=True)  # finds: not waited for
    ema.module.load_state_dict(torch.load("old.pt"))  # finds: loads onto one GPU
    if rank == 0:
        optimizer.load_state_dict(torch.load("rank_0.pt"))  # finds: resumes on one rank
    from torchvision.datasets import MNIST

    MNIST("data", download=True)  # finds: every rank downloads
train_set, batch_size = Images(600), 10
sampler = DistributedSampler(train_set)
whole = DataLoader(  # finds: batch of all ranks
    train_set, batch_size=batch_size * world_size, sampler=sampler
)
batch_size *= world_size
also_whole = DataLoader(  # finds: batch of all ranks
    train_set, batch_size=batch_size, sampler=sampler
)
batch_size //= world_size
local_rank = rank
test_sampler = DistributedSampler(  # finds: evaluates a share + equal shares
    train_set, world_size, rank=local_rank
)
total_steps = 2 * len(train_set) // batch_size  # finds: steps of all ranks
for step, _ in enumerate(DataLoader(train_set, batch_size, sampler=sampler)):
    if verbose and step > 1000:
        continue  # finds: a rank stops alone
    loss = loss_of(model, rank, step)
    try:
        loss.backward()
    except torch.cuda.OutOfMemoryError:  # finds: leaves a batch out
        continue
    optimizer.step()
    optimizer.zero_grad()
    if loss.item() > 1000:
        break  # finds: a rank stops alone
    total_loss += loss.item()
    if verbose:
        patience = step
    if patience > 1000:
        break  # finds: a rank stops alone
dist.broadcast_object_list([rank])
torch.cuda.set_device(0)
torch.ones(2).cuda()  # finds: uses another GPU
dist.broadcast_object_list([rank])  # finds: uses another GPU
if verbose and total_loss < best_loss:  # finds: chooses by a share
    torch.save(model.module.state_dict(), "last.pt")
    torch.save({"ema": ema.state_dict()}, "ema.pt")  # finds: names of the wrapper
    shutil.copy("ema.pt", "best.pt")
else:
    time.sleep(1)
    torch.load("ema.pt", map_location="cpu")  # finds: loads too early
    torch.load("best.pt", map_location="cuda:0")  # finds: loads too early + loads onto one GPU
