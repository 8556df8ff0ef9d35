"""Train MNIST with DistributedDataParallel (DDP): one process for each GPU.

    torchrun --standalone --nproc_per_node 2 ddp.py

On two machines, give this command on each of them. $HOST0 is the name of the first machine, and
$NODE is 0 on the first machine and 1 on the second:

    torchrun --nnodes 2 --node_rank $NODE --master_addr $HOST0 --nproc_per_node 2 ddp.py

Without a GPU, the processes compute on the CPU. Compare this file with single.py: the differences,
each with a comment that begins with DDP, are what DDP needs. ddp_resume.py adds checkpoints.

    diff single.py ddp.py
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

# DDP: the wrapper imports this module. If that happened after init_process_group, the module would
# keep the process group (in default arguments), and gloo's threads could crash Python at its end.
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor


def main() -> None:
    parser = argparse.ArgumentParser(description="Train MNIST.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64, help="of each device")
    parser.add_argument("--data-dir", default="data", help="where MNIST is, or is downloaded to")
    args = parser.parse_args()

    # DDP: torchrun starts the processes and numbers them. RANK is unique in the whole job, and
    # LOCAL_RANK is unique on one machine. WORLD_SIZE is the number of processes of all machines.
    # (After init_process_group, dist.get_rank() and dist.get_world_size() return the same.)
    if "RANK" not in os.environ:
        sys.exit(f"start it with: torchrun --standalone --nproc_per_node 2 {sys.argv[0]}")
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    # DDP: each process uses a GPU of its own.
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # DDP: connect the processes. From here on they can call collectives, for example a barrier. All
    # of them must make the same calls in the same order. NCCL is for GPUs, and gloo for CPUs.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # DDP: each rank gets other random numbers, for its dropout. The first weights differ as well,
    # until rank 0's weights are broadcast below.
    torch.manual_seed(rank)

    # DDP: one process of each machine downloads, and the others wait at the barrier. Otherwise all
    # would write the same files at once. (If all machines share the folder, use rank instead.)
    if local_rank == 0:
        MNIST(args.data_dir, download=True)
    dist.barrier(device_ids=[local_rank])  # NCCL's barrier runs on this GPU; gloo's needs none
    train_set = MNIST(args.data_dir, train=True, transform=ToTensor(), download=True)
    test_set = MNIST(args.data_dir, train=False, transform=ToTensor(), download=True)
    # DDP: --batch-size is the batch of each process. A step uses the batches of all processes.
    global_batch_size = args.batch_size * world_size
    # This process loads each batch itself, when the loop asks for it. With num_workers=2, two other
    # processes load the next batches meanwhile.
    # DDP: the sampler shuffles in the same way on all ranks, and gives each rank its own share. All
    # shares are equally long, or a rank with one batch more would wait for the others in vain. The
    # defaults are right: shuffle=True, and num_replicas and rank from the process group.
    train_sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, drop_last=True)
    # DDP: each rank tests a share without padding, so that each image is tested exactly once. (With
    # DistributedSampler, some images would be tested twice, if the shares are not equally long.)
    test_loader = DataLoader(test_set, 500, sampler=range(rank, len(test_set), world_size))

    block1 = nn.Sequential(nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    block2 = nn.Sequential(nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10))
    model: nn.Module = nn.Sequential(block1, block2, head).to(device)
    # DDP: the wrapper broadcasts rank 0's weights, so that all ranks start with the same.
    model = DDP(model)
    # With a larger batch an epoch has fewer steps, so the rate of each step is higher. It is never
    # more than four times as high, because this training is short.
    lr = 0.03 * min(global_batch_size / 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)

    for epoch in range(args.epochs):
        # DDP: without this call, each epoch would have the order of the first one.
        train_sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            outputs = model(images.to(device))
            loss = F.cross_entropy(outputs, labels.to(device))
            # DDP: the backward averages the gradients over the ranks, bucket by bucket, while it
            # still computes. After it they are equal on all ranks. optimizer.step() sends nothing.
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        # DDP: the first forward of the test broadcasts rank 0's buffers (the running statistics of
        # batch normalisation), so all ranks test the model that rank 0 saves. Each rank has to take
        # part, so it needs a test image.
        model.eval()
        correct = torch.tensor(0, device=device)
        with torch.no_grad():
            for images, labels in test_loader:
                predicted = model(images.to(device)).argmax(dim=1)
                correct += (predicted == labels.to(device)).sum()
        # DDP: add up the counts of all ranks. All ranks make this call, and all get the result.
        dist.all_reduce(correct)
        # DDP: rank 0 alone prints and saves. A collective call in here would wait for the other
        # ranks, which do not make it. Save the model inside the wrapper: in the wrapper's own
        # state_dict(), each name begins with "module.", and no unwrapped model could load it.
        if rank == 0:
            print(f"epoch {epoch + 1}: lr {lr:g}, {correct / len(test_set):.2%} correct")
            # To keep a file for each epoch, name it f"model_{epoch + 1}.pt".
            torch.save(model.module.state_dict(), "model.pt")
    # DDP: not in a `finally`. After an error on one rank, this call could wait for the others.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
