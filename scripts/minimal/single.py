"""Train MNIST on one device. This file needs torch and torchvision, and nothing else.

    python single.py

The first start downloads MNIST to ./data. Each epoch ends with a test, and saves ./model.pt.
Compare the file with its parallel versions: the differences are what nn.DataParallel and
DistributedDataParallel need.

    diff single.py dp.py
    diff single.py ddp.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor


def main() -> None:
    parser = argparse.ArgumentParser(description="Train MNIST.")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64, help="of each device")
    parser.add_argument("--data-dir", default="data", help="where MNIST is, or is downloaded to")
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    train_set = MNIST(args.data_dir, train=True, transform=ToTensor(), download=True)
    test_set = MNIST(args.data_dir, train=False, transform=ToTensor(), download=True)
    global_batch_size = args.batch_size
    # This process loads each batch itself, when the loop asks for it. With num_workers=2, two other
    # processes load the next batches meanwhile.
    train_loader = DataLoader(train_set, global_batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, 500)

    block1 = nn.Sequential(nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    block2 = nn.Sequential(nn.Conv2d(16, 32, 5), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 10))
    model: nn.Module = nn.Sequential(block1, block2, head).to(device)
    # With a larger batch an epoch has fewer steps, so the rate of each step is higher. It is never
    # more than four times as high, because this training is short.
    lr = 0.03 * min(global_batch_size / 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)

    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            outputs = model(images.to(device))
            loss = F.cross_entropy(outputs, labels.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        correct = torch.tensor(0, device=device)
        with torch.no_grad():
            for images, labels in test_loader:
                predicted = model(images.to(device)).argmax(dim=1)
                correct += (predicted == labels.to(device)).sum()
        print(f"epoch {epoch + 1}: lr {lr:g}, {correct / len(test_set):.2%} correct")
        # To keep a file for each epoch, name it f"model_{epoch + 1}.pt".
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
