"""A right script that starts a process for each rank. Another file makes their group."""

import argparse
import os

import torch
import torch.distributed as dist
from common import loss_of, network, start
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(settings: argparse.Namespace) -> None:
    rank = settings.rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(settings.count)}
    start()
    model = DistributedDataParallel(network().cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, rank).backward()
    optimizer.step()
    torch.nn.DataParallel(model.module)  # as for a test afterwards
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    settings = argparse.Namespace(count=torch.cuda.device_count())
    processes = []
    for rank in range(settings.count):
        settings.rank = rank  # of the process that starts next
        processes.append(mp.Process(target=train, args=(settings,)))
        processes[-1].start()
    for process in processes:
        process.join()
