"""Train MNIST with DistributedDataParallel: one process for each GPU, on one machine or several.

    torchrun --standalone --nproc_per_node 2 scripts/minimal/ddp.py
    diff scripts/minimal/single.py scripts/minimal/ddp.py

On two machines give the same command on each. $HOST0 is the name or address of the first one, and
--nproc_per_node is the number of GPUs of each machine:

    torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint $HOST0:29500 \
        scripts/minimal/ddp.py

Without a GPU the processes share the CPU. ddp_complete.py beside it resumes, stops on a signal and
restarts. train_ddp.py also survives lost machines.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

# The folder of data.py and models.py. Remove this line if yours lie beside your script.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data import SOURCES, load_tensors
from models import build_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train MNIST.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=96, help="of each device")
    parser.add_argument("--dataset", default="mnist", choices=SOURCES)
    parser.add_argument("--data-dir", default="data")
    args = parser.parse_args()

    # DDP: torchrun starts the processes. Each process learns from its environment which one it is.
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        parser.exit(2, f"start it with: torchrun --standalone --nproc_per_node 2 {sys.argv[0]}\n")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # DDP: LOCAL_RANK, the number on this machine, chooses the GPU, since RANK counts over all
    # machines. If a scheduler shows each process a single GPU, that GPU is number 0 for each.
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # DDP: each process waits here until all of them have come.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # DDP: with one seed for all, every process would draw the same dropout. The first weights may
    # differ, because DistributedDataParallel overwrites them with those of rank 0.
    torch.manual_seed(rank)

    train_set, test_set = load_tensors(args.dataset, args.data_dir)
    # DDP: each process has its own batch, and one step uses the batches of all processes.
    global_batch_size = args.batch_size * world_size
    # DDP: the sampler shuffles, and cuts the epoch into one share for each process. The shares
    # have equal lengths: a process with one batch more would wait for the others for ever.
    train_sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, drop_last=True)
    # DDP: that sampler leaves images out, but each test image has to count exactly once. These
    # shares may differ in length, since no process waits for another one while it evaluates.
    test_loader = DataLoader(test_set, 500, sampler=range(rank, len(test_set), world_size))

    # Two names for one model: dp.py and ddp.py train a wrapped one. All evaluate and save this one.
    raw_model = build_model("convnet").to(device)
    # DDP: the wrapper sends rank 0's weights to all now, and averages gradients in each backward.
    model = DistributedDataParallel(raw_model)
    # Linear scaling: a larger batch makes fewer steps, so each step is longer. The factor is at
    # most four, since larger rates make training fail. The schedule begins with a small rate,
    # because a large one is harmful while the weights are still random.
    lr = 0.1 * min(global_batch_size / 96, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    scheduler = OneCycleLR(optimizer, lr, total_steps=args.epochs * len(train_loader))

    for epoch in range(args.epochs):
        # DDP: without this call, every epoch would have the order of the first.
        train_sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()

        # DDP: batch normalisation's running statistics differ between the processes, as each has
        # seen other images. Send rank 0's to all, so that all evaluate the model that is saved.
        for buffer in raw_model.buffers():
            dist.broadcast(buffer, src=0)
        raw_model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # of loss, correct and count
        with torch.no_grad():
            for images, labels in test_loader:
                logits, labels = raw_model(images.to(device)), labels.to(device)
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(dim=1) == labels).sum()
                sums[2] += len(labels)
        # DDP: this adds up the sums of all shares, in place. Every process has to call it.
        dist.all_reduce(sums)
        # Divide last: the last batch may be shorter, and a mean of means would then be wrong.
        loss, correct, count = sums.tolist()
        # DDP: one process prints and writes. What you add below this line runs on rank 0 alone, so
        # it must not wait for other processes.
        if rank != 0:
            continue
        print(f"epoch {epoch + 1}: loss {loss / count:.4f}, {correct / count:.2%} of {count:.0f}")
        # Written under another name first: model.pt is whole, even if this process is killed here.
        torch.save(raw_model.state_dict(), "model.pt.tmp")
        os.replace("model.pt.tmp", "model.pt")
    # DDP: not in a `finally` and not at exit. After an exception in one process the others wait in
    # an all-reduce, this call can wait for them with NCCL, and torchrun would see no failure.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
