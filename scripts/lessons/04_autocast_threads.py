"""Autocast to bfloat16 around a DataParallel model: in which dtype do its replicas compute?

nn.DataParallel runs each replica in a thread. A script asks for another dtype than the device's
default, which is float16 on GPUs and bfloat16 on CPUs. So on the CPU this lesson asks for float16.

a) In the default of the device.
b) In the dtype that the script asks for.
c) In float32.

DP opens autocast in each thread without a dtype (torch/nn/parallel/parallel_apply.py). On GPUs the
replicas compute in float16, which also needs a GradScaler. DistributedDataParallel has no such
threads.
"""

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import _lesson as lesson
import torch
from torch import Tensor
from torch.nn.parallel import parallel_apply

lesson.start(__doc__, answer="a")


def forward() -> Tensor:
    return torch.ones(2, 2) @ torch.ones(2, 2)


def forward_with_autocast() -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return forward()


def forward_with_dtype_set() -> Tensor:
    torch.set_autocast_dtype("cpu", torch.float16)  # as train_dp.py does before each forward
    return forward()


def replica(forward: Callable[[], Tensor]) -> torch.dtype:
    """Run a forward as parallel_apply does in each thread; return the dtype of its output."""
    with torch.amp.autocast("cpu", enabled=True):  # no dtype
        return forward().dtype


forwards = (forward, forward_with_autocast, forward_with_dtype_set)
with ThreadPoolExecutor(1) as pool, torch.autocast("cpu", dtype=torch.float16):
    caller = forward().dtype
    broken, inside, hooked = (pool.submit(replica, each).result() for each in forwards)
# So PyTorch does it: a version that passes on the dtype would need no cure.
assert "autocast(device_type, enabled=autocast_enabled)" in inspect.getsource(parallel_apply)
print('Under autocast("cpu", dtype=torch.float16):')
print(f"  the calling thread computes in      {caller}")
print(f"  a replica's thread computes in      {broken}")
print(f"  with autocast inside of the forward {inside}")
print(f"  with the dtype set in the thread    {hooked}")
assert caller == torch.float16
# The thread opens autocast without a dtype, and gets the default.
assert broken == torch.bfloat16
assert torch.get_autocast_dtype("cuda") == torch.float16  # the default on GPUs
# Cures: the model's own forward opens autocast, or the dtype is set in the thread.
assert inside == hooked == torch.float16

lesson.claim("a replica's thread does not know autocast's dtype, and computes in the default one.")
