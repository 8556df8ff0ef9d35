"""What ``nn.DataParallel`` needs on GPUs, and its own algorithm on the threads of a CPU."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_map

from utils import device
from utils.errors import UsageError

CPU_REPLICAS = 2  # the fewest with which DataParallel splits anything


def replica_devices(
    kind: str, ids: list[int] | None, replicas: int | None, output_device: int | None
) -> list[torch.device]:
    """Return the device of each replica: GPUs, or the CPU once for each replica.

    The model lives on the first one, as ``setup_device`` chooses it.

    Args:
        kind: as for ``utils.device.select_devices``.
        ids: logical device ids, or None for all.
        replicas: CPU threads instead of GPUs. None for ``CPU_REPLICAS``.
        output_device: logical id of the GPU that gathers the outputs. None for the first.

    Raises:
        UsageError: devices or arguments that DataParallel cannot use.
    """
    devices = device.select_devices(kind, ids)
    first = devices[0]
    if first.type in ("mps", "xpu"):  # one device, and no communication between several
        raise UsageError(f"DataParallel does not work on {first.type}: pass --device cpu")
    indices = [gpu.index for gpu in devices if gpu.index is not None]
    if output_device is not None and output_device not in indices:
        raise UsageError(f"--output-device {output_device} is not one of the GPUs {indices}")
    if first.type == "cpu":
        devices *= replicas or CPU_REPLICAS
        print(f"no GPU in use: {len(devices)} CPU threads, whose dropout is not reproducible")
    elif replicas is not None:
        raise UsageError("--replicas is for the CPU: choose GPUs with --devices")
    return devices


def keep_autocast_dtype(raw_model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Let every replica compute in this dtype, where autocast is on.

    The dtype of autocast belongs to a thread. ``parallel_apply``
    (torch/nn/parallel/parallel_apply.py) opens autocast in the thread of each replica without a
    dtype. So a new CUDA thread would compute in fp16 instead of bf16, and without the loss scaling
    that fp16 needs.
    """
    raw_model.register_forward_pre_hook(lambda *_: torch.set_autocast_dtype(device_type, dtype))


class CPUDataParallel(nn.DataParallel):
    """DataParallel's own ``forward``, with CPU threads instead of GPUs.

    Without a GPU ``nn.DataParallel`` passes its input straight to the model, silently. This class
    replaces the four methods that its ``forward`` is made of, so that the comparison runs anywhere.
    Two things differ from GPUs. The replicas share one memory and one random generator, so dropout
    is not reproducible. And the CPU's autograd runs the whole backward on the calling thread,
    whereas CUDA has a thread for each device.
    """

    def __init__(self, module: nn.Module, replicas: int) -> None:
        # Not DataParallel.__init__: it would take GPUs if there are any, and set nothing otherwise.
        nn.Module.__init__(self)
        self.module = module
        self.dim = 0
        self.device_ids = list(range(replicas))
        self.output_device = 0
        self.src_device_obj = torch.device("cpu")
        self.threads_each = max(1, torch.get_num_threads() // replicas)

    @record_function("DataParallel.scatter")
    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
        """Cut tensors [B, ...] into at most ``len(device_ids)`` chunks, and pass the rest whole."""
        count = len(device_ids)

        def split(value: Any) -> Sequence[Any]:
            if not isinstance(value, Tensor):
                return [value] * count
            # Views would share their version, and a forward may change its input in place.
            return [chunk.clone() for chunk in value.chunk(count, self.dim)]

        shares = list(zip(*map(split, inputs), strict=False))  # a small batch has fewer chunks
        named = {name: split(value) for name, value in (kwargs or {}).items()}
        return shares, [{name: named[name][i] for name in named} for i in range(len(shares))]

    @record_function("DataParallel.replicate")
    def replicate(self, module: nn.Module, device_ids: Sequence[Any]) -> list[nn.Module]:
        """Copy the module for each replica, so that gradients flow back to the one original.

        As on GPUs, the first replica shares its buffers with the module. So the running statistics
        of the first replica stay, and those of the others are lost.
        """
        return [_replica(module, share_buffers=i == 0) for i in device_ids]

    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        """Run each replica in a thread of its own, as ``torch.nn.parallel.parallel_apply`` does."""
        grad, amp = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

        def work(i: int) -> Any:
            # Grad mode, autocast and thread count belong to the thread. PyTorch passes no dtype
            # either, as ``keep_autocast_dtype`` explains.
            torch.set_num_threads(self.threads_each)
            with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=amp):
                return replicas[i](*inputs[i], **kwargs[i])

        with ThreadPoolExecutor(len(replicas)) as pool:
            return list(pool.map(work, range(len(replicas))))

    @record_function("DataParallel.gather")
    def gather(self, outputs: Sequence[Any], output_device: Any) -> Any:
        """Join the outputs [B/n, ...] to one [B, ...], also in a tuple, list or dict.

        Their backward hands out the gradients. Scalars become a vector of one for each replica, as
        on GPUs.
        """

        def join(*parts: Any) -> Any:
            if not isinstance(parts[0], Tensor):
                return parts[0]
            return torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts])

        return tree_map(join, *outputs)


def _replica(module: nn.Module, share_buffers: bool) -> nn.Module:
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else _replica(child, share_buffers)
    for name, parameter in module._parameters.items():
        # The copy is not a leaf, so backward adds its gradients to the grad of the original.
        setattr(replica, name, None if parameter is None else parameter.clone())
    for name, buffer in module._buffers.items():
        if buffer is not None and not share_buffers:
            replica._buffers[name] = buffer.clone()
    return replica
