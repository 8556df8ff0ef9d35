"""Train MNIST on one device, in the usual style; nothing here knows of this project."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(16 * 6 * 6, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout(x.flatten(1))
        return self.fc2(F.relu(self.fc1(x)))


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for step, (images, labels) in enumerate(loader):
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{step}/{len(loader)}] Loss: {loss.item():.6f}")


def test(model, device, loader):
    model.eval()
    loss, correct = 0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            output = model(images)
            loss += F.cross_entropy(output, labels, reduction="sum").item()
            correct += (output.argmax(dim=1) == labels).sum().item()
    size = len(loader.dataset)
    print(f"Test set: Average loss: {loss / size:.6f}, Accuracy: {correct:.0f}/{size}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="file of four tensors: images and labels, train and test")
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    tensors = torch.load(args.data, weights_only=True)
    train_set, test_set = TensorDataset(*tensors[:2]), TensorDataset(*tensors[2:])
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, 1000)

    model = Net(args.dropout).to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), "mnist.pt")


if __name__ == "__main__":
    main()
