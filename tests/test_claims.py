"""What the documents claim about PyTorch, held by its source and by running it."""

import mmap
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from tests.processes import run
from utils.cluster.launchers import DEFAULT_PORT
from utils.distributed import check_gpus
from utils.errors import UsageError

TORCH = Path(torch.__file__).parent

# A process group of one: buckets, views and errors are those of any world size.
ALONE = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from utils.distributed import warm_up

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def report(case, **options):
    layers = [nn.Linear(600, 600, bias=False) for _ in range(3)]  # of 1.37 MiB each
    model = DistributedDataParallel(nn.Sequential(*layers), **options)
    buckets, counts = [], []

    def hook(state, bucket):
        buckets.append(bucket.buffer())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
    for _ in range(2):
        buckets.clear()
        model(torch.ones(2, 600)).sum().backward()
        counts.append(len(buckets))
    owners = {bucket.untyped_storage().data_ptr() for bucket in buckets}
    views = [p.grad.untyped_storage().data_ptr() in owners for p in model.parameters()]
    print(case, *counts, all(views), any(views), flush=True)


class Twice(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.layer, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def attempt(case, *steps):
    for number, step in enumerate(steps):
        try:
            step()
        except RuntimeError as error:
            print(case, number, " ".join(str(error).split()), flush=True)
            return
    print(case, "passes", flush=True)


report("default")
report("searched", find_unused_parameters=True)
report("viewed", gradient_as_bucket_view=True)
report("given", bucket_cap_mb=25)
for reentrant in (True, False):
    model = DistributedDataParallel(Twice(reentrant))
    attempt(f"reentrant={reentrant}", lambda: model(torch.ones(2, 4)).sum().backward())
for found in (False, True):
    spare = DistributedDataParallel(Spare(), find_unused_parameters=found)
    attempt(
        f"spare, found={found}",
        lambda: warm_up(spare, torch.ones(2, 4)),
        lambda: spare(torch.ones(2, 4)).sum().backward(),
    )
os._exit(0)
"""


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What a group of one process found, by case."""
    ended = run(sys.executable, "-c", ALONE, timeout=90)
    assert ended.returncode == 0, ended.text
    pattern = r"^(default|searched|viewed|given|reentrant=\w+|spare, found=\w+) (.*)$"
    return dict(re.findall(pattern, ended.stdout, re.MULTILINE))


@pytest.mark.parametrize(
    ("case", "first", "later"),
    [("default", 1, 2), ("searched", 2, 2), ("viewed", 1, 2), ("given", 1, 1)],
)
def test_the_first_backward_has_one_bucket(
    alone: dict[str, str], case: str, first: int, later: int
) -> None:
    """Unless unused parameters are searched; 25 MiB when given count for the first one, too."""
    assert alone[case].split()[:2] == [str(first), str(later)]


def test_gradients_live_in_the_buckets_only_as_views(alone: dict[str, str]) -> None:
    """Of 16 bytes a parameter with Adam, 4 are the gradient: DDP's default keeps it twice."""
    assert alone["default"].split()[2:] == ["False", "False"]
    assert alone["viewed"].split()[2:] == ["True", "True"]


def test_a_gradient_that_comes_twice_is_an_error(alone: dict[str, str]) -> None:
    assert "has been marked as ready twice" in alone["reentrant=True"]
    assert alone["reentrant=False"] == "passes"


def test_a_missing_gradient_is_told_at_the_next_forward(alone: dict[str, str]) -> None:
    """After the warm-up of train_ddp.py that is the first step of the training."""
    assert alone["spare, found=False"].startswith("1 Expected to have finished reduction")
    assert alone["spare, found=True"] == "passes"


def test_ddp_compares_sizes_and_strides() -> None:
    """And how many there are: what the compiled part says if not."""
    (library,) = TORCH.glob("lib/libtorch_cpu.*")
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        for words in (b"appears not to match sizes", b"appears not to match strides", b" params, "):
            assert text.find(words) > 0, words


def test_there_is_a_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank() == 3


def test_env_has_no_default_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """29500 is torchrun's, and this project's."""
    for name in ("RANK", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="MASTER_PORT expected, but not set"):
        next(dist.rendezvous("env://", rank=0, world_size=1))
    told = " ".join(get_args_parser().format_help().split())
    assert f"Defaults to {DEFAULT_PORT}." in told


def test_the_variable_of_the_shared_store_is_read_by_c10d_alone() -> None:
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    readers = [p for p in TORCH.rglob("*.py") if name in p.read_text(errors="replace")]
    assert [path.name for path in readers] == ["dynamic_rendezvous.py"]


def test_weights_only_is_the_default(tmp_path: Path) -> None:
    torch.save({"path": Path("x")}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "file.pt")


def member(rank: int, gpus: list[str]) -> tuple[str, int, list[str]]:
    return f"rank {rank}", rank, gpus


def test_each_rank_may_see_one_gpu() -> None:
    """Number 0 for all, as Slurm's ``--gpus-per-task=1`` shows it; not the same one for two."""
    check_gpus([member(0, ["GPU-a"]), member(1, ["GPU-b"])])
    check_gpus([member(0, ["GPU-a", "GPU-b"]), member(1, ["GPU-a", "GPU-b"])])
    with pytest.raises(UsageError, match="have the same GPU"):
        check_gpus([member(0, ["GPU-a"]), member(1, ["GPU-a"])])
