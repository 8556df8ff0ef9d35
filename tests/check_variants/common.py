"""What the scripts beside this file share: images, a network, and the start of a rank."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Images(Dataset):
    """Drawn images, the same on each rank, with labels that a network can learn."""

    def __init__(self, count: int, seed: int = 0) -> None:
        drawn = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
        self.images, self.labels = drawn, drawn[:, :4].argmax(dim=1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


def network(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *more, nn.Linear(16, 4))


def start() -> tuple[int, int]:
    """Start a rank as is usual, and return its number and the number of ranks."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(dist.get_rank())
    return dist.get_rank(), dist.get_world_size()


def batch(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Draw a batch of images and labels, another one for each rank and step."""
    drawn = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return drawn.cuda(), drawn[:, :4].argmax(dim=1).cuda()


def loss_of(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    images, labels = batch(rank, step)
    return F.cross_entropy(model(images), labels)
