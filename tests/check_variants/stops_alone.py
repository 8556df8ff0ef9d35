"""A layer is not used, the ranks share no samples out, and rank 0 stops on its own."""

import torch
import torch.nn.functional as F
from common import Images, loss_of, network, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

rank, _ = start()
raw_model = network()
raw_model.head = nn.Linear(2, 2)
raw_model.forward = lambda images: raw_model[:3](images)
model = DistributedDataParallel(raw_model.cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):  # DDP refuses the second forward
    loss_of(model, rank).backward()
    optimizer.step()  # finds: unused parameters

model = DistributedDataParallel(network().cuda())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
part = Subset(Images(600), range(400 + 200 * rank))
loader = DataLoader(part, 64, shuffle=True)  # finds: unequal batches + equal shares
for _ in range(8):
    for images, labels in loader:
        loss = F.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()  # finds: a rank stops alone
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        break  # finds: a rank stops alone
