"""Train MNIST with DistributedDataParallel: one process for each GPU, on one machine or several.

    torchrun --standalone --nproc_per_node 2 scripts/minimal/ddp.py
    diff scripts/minimal/single.py scripts/minimal/ddp.py

On two machines the very same command on each, where $HOST0 is the first one's name or address:

    torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint $HOST0:29500 scripts/minimal/ddp.py

Without a GPU the processes share the CPU. Lost machines, restarts, resume: train_ddp.py.
"""

import argparse
import atexit
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

# The folder of data.py and models.py; not needed where yours lie beside your script.
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

    # DDP: torchrun starts the processes and tells each, in the environment, which one it is.
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        parser.exit(2, f"start it with: torchrun --standalone --nproc_per_node 2 {sys.argv[0]}\n")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # DDP: the number on this machine chooses the GPU; rank counts on over all machines. Where a
    # scheduler shows each process a single GPU, all of them find it as number 0.
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # DDP: all processes meet here; the group is destroyed at the end, after an exception, too.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    atexit.register(dist.destroy_process_group)
    # DDP: with one seed for all, every process would draw the same dropout. The weights may
    # begin different: DistributedDataParallel overwrites them with those of rank 0.
    torch.manual_seed(rank)

    train_set, test_set = load_tensors(args.dataset, args.data_dir)
    # DDP: each process has a batch of its own, and all of them together make one step.
    global_batch_size = args.batch_size * world_size
    # DDP: this shuffles, and cuts the epoch into shares of equal length, one for each process.
    # With one batch more than the others, a process would wait for them in vain.
    train_sampler = DistributedSampler(train_set, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, drop_last=True)
    # DDP: for that, the sampler leaves images out; here each has to count exactly once. The
    # shares may differ in length, as nobody waits for the others while evaluating.
    test_loader = DataLoader(test_set, 500, sampler=range(rank, len(test_set), world_size))

    # Two names for one model: dp.py and ddp.py train a wrapped one; all evaluate and save this.
    raw_model = build_model("convnet").to(device)
    # DDP: sends rank 0's weights to all now, and averages the gradients in every backward.
    model = DistributedDataParallel(raw_model)
    # Linear scaling: a larger batch makes fewer steps, which have to be longer; one-cycle begins
    # with short ones, because a large rate is harmful while the weights are still random.
    lr = 0.1 * global_batch_size / 96
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    scheduler = OneCycleLR(optimizer, lr, total_steps=args.epochs * len(train_loader))

    for epoch in range(args.epochs):
        # DDP: without it, every epoch would have the order of the first.
        train_sampler.set_epoch(epoch)
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()

        # DDP: each forward began with rank 0's running statistics (of batch normalisation), and
        # changed them: take rank 0's once more, so that all evaluate the model that it saves.
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
        # DDP: adds up the sums of all shares, in place. Every process has to call it.
        dist.all_reduce(sums)
        # Divided last: the last batch is shorter, and a mean of means would be wrong.
        loss, correct, count = sums.tolist()
        # DDP: one process prints and writes.
        if rank != 0:
            continue
        print(f"epoch {epoch + 1}: loss {loss / count:.4f}, {correct / count:.2%} of {count:.0f}")
        # Written aside, then moved: whoever reads it, or is killed here, leaves a whole file.
        torch.save(raw_model.state_dict(), "model.pt.tmp")
        os.replace("model.pt.tmp", "model.pt")


if __name__ == "__main__":
    main()
