"""One GPU for each rank, with faked devices: what a rank takes, and what is refused."""

import pytest
import torch

from utils import distributed
from utils.errors import UsageError

Rank = tuple[str, int, list[str]]


def host(name: str, visible: list[list[str]]) -> list[Rank]:
    """Return the ranks of a host, of which each sees these GPUs."""
    return [(f"{name}.{i}", i, [f"{name}-{gpu}" for gpu in gpus]) for i, gpus in enumerate(visible)]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("hosts", [1, 3])
@pytest.mark.parametrize("shown", ["all", "one each"])
def test_a_gpu_for_each_rank(count: int, hosts: int, shown: str) -> None:
    """torchrun shows every rank all GPUs; Slurm (--gpus-per-task=1) one, which is number 0."""
    gpus = [f"GPU-{number}" for number in range(count)]
    visible = [gpus] * count if shown == "all" else [[gpu] for gpu in gpus]
    distributed.check_gpus([rank for n in range(hosts) for rank in host(f"host{n}", visible)])


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_rank_beyond_the_visible_gpus(count: int) -> None:
    ranks = host("host", [[f"GPU-{number}" for number in range(count)]] * (count + 1))
    with pytest.raises(UsageError, match=f"rank host.{count} is number {count} on its node"):
        distributed.check_gpus(ranks)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_two_ranks_with_the_same_gpu(count: int) -> None:
    visible = [[f"GPU-{number % (count - 1)}"] for number in range(count)]
    words = f"ranks host.0 and host.{count - 1} have the same GPU, host-GPU-0"
    with pytest.raises(UsageError, match=words):
        distributed.check_gpus(host("host", visible))


def test_lists_that_overlap() -> None:
    """CUDA_VISIBLE_DEVICES=0,1 for one rank and 1,0 for the other: both take number 0."""
    with pytest.raises(UsageError, match="have the same GPU, h-a"):
        distributed.check_gpus(host("h", [["a", "b"], ["b", "a"]]))


def test_what_is_not_known_is_not_refused() -> None:
    """Without NVML, and for ranks that need no GPU (gloo)."""
    distributed.check_gpus([("0", 0, [""]), ("1", 1, [""]), ("2", 2, []), ("3", 9, [])])


UUIDS = [f"GPU-{number}aaa-0000" for number in range(4)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, UUIDS),
        ("2", [UUIDS[2]]),
        ("3,1", [UUIDS[3], UUIDS[1]]),
        (UUIDS[1], [UUIDS[1]]),
        ("GPU-3aaa,GPU-0aaa", [UUIDS[3], UUIDS[0]]),
        ("MIG-11111111-2222-3333-4444-555555555555", [""]),
    ],
)
def test_uuids_follow_cuda_visible_devices(
    variable: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
    if variable is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    devices = [torch.device("cuda", index) for index in range(len(expected))]
    assert distributed.find_gpus(devices) == expected


@pytest.mark.parametrize("answer", [None, OSError("libnvidia-ml.so.1"), []])
def test_no_answer_of_the_driver(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", ask)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert distributed.find_gpus([torch.device("cuda", 0)]) == [""]
