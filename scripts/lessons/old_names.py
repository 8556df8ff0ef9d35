"""Names and calls of old notes that PyTorch does not have, and what it has instead.

Nearly all of them end with an error. The two last cases do not: they do something else than the
notes say.

It prints what PyTorch says to each, and the right way.
"""

import io
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _lesson import error_of, start, values
from torch import nn
from torch.distributed import constants
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# The wrong names are no mistakes of ours: this hides them from type checkers.
anything: Any = dist
ddp: Any = DistributedDataParallel


def load_by_numel() -> None:
    """Load each tensor that has as many elements as the model's, as [2, 3] for [3, 2]."""
    model, saved = nn.Linear(2, 3), {"weight": torch.zeros(2, 3)}
    own = model.state_dict()
    same = {name: value for name, value in saved.items() if own[name].numel() == value.numel()}
    model.load_state_dict(same, strict=False)


def load_misspelt() -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.ones(1)}, file)
    file.seek(0)
    torch.load(file, maplocation="cpu")


def cases() -> list[tuple[str, Callable[[], Any], str]]:
    """Return what a note says, a function that does it, and the right way."""
    sampler: Any = DistributedSampler(TensorDataset(torch.arange(4)), 2, 0)
    layer = nn.Linear(1, 1)
    return [
        (
            "DataLoader(train_sampler, ...)",
            lambda: next(iter(DataLoader(sampler))),
            "DataLoader(dataset, sampler=train_sampler)",
        ),
        ("DDP(model, device_id=[0])", lambda: ddp(layer, device_id=[0]), "device_ids=[local_rank]"),
        (
            "DDP(model, device_ids=[0, 1])",
            lambda: ddp(layer, device_ids=[0, 1]),
            "a process for each GPU",
        ),
        (
            "torch.distributed.local_rank()",
            lambda: anything.local_rank(),
            'int(os.environ["LOCAL_RANK"])',
        ),
        ("torch.distributed.AVG", lambda: anything.AVG, "ReduceOp.SUM, then divide by the count"),
        (
            'init_method="env"',
            lambda: next(dist.rendezvous("env", 0, 1)),  # as init_process_group does
            '"env://", which is the default',
        ),
        ('torch.load(..., maplocation="cpu")', load_misspelt, "map_location"),
        ("compare numel, load what fits", load_by_numel, "compare the name and the shape"),
        (
            'model.state_dict()["module.weight"].numel()',
            lambda: layer.state_dict()["module.weight"].numel(),
            "test `name in own` first",
        ),
    ]


def work(rank: int, world_size: int) -> tuple[dict[str, str], Any, Any]:
    """Return what PyTorch says to each case, and the results of the two that raise no error."""
    warnings.simplefilter("ignore")
    said = {}
    for case, call, right in cases():
        said[case] = error_of(call).splitlines()[-1].strip()
        print(f"{case}\n    {said[case][:150]}\n    right: {right}")
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return said, dist.all_reduce(torch.ones(1)), scheduler.get_last_lr()


def main() -> dict[str, bool]:
    ((said, returned, rates),) = values(work, 1)
    print(f"loss = dist.all_reduce(loss)\n    loss is {returned}\n    right: it works in place")
    print(f"scheduler.get_last_lr()\n    {rates}\n    right: get_last_lr()[0]")
    limits = {"nccl": constants.default_pg_nccl_timeout, "others": constants.default_pg_timeout}
    print("the timeout of a collective: " + ", ".join(f"{k} {v}" for k, v in limits.items()))
    return {
        "PyTorch has none of the names, and equal numbers of elements are no equal shapes": all(
            said.values()
        ),
        "all_reduce returns nothing, and get_last_lr a list": returned is None and rates == [0.1],
        "by default a collective waits for 30 minutes, and with nccl for 10": limits["others"]
        == timedelta(minutes=30)
        and limits["nccl"] in (None, timedelta(minutes=10)),  # None: this torch has no NCCL
    }


if __name__ == "__main__":
    start(main)
