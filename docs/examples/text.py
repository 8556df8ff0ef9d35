"""Classify sentences of different length: padding, a mask, and counts that ignore the padding.

A line of train.txt and test.txt is a class from 0, a tab and a sentence, for example

    1	what a good film

    torchrun --standalone --nproc_per_node 2 docs/examples/text.py --data-dir texts

It needs torch, and saves model.pt in the current folder.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# DistributedDataParallel imports this module. If that happened after init_process_group, the module
# would keep the process group, and gloo's threads could abort the end of Python.
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

PADDING = 0
WORDS = 10_000
Sample = tuple[list[int], int]


def number(word: str) -> int:
    """Return a word's number. Python's own hash() would differ in each process."""
    return 1 + int.from_bytes(word.lower().encode(), "big") % (WORDS - 1)


def load(path: Path) -> list[Sample]:
    """Read pairs (numbers of the words, class)."""
    lines = [line.split("\t") for line in path.read_text().splitlines() if line.strip()]
    return [([number(word) for word in sentence.split()], int(label)) for label, sentence in lines]


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Make a batch: words [B, longest sentence], filled up with PADDING, and classes [B]."""
    words = [torch.tensor(sentence, dtype=torch.long) for sentence, _ in samples]
    padded = pad_sequence(words, batch_first=True, padding_value=PADDING)
    return padded, torch.tensor([label for _, label in samples])


class Classifier(nn.Module):
    """Average the vectors of the words, without those of the padding."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, words: Tensor) -> Tensor:
        mask = (words != PADDING)[..., None]
        return self.head((self.embedding(words) * mask).sum(1) / mask.sum(1).clamp(min=1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, default="texts")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each process")
    args = parser.parse_args()

    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    train_set: Any = load(args.data_dir / "train.txt")
    test_set: Any = load(args.data_dir / "test.txt")
    classes = 1 + max(label for _, label in train_set)
    sampler: Any = DistributedSampler(train_set, drop_last=True)
    train_loader: Any = DataLoader(
        train_set, args.batch_size, sampler=sampler, drop_last=True, collate_fn=collate
    )
    if not len(train_loader):
        raise SystemExit("fewer sentences than one step needs: lower --batch-size")
    share = range(rank, len(test_set), world_size)
    test_loader: Any = DataLoader(test_set, 500, sampler=share, collate_fn=collate)

    model = DistributedDataParallel(Classifier(classes).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for words, labels in train_loader:
            # Each sentence has one label, so all batches have the same number of labels. If each
            # word had a label, that of the padding would be -100, which cross_entropy ignores, and
            # the loss would be divided by the words of all processes (Tokens in docs/concepts.md).
            loss = F.cross_entropy(model(words.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # correct, count
        with torch.no_grad():
            for words, labels in test_loader:
                outputs = model(words.to(device))
                sums[0] += (outputs.argmax(1) == labels.to(device)).sum()
                sums[1] += len(labels)
        dist.all_reduce(sums)
        if rank == 0:
            correct, count = sums.tolist()
            print(f"epoch {epoch + 1}: accuracy {correct / count:.1%} of {count:.0f}", flush=True)
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
