"""Watch the process group: where it begins, and each collective before it begins."""

import os
import re
from typing import Any

import record
import torch.distributed as dist
from record import replaces, state
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "gather_into_tensor",
    "gather_single",
    "monitored_barrier",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
BETWEEN_TWO = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
SHOWN = 16  # elements of a tensor whose values are compared
REDUCE_OP = dist.ReduceOp
NEEDED = (dist.FileStore, dist.get_process_group_ranks, dist.GroupMember.NON_GROUP_MEMBER)


@replaces(dist, c10d)
def init_process_group(real: Any, *args: Any, **keywords: Any) -> None:
    passed = record.by_name(real, *args, **keywords)
    for name in ("world_size", "rank"):
        if passed.get(name) in (-1, None):
            passed[name] = os.environ[name.upper()]
    world, rank = int(passed["world_size"]), int(passed["rank"])
    if world != state.world:
        record.again(world, state.mode)
    record.call("init_process_group", rank=rank)
    state.groups += 1
    state.is_parent = False
    store = dist.FileStore(f"{state.root}/.store{state.groups}", world)
    with record.in_collective:
        real("gloo", store=store, rank=rank, world_size=world)
    record.tell("group")


def _ranks_of(name: str, passed: dict[str, Any]) -> list[int]:
    if name == "new_group" and passed.get("use_local_synchronization"):
        return sorted(passed["ranks"])
    return dist.get_process_group_ranks(passed.get("group") or dist.group.WORLD)


def _announced(name: str) -> Any:
    """Return a function that announces a collective, and then calls the real one."""

    def collective(real: Any, *args: Any, **keywords: Any) -> Any:
        passed = record.by_name(real, *args, **keywords)
        is_outside = passed.get("group") is dist.GroupMember.NON_GROUP_MEMBER
        if record.in_collective.depth or is_outside or not dist.is_initialized():
            return real(*args, **keywords)
        facts = {key: passed[key] for key in ("src", "dst", "ranks") if passed.get(key) is not None}
        tensor = next((item for item in passed.values() if isinstance(item, Tensor)), None)
        if tensor is not None and not re.search("all_to_all|object", name):  # sizes may differ
            sizes = [item.numel() for item in passed.get("tensor_list") or [tensor]]
            facts |= {"elements": sum(sizes), "dtype": str(tensor.dtype)}
            optimizers = record.optimizers.values()
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            if any(grad.data_ptr() == tensor.data_ptr() for grad in grads):
                record.tell("averaged by hand")
        ranks = _ranks_of(name, passed)
        record.call(name, ranks, **facts)
        if re.search("reduce|gather", name):
            _tell_values(name, passed, tensor)
        if name == "new_group":
            passed["backend"] = "gloo"
        with record.in_collective:
            return real(**passed)

    return collective


def _tell_values(name: str, passed: dict[str, Any], tensor: Tensor | None) -> None:
    """Tell that results were combined, and which counts were summed."""
    elements = 0 if tensor is None else tensor.numel()
    is_sum = "reduce" in name and passed.get("op", REDUCE_OP.SUM) == REDUCE_OP.SUM
    values = (
        tensor.flatten().tolist() if is_sum and tensor is not None and elements <= SHOWN else []
    )
    counts = is_sum and tensor is not None and not tensor.is_floating_point()
    record.tell("combined", elements=elements, values=values, counts=counts)


def _between_two(real: Any, *args: Any, **keywords: Any) -> Any:
    record.tell("sent between two")
    return real(*args, **keywords)


for _name in COLLECTIVES:
    if hasattr(dist, _name):
        replaces(dist, c10d, name=_name)(_announced(_name))
for _name in BETWEEN_TWO:
    replaces(dist, c10d, name=_name)(_between_two)
dist.is_nccl_available = lambda: True
