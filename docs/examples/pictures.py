"""Train on colour images, with AdamW, averaged weights (EMA), early stopping and a tracker.

Each class has a folder, for example pictures/bird/ and pictures/cat/. A fifth of the images
chooses the best weights.

    torchrun --standalone --nproc_per_node 2 docs/examples/pictures.py --data-dir pictures
    torchrun --standalone --nproc_per_node 2 docs/examples/pictures.py --resume

It needs torch and torchvision, and for --wandb also wandb. It saves last.pt, to resume after a
whole epoch with the same flags and number of processes, and best.pt, the averaged weights of the
best epoch, in the current folder.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

# DistributedDataParallel imports this module. If that happened after init_process_group, the module
# would keep the process group, and gloo's threads could abort the end of Python.
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

FLOATS = [T.ToTensor(), T.Normalize([0.5] * 3, [0.25] * 3)]
TRAIN = T.Compose([T.RandomResizedCrop(32, (0.6, 1.0)), T.RandomHorizontalFlip(), *FLOATS])
TEST = T.Compose([T.Resize(36), T.CenterCrop(32), *FLOATS])


def build(classes: int) -> nn.Module:
    """Build a small network. For a pretrained one return torchvision's, with a new last layer."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", default="pictures")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better loss")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--wandb", metavar="RUN", help="log to this run in Weights & Biases")
    args = parser.parse_args()

    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    # The same files twice, because a transform belongs to a whole data set. The split has a seed of
    # its own, so that it is the same in every process.
    augmented = ImageFolder(args.data_dir, TRAIN)
    plain = ImageFolder(args.data_dir, TEST)
    order = torch.randperm(len(plain), generator=torch.Generator().manual_seed(0)).tolist()
    fifth = len(order) // 5
    train_set = Subset(augmented, order[fifth:])
    val_set = Subset(plain, order[:fifth])
    sampler: DistributedSampler = DistributedSampler(train_set, drop_last=True)
    workers = args.num_workers
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, num_workers=workers, drop_last=True
    )
    if rank == 0:
        print(f"{len(plain.classes)} classes, {len(train_set)} images to train", flush=True)
    if not len(train_loader):
        raise SystemExit("fewer images than one step needs: lower --batch-size")
    share = range(rank, len(val_set), world_size)
    val_loader = DataLoader(val_set, 500, sampler=share, num_workers=workers)

    torch.manual_seed(0)
    raw_model = build(len(plain.classes)).to(device)
    model = DistributedDataParallel(raw_model)
    # Weight decay is for matrices, not for biases and normalisation.
    matrices = [p for p in raw_model.parameters() if p.ndim > 1]
    others = [p for p in raw_model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=args.epochs * len(train_loader)
    )
    # On all ranks, because all of them evaluate it. Below the wrapper, which has broadcast rank 0's
    # weights, so that all averages begin with these.
    ema = AveragedModel(raw_model, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    losses: list[float] = []  # of the validation, one for each epoch
    parts: dict[str, Any] = {
        "model": raw_model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "ema": ema,
    }
    if args.resume:
        state: list[Any] = [torch.load("last.pt", map_location="cpu") if rank == 0 else None]
        dist.broadcast_object_list(state, src=0)
        for name, part in parts.items():
            part.load_state_dict(state[0][name])
        losses = state[0]["losses"]
        if scheduler.total_steps != args.epochs * len(train_loader):
            raise SystemExit("resume with the same --epochs, --batch-size and number of processes")
    if args.wandb and rank == 0:
        import wandb

        wandb.init(project="pictures", id=args.wandb, resume="allow", config=vars(args))

    for epoch in range(len(losses), args.epochs):
        # All processes know the same losses, so all stop after the same epoch.
        if losses and len(losses) - 1 - losses.index(min(losses)) >= args.patience:
            break
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch * world_size + rank)  # each augments differently
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.update_parameters(raw_model)

        # The running statistics of batch normalisation are not averaged, and differ by rank. All
        # ranks evaluate with those of rank 0, which are saved.
        for mine, averaged in zip(raw_model.buffers(), ema.module.buffers(), strict=True):
            dist.broadcast(mine, src=0)
            averaged.copy_(mine)
        ema.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, correct, top 3, count
        with torch.no_grad():
            for images, labels in val_loader:
                outputs = ema(images.to(device))
                labels = labels.to(device)
                sums[0] += F.cross_entropy(outputs, labels, reduction="sum")
                sums[1] += (outputs.argmax(1) == labels).sum()
                best = outputs.topk(min(3, len(plain.classes))).indices
                sums[2] += (best == labels[:, None]).sum()
                sums[3] += len(labels)
        dist.all_reduce(sums)
        val_loss, accuracy, top3 = (sums[:3] / sums[3]).tolist()
        losses.append(val_loss)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {val_loss:.4f}, accuracy {accuracy:.1%}", flush=True)
            if val_loss == min(losses):
                torch.save(ema.module.state_dict(), "best.pt.tmp")
                os.replace("best.pt.tmp", "best.pt")
            saved = {name: part.state_dict() for name, part in parts.items()}
            torch.save(saved | {"losses": losses}, "last.pt.tmp")
            os.replace("last.pt.tmp", "last.pt")
            if args.wandb:
                wandb.log({"loss": val_loss, "accuracy": accuracy, "top3": top3}, step=epoch)
    if args.wandb and rank == 0:
        wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
