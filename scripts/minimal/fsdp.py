"""Train MNIST with fully sharded data parallelism (FSDP): each rank keeps a part of the weights.

    torchrun --standalone --nproc_per_node 2 fsdp.py

With DDP, each GPU holds all weights, gradients and optimizer states. With FSDP, it holds its part
of them, so larger models fit. In return, weights are sent in each forward and backward. Compare
this file with ddp.py: each difference has a comment that begins with FSDP.

    diff ddp.py fsdp.py
"""

import argparse
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
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
    # FSDP: each forward collects weights from all ranks, in the test too. So all ranks need equally
    # many batches, and at least one image: each share is cut into the same number of batches.
    num_batches = math.ceil(len(test_set) / world_size / 500)
    batches = torch.arange(rank, len(test_set), world_size).tensor_split(num_batches)
    test_loader = DataLoader(test_set, batch_sampler=[batch.tolist() for batch in batches])

    block1 = nn.Sequential(nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    block2 = nn.Sequential(nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10))
    model: nn.Module = nn.Sequential(block1, block2, head).to(device)
    # FSDP: fully_shard broadcasts nothing. Without this loop, the model would be put together from
    # parts of different models. (DDP's constructor broadcasts rank 0's weights.)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    # FSDP: a call makes one unit: its weights are collected before it computes, and freed after it.
    # The last call connects the units. The model stays the same object: there is no wrapper, but
    # each rank keeps only a part of each weight.
    for block in (block1, block2, head, model):
        fully_shard(block)
    held = sum(weight.to_local().numel() for weight in model.parameters())
    total = sum(weight.numel() for weight in model.parameters())
    if rank == 0:
        print(f"rank 0 holds {held} of {total} weights")
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
            # FSDP: the backward collects the weights again, averages the gradients over the ranks,
            # and leaves each rank its part of them. optimizer.step() sends nothing: each rank
            # updates its part of the weights.
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        # FSDP: rank 0's buffers are saved (the running statistics of batch normalisation), so all
        # ranks test with them. (DDP broadcasts them in a forward.)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
        model.eval()
        correct = torch.tensor(0, device=device)
        with torch.no_grad():
            for images, labels in test_loader:
                predicted = model(images.to(device)).argmax(dim=1)
                correct += (predicted == labels.to(device)).sum()
        # DDP: add up the counts of all ranks. All ranks make this call, and all get the result.
        dist.all_reduce(correct)
        # FSDP: all ranks send their parts to rank 0, which gets plain tensors. All make this call.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        # DDP: rank 0 alone prints and saves. A collective call in here would wait for the other
        # ranks, which do not make it.
        if rank == 0:
            print(f"epoch {epoch + 1}: lr {lr:g}, {correct / len(test_set):.2%} correct")
            # To keep a file for each epoch, name it f"model_{epoch + 1}.pt".
            # FSDP: the file is the same as that of the other scripts.
            torch.save(weights, "model.pt")
    # DDP: not in a `finally`. After an error on one rank, this call could wait for the others.
    dist.destroy_process_group()
    # FSDP: caches of PyTorch's DTensor still keep the process group. So on CPUs gloo's threads run
    # until Python ends, and may abort its end (pytorch/pytorch#179291). All is saved by then.


if __name__ == "__main__":
    main()
