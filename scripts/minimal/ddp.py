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

# DDP: with the NCCL class that torch 2.15 takes by default, a GPU computes nothing while gradients
# travel. 0 chooses the class before it. Remove the line when a later torch computes and sends at
# the same time by default.
os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
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

    # DDP: torchrun starts the processes, and numbers them. RANK counts over all machines.
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        parser.exit(2, f"start it with: torchrun --standalone --nproc_per_node 2 {sys.argv[0]}\n")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # DDP: two processes cannot share a GPU, since NCCL does not connect them. torchrun says in
    # LOCAL_WORLD_SIZE how many processes this machine has.
    if 0 < torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        parser.exit(2, "too few GPUs: CUDA_VISIBLE_DEVICES= torchrun ... starts it on the CPU\n")
    # DDP: LOCAL_RANK counts on this machine. Each process takes a GPU of its own, or the only GPU
    # that it can see.
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # DDP: the processes wait for each other here. From here on they can call collectives. All of
    # them have to make the same calls, in the same order.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)

    train_set, test_set = load_tensors(args.dataset, args.data_dir)
    # DDP: from here on the ranks draw different random numbers, since the rank is the seed. So the
    # first weights differ too, until the model is wrapped. The data comes before this line, because
    # a random_split has to be the same on all ranks.
    torch.manual_seed(rank)
    # DDP: --batch-size is the share of each process. A step uses the batches of all processes, and
    # the learning rate below follows the size of that global batch.
    global_batch_size = args.batch_size * world_size
    # DDP: the sampler shuffles the epoch alike on all ranks, and then gives each rank its share.
    # All shares have the same length, or a rank with one batch more would wait for ever.
    train_sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, drop_last=True)
    # DDP: each rank takes an unpadded share of the test set, so every image counts exactly once.
    # Shares of different length do no harm, since no rank waits for another one while it evaluates.
    test_loader = DataLoader(test_set, 500, sampler=range(rank, len(test_set), world_size))

    # Two names for one model: dp.py and ddp.py train a wrapped one. All evaluate and save this one.
    raw_model = build_model("convnet").to(device)
    # DDP: wrapping broadcasts rank 0's weights, so that all ranks start from the same.
    model = DistributedDataParallel(raw_model)
    # Linear scaling: with a larger batch an epoch has fewer steps, so each step has a higher rate.
    # The factor is at most four, since higher rates make training fail.
    lr = 0.03 * min(global_batch_size / 96, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)

    for epoch in range(args.epochs):
        # DDP: without this call, every epoch would have the order of the first.
        train_sampler.set_epoch(epoch)
        model.train()
        for number, (images, labels) in enumerate(train_loader, start=1):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            # DDP: the backward averages the gradients over the ranks, bucket by bucket, while it
            # computes them. optimizer.step() sends nothing.
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            # DDP: rank 0 alone prints, the loss of its own batch.
            if rank == 0 and number % 100 == 0:
                print(f"batch {number} of {len(train_loader)}: loss {loss.item():.4f}", flush=True)

        # DDP: each rank evaluates the model that rank 0 saves, with rank 0's running statistics.
        # The other ranks have seen other images, so theirs differ.
        # A buffer may be a part of a tensor, and only contiguous memory is sent whole.
        for original in raw_model.buffers():
            buffer = original.contiguous()
            dist.broadcast(buffer, src=0)
            original.copy_(buffer)
        raw_model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # of loss, correct and count
        with torch.no_grad():
            for images, labels in test_loader:
                logits, labels = raw_model(images.to(device)), labels.to(device)
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(dim=1) == labels).sum()
                sums[2] += len(labels)
        # DDP: each rank has counted its own images. Their sums are added up over the ranks, in
        # place, before anything is divided.
        dist.all_reduce(sums)
        # Divide last: the last batch may be shorter, and a mean of means would then be wrong.
        loss, correct, count = sums.tolist()
        # DDP: rank 0 alone writes and prints. What you add below this line runs there alone, so it
        # must not wait for other ranks.
        if rank != 0:
            continue
        print(f"epoch {epoch + 1}: loss {loss / count:.4f}, {correct / count:.2%} of {count:.0f}")
        # Written under another name first: model.pt is whole, even if this process is killed here.
        torch.save(raw_model.state_dict(), "model.pt.tmp")
        os.replace("model.pt.tmp", "model.pt")
    # DDP: not in a `finally`. After an error on one rank, the others wait in a collective, and this
    # call could wait for them.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
