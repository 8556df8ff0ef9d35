"""Break it: autocast's dtype does not reach a thread, so DataParallel's replicas use the default.

nn.DataParallel runs each replica in a thread, and opens autocast there without the dtype
(torch/nn/parallel/parallel_apply.py). So on GPUs, under autocast("cuda", dtype=torch.bfloat16), the
replicas compute in float16. They also lack loss scaling. A CPU's default is bfloat16. Therefore
this lesson asks for float16, and its threads compute in bfloat16. DDP has no such threads.
train_dp.py sets the dtype in a hook that runs before each replica's forward.

It prints the dtype in which each replica computes, without and with the hook.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from _lesson import start
from torch import Tensor


def forward() -> Tensor:
    return torch.ones(2, 2) @ torch.ones(2, 2)


def forward_with_autocast() -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return forward()


def forward_after_hook() -> Tensor:
    torch.set_autocast_dtype("cpu", torch.float16)  # in the thread, inside of its autocast
    return forward()


def replica(forward: Callable[[], Tensor]) -> torch.dtype:
    """Run a forward as parallel_apply does in each thread; return the dtype of its output."""
    with torch.amp.autocast("cpu", enabled=True):  # no dtype
        return forward().dtype


def main() -> dict[str, bool]:
    forwards = (forward, forward_with_autocast, forward_after_hook)
    with ThreadPoolExecutor(1) as pool:
        with torch.autocast("cpu", dtype=torch.float16):
            caller = forward().dtype
            broken, cured, hooked = (pool.submit(replica, each).result() for each in forwards)
        default = torch.get_autocast_dtype("cuda")
        torch.set_autocast_dtype("cuda", torch.bfloat16)  # autocast("cuda", dtype=...) calls it
        cuda = pool.submit(torch.get_autocast_dtype, "cuda").result()
        torch.set_autocast_dtype("cuda", default)
    print('under autocast("cpu", dtype=torch.float16)')
    print(f"  the calling thread computes in           {caller}")
    print(f"  a replica's thread computes in           {broken}")
    print(f"  the same, with autocast in its forward   {cured}")
    print(f"  the same, with the dtype set in a hook   {hooked}")
    print(f"CUDA's dtype, set to torch.bfloat16, is {cuda} in another thread")
    return {
        "a thread that opens autocast without a dtype gets the default of the device": (
            (caller, broken) == (torch.float16, torch.bfloat16)
        ),
        "for CUDA the default is float16, although bfloat16 was asked for": cuda == torch.float16,
        "cure: open autocast, with its dtype, in the model's forward": cured == torch.float16,
        "cure: set the dtype in the thread, before the forward": hooked == torch.float16,
    }


if __name__ == "__main__":
    start(main, "The caller asks autocast for float16. In which type do two replicas compute?")
