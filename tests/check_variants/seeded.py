"""Each rank that is spawned imports this file, and so it seeds itself with the same number."""

import torch
import torch.distributed as dist
from common import network
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)  # finds: equal random numbers


def train(rank: int, world_size: int) -> None:
    dist.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:29500", rank=rank, world_size=world_size
    )
    model = DistributedDataParallel(network(nn.Dropout(0.5)).cuda(rank), device_ids=[rank])
    torch.randn(1 - rank)  # which rank 0 alone would, for pictures that it draws later
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(train, args=(2,), nprocs=2)
