"""A right script that starts its ranks itself, and has numbers that argparse does not see.

Its parent makes a folder, and seeds what the ranks do not draw.
"""

import os
import sys

import torch
import torch.distributed as dist
from common import network
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, world_size: int, epochs: int) -> None:
    assert epochs == 2
    dist.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:29500", rank=rank, world_size=world_size
    )
    torch.cuda.set_device(rank)
    model = DistributedDataParallel(network().cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(epochs):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.mkdir("logs")
    torch.manual_seed(0)  # which does not reach the ranks
    count = torch.cuda.device_count()
    mp.spawn(train, args=(count, int(sys.argv[sys.argv.index("--epochs") + 1])), nprocs=count)
