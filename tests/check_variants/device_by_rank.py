"""The device is chosen by RANK, on two hosts of one GPU each."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["RANK"]))  # finds: device by global rank
