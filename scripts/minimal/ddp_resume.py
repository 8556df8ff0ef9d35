"""Train MNIST with DistributedDataParallel, in a run that can be stopped and resumed.

    torchrun --standalone --nproc_per_node 2 ddp_resume.py

The same command resumes the run from ./checkpoint.pt, also with more --epochs or with another
number of processes. On CPUs, with one or two processes, and the same number as before, the weights
become those of a run without a stop, to the last bit. To start from the beginning, remove
checkpoint.pt. Each run needs a folder of its own.

After SIGTERM or Ctrl-C, all processes finish the same step, rank 0 saves, and all end with status
0. torchrun itself then prints a traceback, and ends with status 1. It waits 30 seconds for the
processes (newer releases have --shutdown-timeout), so a step, an epoch's test and a save may take
no longer. A run that is killed loses at most 100 steps. To let torchrun start it again after an
error (pytorch/pytorch#135712):

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --max-restarts 3 ... ddp_resume.py

The learning rate falls, and follows from the position in the run. PyTorch's schedulers count their
own steps instead, and save the number of all steps. So for a scheduler save and load its
state_dict(), remove the lines that set the rate, and resume with the same --epochs and the same
number of processes. Otherwise OneCycleLR raises an error, and CosineAnnealingLR climbs again.

Compare this file with ddp.py: each addition has a comment that begins with RESUME or STOP.

    diff ddp.py ddp_resume.py
"""

import argparse
import os
import signal
import sys
from typing import Any

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
    # RESUME: the position is the number of complete epochs, and the number of images that all ranks
    # together have used of the next epoch.
    first_epoch = 0
    seen = 0
    # RESUME: rank 0 reads the file, and all ranks get what it has read. So only rank 0's machine
    # needs it. The tensors are read to the CPU, and load_state_dict copies each to its own GPU.
    # (Without map_location they would go to the GPU from which they were saved.)
    checkpoint: list[Any] = [None]
    if rank == 0 and os.path.exists("checkpoint.pt"):
        checkpoint[0] = torch.load("checkpoint.pt", map_location="cpu", weights_only=True)
    dist.broadcast_object_list(checkpoint, src=0)
    if checkpoint[0]:
        model.module.load_state_dict(checkpoint[0]["model"])
        optimizer.load_state_dict(checkpoint[0]["optimizer"])
        first_epoch = checkpoint[0]["epoch"]
        seen = checkpoint[0]["seen"]
        if rank == 0:
            print(f"resume after {first_epoch} of {args.epochs} epochs, and {seen} images")

    # RESUME: add what else has a state, and load it above: "scaler": scaler.state_dict().
    def save_checkpoint(epoch: int, seen: int) -> None:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        # If this process is killed while it saves, the checkpoint.pt of before is still whole.
        torch.save(state | {"epoch": epoch, "seen": seen}, "checkpoint.pt.tmp")
        os.replace("checkpoint.pt.tmp", "checkpoint.pt")

    # STOP: only remember the signal, so that it never interrupts a step or a save.
    signals: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(each, lambda number, frame: signals.append(number))
    # RESUME: begin with the epoch that was interrupted.
    for epoch in range(first_epoch, args.epochs):
        # DDP: without this call, each epoch would have the order of the first one.
        train_sampler.set_epoch(epoch)
        # RESUME: the ranks use the images of the shuffled epoch in turn, so each one leaves out the
        # beginning of its share. (If the new number of ranks does not divide the number of images
        # that have been used, a few of them are used again: fewer than there are ranks.)
        left = list(train_sampler)[seen // world_size :]
        train_loader = DataLoader(train_set, args.batch_size, sampler=left, drop_last=True)
        model.train()
        for step, (images, labels) in enumerate(train_loader, start=1):
            # RESUME: the dropout and the rate of a step follow from its position alone, so they are
            # right after a resume, and with another number of ranks. (If your parameter groups have
            # rates of their own, multiply each of these instead of lr.)
            position = epoch * len(train_set) + seen
            torch.manual_seed(position * world_size + rank)
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - position / (args.epochs * len(train_set)))
            outputs = model(images.to(device))
            loss = F.cross_entropy(outputs, labels.to(device))
            # DDP: the backward averages the gradients over the ranks, bucket by bucket, while it
            # still computes. After it they are equal on all ranks. optimizer.step() sends nothing.
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += global_batch_size
            # STOP: all ranks must leave the loop after the same step, or some would wait for ranks
            # that have left. So they add up how many signals they have received. (`if stop` waits
            # for the GPU. If your steps are short, vote every ten steps, and in an epoch's last.)
            stop = torch.tensor(len(signals), device=device)
            dist.all_reduce(stop)
            # RESUME: a run that is killed goes on from here.
            if rank == 0 and (stop or step % 100 == 0):
                save_checkpoint(epoch, seen)
            # STOP: all ranks end here, and with status 0.
            if stop:
                if rank == 0:
                    print(f"stopped after {seen} images of epoch {epoch + 1}, and saved.")
                    print("The same command goes on. (torchrun prints a traceback of its own.)")
                dist.destroy_process_group()
                return
        seen = 0

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
            # RESUME: the learning rate of the last step.
            lr_now = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch + 1}: lr {lr_now:g}, {correct / len(test_set):.2%} correct")
            # To keep a file for each epoch, name it f"model_{epoch + 1}.pt".
            torch.save(model.module.state_dict(), "model.pt")
            # RESUME: this is the last thing, because a complete epoch is not repeated.
            save_checkpoint(epoch + 1, 0)
    # DDP: not in a `finally`. After an error on one rank, this call could wait for the others.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
