"""Right ways that look like mistakes, or that a check could stumble over."""

import argparse
import copy
import fcntl
import importlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import wandb
from common import Images, network, start
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    get_worker_info,
    random_split,
)
from torch.utils.tensorboard.writer import SummaryWriter

total_batch_size = 524288  # a constant, from which others are computed
assert total_batch_size % 1024 == 0

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=300)
parser.add_argument("--batch-size", type=int, default=4096)
parser.add_argument("--local-rank", type=int, default=0)
args = parser.parse_args()
assert args.local_rank == int(os.environ["LOCAL_RANK"])

rank, world_size = start()
torch.ones(2, device="cuda")
made: list[torch.Tensor] = []
thread = threading.Thread(target=lambda: made.append(torch.arange(4).cuda()))
thread.start()
thread.join()
made[0].record_stream(torch.cuda.current_stream())
assert torch.overrides.is_tensor_method_or_property(torch.Tensor.add)  # as torch.fx asks
assert len(torch.cuda.get_rng_state_all()) == torch.cuda.device_count() == 2
assert len(torch.cuda.get_rng_state(device=rank)) > 0
assert torch.histc(made[0], bins=4).dtype == torch.int64  # CPUs have it for floats alone
with open("lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    torch.save(torch.ones(2), "shared.pt")  # one rank after the other
    fcntl.flock(file, fcntl.LOCK_UN)
subprocess.run(["true"], check=True)
logging.getLogger().addHandler(logging.FileHandler("all.log"))
with tempfile.TemporaryDirectory() as folder:  # as some do with their settings
    Path(folder, "settings.py").write_text("rate = 0.1")
    sys.path.insert(0, folder)
    assert importlib.import_module("settings").rate == 0.1


class Writer(SummaryWriter):
    """As some derive their own."""

    def add_scalar(self, *args: object) -> None:
        super().add_scalar(*args)


class Drawn(Images):
    """Draws an image, whatever the index is, and each rank draws others."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        assert get_worker_info() is not None
        return super().__getitem__(int(torch.randint(len(self), ())))


class Packed(BatchSampler):
    """Has no length, since it does not call the method of its base."""

    def __init__(self) -> None:
        self.batches = [[0, 1], [2, 3]]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


shown = {}
shown["losses"] = rank == 0
if dist.is_initialized():
    dist.barrier()
if not os.path.exists("more"):  # noqa: SIM102
    if rank == 0:
        os.makedirs("more")
if rank == 0:
    with Writer("runs") as writer:
        writer.add_scalar("loss", 1.0, 1)
    Path("runs/settings.txt").write_text("rate 0.1")
    assert wandb.init(config={"lr": 0.1}).config.lr == 0.1

kept = torch.Generator().manual_seed(0)
train_set, valid_set = random_split(Images(2400), [2000, 400], generator=kept)
random_split(Images(100), [0.8, 0.2], generator=kept)
sampler = DistributedSampler(train_set, drop_last=True)
loader = DataLoader(
    train_set, args.batch_size, sampler=sampler, num_workers=2, persistent_workers=True
)
test_set = Images(101, seed=1)
test_loader = DataLoader(test_set, 32, sampler=range(rank, len(test_set), world_size))
by_files, by_turns = (DataLoader(test_set, 32, sampler=test_loader.sampler) for _ in "12")
own = torch.Generator().manual_seed(rank)  # all of the data, in another order on each rank
whole_loader = DataLoader(Images(64, seed=2), 32, shuffle=True, generator=own)

raw_model = network(nn.BatchNorm1d(16), nn.SyncBatchNorm(16), nn.Dropout(0.1)).cuda()
for _ in range(2):  # as what counts a model's operations
    copy.deepcopy(raw_model).eval()(torch.ones(2, 8))
next(raw_model.parameters()).requires_grad_(False)
model = DistributedDataParallel(raw_model, device_ids=[rank])
assert model.device_ids == [rank]
with torch.no_grad():
    for images, _ in DataLoader(test_set, batch_sampler=Packed()):
        raw_model.eval()(images.cuda())
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
average, teacher = torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(raw_model).eval()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = OneCycleLR(optimizer, 0.1, epochs=args.epochs, steps_per_epoch=len(loader))
scaler = torch.amp.GradScaler("cuda")
other = DistributedDataParallel(network().cuda())
second = torch.optim.Adam(other.parameters(), betas=(0.5, 0.9))
plain = copy.deepcopy(other.module)  # which all ranks train alike
third = torch.optim.SGD(plain.parameters(), 0.1)
for images, labels in DataLoader(Images(64), 32):
    F.cross_entropy(plain(images.cuda()), labels.cuda()).backward()
    third.step()
    third.zero_grad()
for images, labels in loader:  # in the order of epoch 0, before it
    F.cross_entropy(other(images.cuda()), labels.cuda()).backward()
    second.step()
    second.zero_grad()

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for number, (images, labels) in enumerate(loader):
        images, labels = images.cuda(), labels.cuda()
        with torch.no_grad():
            teacher(images)
        model.require_backward_grad_sync = number % 2 == 1
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(images.half()), labels)
        scaler.scale(loss).backward()
        scheduler.step()
        if number % 2 == 1:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update_parameters(model)
        second.zero_grad()
        outputs = other(images)
        gathered = [torch.zeros_like(outputs) for _ in range(world_size)]
        dist.all_gather(gathered, outputs)
        gathered[rank] = outputs  # so that it has a gradient
        torch.cat(gathered).square().mean().backward()
        second.step()

    for buffer in raw_model.buffers():
        dist.broadcast(buffer, 0)
    model.eval()
    sums = torch.zeros(2).cuda()
    with torch.no_grad():
        for images, labels in test_loader:
            loss = F.cross_entropy(raw_model(images.cuda()), labels.cuda(), reduction="sum")
            sums += torch.tensor([loss, len(labels)])
    dist.all_reduce(sums, op=dist.ReduceOp.AVG)  # the loss is sums[0] / sums[1], as of the sums
    if rank == 0:
        torch.save(raw_model.state_dict(), "model.pt")
    dist.barrier()
    if torch.cuda.is_available():
        raw_model.load_state_dict(torch.load("model.pt", map_location=f"cuda:{rank}"))
    else:
        raw_model.load_state_dict(torch.load("model.pt"))
    with torch.no_grad():
        average(images)
        for images, _ in loader:  # the training data, too, with the loader of the training
            raw_model(images.cuda())
    stop = torch.tensor(float(rank == 0 and sums[1] < 0)).cuda()
    dist.all_reduce(stop)
    if stop > 0:
        break
    with torch.no_grad():
        for images, _ in whole_loader:
            raw_model(images.cuda())
        answers = [raw_model(images.cuda()).argmax(dim=1) for images, _ in by_files]
    Path(f"rank_{rank}.txt").write_text(str(answers))  # which rank 0 may read
model.train()
for images, labels in DataLoader(Drawn(200), 8, num_workers=1):
    F.cross_entropy(model(images.cuda()), labels.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
mean = torch.tensor([float(rank)]).cuda()
dist.all_reduce(mean, op=dist.ReduceOp.AVG)
assert mean.item() == 0.5
assert (epoch, args.batch_size) == (1, 4)
for buffer in raw_model.buffers():
    dist.broadcast(buffer, 0)
model.eval()
with torch.no_grad():
    answers = [raw_model(images.cuda()).argmax(dim=1) for images, _ in by_turns]
for source in range(world_size):
    dist.broadcast(torch.cat(answers)[:8], source)
dist.destroy_process_group()
