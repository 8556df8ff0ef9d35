"""Models and data sets of a user, for ``--model tests.user_code:...`` and ``--dataset``.

FAULT, such as ``1:7:SIGKILL``, is what happens to a rank in the forward with this number of its
training, in the first attempt of the job. RECORD names a folder in which every rank writes what it
saw in each forward of its training, and which rank has saved.
"""

import atexit
import json
import os
import signal
import time

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import data
import models


def rank():
    return os.environ.get("RANK", "0")


def attempt():
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def append(name, line):
    if "RECORD" in os.environ:
        with open(f"{os.environ['RECORD']}/{name}", "a") as file:
            file.write(f"{line}\n")


class Network(nn.Module):
    """A network of models.py that records, and that can fail."""

    def __init__(self, name="mlp", dropout=0.0):
        super().__init__()
        self.inner = models.MODELS[name]()
        self.dropout = nn.Dropout(dropout)
        self.forwards = 0
        atexit.register(append, "exit_handlers", rank())

    def forward(self, images):
        mask = self.dropout(torch.ones(1, 64, device=images.device))
        outputs = self.inner(self.dropout(images))
        if self.training:
            self.forwards += 1
            weight = next(self.parameters(), None)  # a copy of DataParallel's has no parameters
            gradient = None if weight is None else weight.grad
            seen = {
                "places": images.flatten(1).argmax(1).tolist(),
                "mask": "".join("01"[int(x > 0)] for x in mask[0]),
                "seed": (torch.cuda if images.is_cuda else torch).initial_seed(),
                "dtype": str(outputs.dtype),
                "gradient": None if gradient is None else float(gradient.abs().sum()),
            }
            append(f"{rank()}-{attempt()}", json.dumps(seen))
            self.fail()
        return outputs

    def fail(self):
        failing, number, fault = os.environ.get("FAULT", "::").split(":")
        if (failing, number, attempt()) != (rank(), str(self.forwards), "0"):
            return
        if fault.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, fault))
        else:
            raise ArithmeticError(fault)

    def state_dict(self, *args, **kwargs):
        append("saved_by", rank())
        return super().state_dict(*args, **kwargs)


def network():
    return Network()


def dropout_network():
    return Network("linear", dropout=0.3)


def double_network():
    """In float64 the order of a sum changes nothing that a test would see."""
    torch.set_default_dtype(torch.float64)
    return Network()


def double_convnet():
    torch.set_default_dtype(torch.float64)
    return Network("convnet")


def linear_network():
    return Network("linear")


class Partial(Network):
    """A part of the network is not used."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(3, 3)


def dots(data_dir):
    """Images that are all the same, with one bright pixel, which shows how far each is shifted."""
    images = torch.zeros(512, 28, 28, dtype=torch.uint8)
    images[:, 14, 14] = 255
    whole = TensorDataset(images, torch.arange(512) % 10)
    return whole, whole


def other_labels(data_dir):
    """Rank 1 numbers the classes in another way."""
    train_set, test_set = data.load("mnist", data_dir)
    images, labels = train_set.tensors
    return TensorDataset(images, (labels + int(rank())) % 10), test_set


class Slow(Dataset):
    """Each sample needs SLOW seconds."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(float(os.environ["SLOW"]))
        return torch.rand(1, 28, 28), index % 10


def slow(data_dir):
    return Slow(), Slow()
