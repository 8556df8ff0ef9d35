"""Names and calls of old notes: what does PyTorch say to them, and what is right?

One of them is `loss = dist.all_reduce(loss)`. After it,

a) loss is the sum over the ranks.
b) loss is None.
c) nothing, because this call raises an error.

Nearly all end with an error. The last three do not. The notes say something else about them.
"""

import io
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import _lesson as lesson
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import constants
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

lesson.start(__doc__, answer="b")
# These wrong names are meant: this hides them from type checkers.
anything: Any = dist
ddp: Any = DistributedDataParallel
layer = nn.Linear(1, 1)
dataset = TensorDataset(torch.arange(4))


def load_misspelt() -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(1)}, file)
    file.seek(0)
    torch.load(file, maplocation="cpu")


def load_by_numel() -> None:
    model = nn.Linear(2, 3)
    saved = {"weight": torch.zeros(2, 3)}  # the model's is [3, 2]
    own = model.state_dict()
    same = {name: value for name, value in saved.items() if own[name].numel() == value.numel()}
    model.load_state_dict(same, strict=False)


def use_the_sampler_as_data() -> None:
    sampler: Any = DistributedSampler(dataset, 2, 0)
    next(iter(DataLoader(sampler)))


# What a note says, a call that does it, and the right way.
CASES: list[tuple[str, Callable[[], Any], str]] = [
    ("DataLoader(train_sampler)", use_the_sampler_as_data, "DataLoader(dataset, sampler=...)"),
    ("DDP(model, device_id=[0])", lambda: ddp(layer, device_id=[0]), "device_ids=[local_rank]"),
    (
        "DDP(model, device_ids=[0, 1])",  # PyTorch once replicated the model in each process
        lambda: ddp(layer, device_ids=[0, 1]),
        "one process for each GPU",
    ),
    ("dist.local_rank()", lambda: anything.local_rank(), 'int(os.environ["LOCAL_RANK"])'),
    ("dist.AVG", lambda: anything.AVG, "dist.ReduceOp.AVG, or SUM and divide"),
    ('init_method="env"', lambda: next(dist.rendezvous("env", 0, 1)), '"env://", the default'),
    ('torch.load(file, maplocation="cpu")', load_misspelt, "map_location"),
    ("load what has the same numel()", load_by_numel, "compare name and shape"),
]


def work(rank: int, world_size: int) -> tuple[list[str], Any]:
    """Return what PyTorch says to each call, and what all_reduce returns."""
    return [lesson.error_of(call) for _, call, _ in CASES], dist.all_reduce(torch.ones(1))


said, returned = lesson.run(work, 1)[0]
for (note, _, right), text in zip(CASES, said, strict=True):
    print(f"{note}\n    {text[:100]}\n    right: {right}")
parts = ["not subscriptable", "argument 'device_id'", "a single element", "attribute 'local_rank'"]
parts += ["attribute 'AVG'", "No rendezvous handler", "argument 'maplocation'", "size mismatch"]
assert all(part in text for part, text in zip(parts, said, strict=True))
print(f"loss = dist.all_reduce(loss)\n    loss is {returned}\n    right: it works in place")
assert returned is None
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
rates = torch.optim.lr_scheduler.StepLR(optimizer, 1).get_last_lr()
print(f"scheduler.get_last_lr()\n    {rates}\n    right: get_last_lr()[0]")
assert rates == [0.1]
limits = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)
print(f"timeout=timedelta(0, 1800)\n    the default, and 10 minutes with NCCL: {limits}")
assert limits[0] == timedelta(minutes=30)
assert limits[1] in (None, timedelta(minutes=10))  # None: this torch has no NCCL

lesson.claim("these calls fail, except three: all_reduce returns nothing, and get_last_lr a list.")
