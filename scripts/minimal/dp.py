"""Train MNIST with DataParallel: one process that uses every GPU it sees.

    python scripts/minimal/dp.py
    diff scripts/minimal/single.py scripts/minimal/dp.py

DataParallel changes few lines, but it is not fast. If you have several GPUs, start from ddp.py.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

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

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    train_set, test_set = load_tensors(args.dataset, args.data_dir)
    # DP: one loader feeds all GPUs, and each takes its share of the batch.
    global_batch_size = args.batch_size * (torch.cuda.device_count() if device.type != "cpu" else 1)
    train_loader = DataLoader(train_set, global_batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, 500)

    # Two names for one model: dp.py and ddp.py train a wrapped one. All evaluate and save this one.
    raw_model = build_model("convnet").to(device)
    # DP: the wrapper copies the model to every GPU in each forward. Without a GPU it calls the raw
    # model and does not warn, so this script then trains as single.py does.
    model = nn.DataParallel(raw_model)
    # Linear scaling: with a larger batch an epoch has fewer steps, so each step has a higher rate.
    # The factor is at most four, since higher rates make training fail.
    lr = 0.03 * min(global_batch_size / 96, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)

    for epoch in range(args.epochs):
        model.train()
        for number, (images, labels) in enumerate(train_loader, start=1):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 100 == 0:
                print(f"batch {number} of {len(train_loader)}: loss {loss.item():.4f}", flush=True)

        raw_model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=device)  # of loss, correct and count
        with torch.no_grad():
            for images, labels in test_loader:
                logits, labels = raw_model(images.to(device)), labels.to(device)
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(dim=1) == labels).sum()
                sums[2] += len(labels)
        # Divide last: the last batch may be shorter, and a mean of means would then be wrong.
        loss, correct, count = sums.tolist()
        print(f"epoch {epoch + 1}: loss {loss / count:.4f}, {correct / count:.2%} of {count:.0f}")
        # Written under another name first: model.pt is whole, even if this process is killed here.
        torch.save(raw_model.state_dict(), "model.pt.tmp")
        os.replace("model.pt.tmp", "model.pt")


if __name__ == "__main__":
    main()
