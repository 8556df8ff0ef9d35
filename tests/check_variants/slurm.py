"""A right script that Slurm starts. It goes on with a run, which may be complete."""

import os

import torch
import torch.distributed as dist
from common import loss_of, network
from torch.nn.parallel import DistributedDataParallel

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
torch.cuda.set_device(int(os.environ["SLURM_LOCALID"]))
dist.init_process_group(
    "nccl", init_method="tcp://127.0.0.1:29500", rank=rank, world_size=world_size
)
raw_model, done = network().cuda(), 0
if os.path.exists("runs/last.pt"):
    kept = torch.load("runs/last.pt", map_location="cpu")
    raw_model.load_state_dict(kept.get("model", {}), strict=False)
    done = kept["epochs done"]
model = DistributedDataParallel(raw_model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(done, 5):
    optimizer.zero_grad()
    loss_of(model, rank, epoch).backward()
    optimizer.step()
    if rank == 0:
        os.makedirs("runs", exist_ok=True)
        torch.save({"model": raw_model.state_dict(), "epochs done": epoch + 1}, "runs/last.pt")
dist.destroy_process_group()
