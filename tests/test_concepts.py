"""What docs/concepts.md says about PyTorch and no lesson shows, held by running it."""

import re
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from tests.documents import section
from tests.processes import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "lessons"))
from _lesson import run_ranks

pytestmark = pytest.mark.slow  # ranks that wrap a model import torch._dynamo

CONCEPTS = ROOT / "docs" / "concepts.md"
MIB = 2**20


def layers(count, width):
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def buckets(model, **options):
    """Make two steps with Adam; return the buckets of the second backward."""
    wrapped, sent = DistributedDataParallel(model, **options), list[Tensor]()

    def send(state, bucket):
        sent.append(bucket.buffer())
        return allreduce_hook(dist.group.WORLD, bucket)

    wrapped.register_comm_hook(None, send)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        sent.clear()
        optimizer.zero_grad()
        wrapped(torch.ones(1, model[0].in_features)).sum().backward()
        optimizer.step()
    return sent


def sizes(rank, world_size):
    """Return the sizes of a hundred layers' buckets, by default and while searching."""
    options = ({}, {"find_unused_parameters": True})
    found = [buckets(layers(100, 300), **option) for option in options]
    return [f"{bucket.nbytes / MIB:.2f}" for sent in found for bucket in sent]


def frozen(rank, world_size, masks):
    """Wrap two layers, of which a rank freezes those with a 0 in its mask."""
    model = layers(2, 4)
    for layer, trained in zip(model, masks[rank], strict=True):
        layer.requires_grad_(trained == "1")
    DistributedDataParallel(model)


def late(rank, world_size):
    """Return what happens in a backward whose first bucket is ready last."""
    model, events = layers(3, 600), list[str]()
    order = [0, 1, 2]

    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            for number in order:
                x = model[number](x)
            return x

    def send(state, bucket):
        events.append(f"send {bucket.index()}")
        return allreduce_hook(dist.group.WORLD, bucket)

    wrapped = DistributedDataParallel(Ordered())
    wrapped.register_comm_hook(None, send)
    for number, parameter in enumerate(model.parameters()):
        parameter.register_hook(lambda grad, number=number: events.append(str(number)))
    for used in ([0, 1, 2], [0, 1, 2], [2, 1, 0]):
        order[:] = used
        events.clear()
        wrapped(torch.ones(1, 600)).sum().backward()
    return events


def memory(rank, world_size):
    """Return the bytes of a parameter: DDP, DDP with views, FSDP."""
    found = []
    for view in (False, True):
        sent = buckets(model := layers(4, 256), gradient_as_bucket_view=view)
        parameters = [*model.parameters()]
        tensors = [p.grad for p in parameters if p.grad is not None] + sent
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        count = sum(p.numel() for p in parameters)
        found.append((4 + 8) + sum(storages.values()) / count)  # with the weight and two moments
    model = layers(4, 256)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    own = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        own += [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
    return [*found, sum(t.to_local().nbytes for t in own) / (4 * 256 * 256)]


def overflow(rank, world_size):
    """Return the norm, whether the step was made, and the scale; rank 1 overflows at step 1."""
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(raw_model := nn.Linear(4, 1))
    optimizer = torch.optim.SGD(raw_model.parameters(), lr=0.1)
    scaler, found = torch.amp.GradScaler("cpu", init_scale=1024), []
    for step in range(3):
        inputs = torch.full((2, 4), rank + 1.0)
        inputs[0, 0] *= float("inf") if (step, rank) == (1, 1) else 1
        optimizer.zero_grad()
        scaler.scale(wrapped(inputs).square().mean()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0).item()
        before = raw_model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        found.append((norm, not torch.equal(before, raw_model.weight), scaler.get_scale()))
    return found


def test_buckets_have_the_sizes_that_are_given():
    told = re.findall(r"\d+\.\d\d", section(CONCEPTS, "Backward").text)
    assert run_ranks(sizes, 2)[0].value == told[1:]  # behind the size of a layer


def test_a_late_gradient_holds_back_the_buckets_behind():
    assert run_ranks(late, 2)[0].value == ["0", "1", "2", "send 0", "send 1"]


@pytest.mark.parametrize(("masks", "raises"), [(("11", "01"), True), (("10", "01"), False)])
def test_another_number_of_frozen_parameters_raises(masks, raises):
    errors = [outcome.error for outcome in run_ranks(frozen, 2, masks)]
    assert all("DDP expects same model across all ranks" in error for error in errors) == raises
    assert any(errors) == raises


def test_a_parameter_takes_the_bytes_that_are_given():
    assert run_ranks(memory, 2)[0].value == [20, 16, 8]


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    first, second = (outcome.value for outcome in run_ranks(overflow, 2))
    assert first == second
    assert [made for _, made, _ in first] == [True, False, True]


class Twice(nn.Module):
    """Two layers; the second runs twice, each time in a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        return x


def backward_twice(rank, world_size, reentrant, options):
    model = DistributedDataParallel(Twice(reentrant), **options)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize(
    ("reentrant", "options", "raises"),
    [(True, {}, True), (False, {}, False), (True, {"static_graph": True}, False)],
)
def test_a_gradient_that_comes_twice_raises(reentrant, options, raises):
    (outcome,) = run_ranks(backward_twice, 1, reentrant, options)
    assert bool(outcome.error) == raises
    assert ("mark a variable ready only once" in outcome.error) == raises


def test_an_iterable_data_set_takes_no_sampler_and_each_worker_reads_all():
    class Eight(IterableDataset):
        def __iter__(self):
            return iter(range(8))

    with pytest.raises(ValueError, match="expected unspecified sampler option"):
        DataLoader(Eight(), sampler=[0])
    ranks = [DataLoader(Eight(), None, num_workers=2) for _ in range(2)]
    read = [sample for loader in ranks for sample in loader]
    assert all(read.count(sample) == 4 for sample in range(8))


def test_buffers_are_sent_by_the_constructor_unless_the_old_flag_is_off():
    """``broadcast_buffers=False`` leaves out the first broadcast as well; the new flag does not."""
    for flag, kept in (("broadcast_buffers", [1.0, 2.0]), ("forward_sync_buffers", [1.0, 1.0])):
        assert [outcome.value for outcome in run_ranks(mean_of_rank, 2, flag)] == kept


def mean_of_rank(rank, world_size, flag):
    """Wrap a layer whose running mean is rank + 1; return it afterwards."""
    warnings.simplefilter("ignore")  # the old flag is deprecated
    layer = nn.BatchNorm1d(1)
    assert layer.running_mean is not None
    layer.running_mean.fill_(rank + 1)
    DistributedDataParallel(layer, **{flag: False})
    return layer.running_mean.item()
