"""Two models in an object, of which one is not wrapped, and one is changed after wrapping."""

import torch
import torch.distributed as dist
from common import network, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Translation:
    def __init__(self) -> None:
        self.G_AB, self.G_BA = network().cuda(), DistributedDataParallel(network().cuda())
        models = (self.G_AB, self.G_BA)
        self.optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]

    def train(self, model: nn.Module, step: int) -> None:
        model(torch.randn(6, 8)).square().mean().backward()
        self.optimizers[step].step()  # finds: outside the wrapper


def begin(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)  # finds: loaded or changed after wrapping


rank, world_size = start()
translation = Translation()
translation.G_BA.apply(begin)
torch.manual_seed(0)  # finds: equal random numbers
translation.train(translation.G_BA, 1)
translation.train(translation.G_AB, 0)
dist.destroy_process_group()
