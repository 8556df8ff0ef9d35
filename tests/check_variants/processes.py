"""A right script that starts a process for each rank. Another file makes their group."""

import os

import torch
import torch.distributed as dist
from common import loss_of, network, start
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, world_size: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    start()
    model = DistributedDataParallel(network().cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, rank).backward()
    optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    count = torch.cuda.device_count()
    processes = [mp.Process(target=train, args=(rank, count)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
