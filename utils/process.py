"""One process: its device, its comparison with the other ranks, and stop signals."""

import argparse
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from utils.errors import UsageError

# Flags that may differ between machines.
OF_ONE_MACHINE = {"threads", "num_workers", "data_dir", "run_dir", "init_weights", "local_rank"}
SHOWN = 80  # characters of a value that a message quotes
COMPARED = 32  # samples of a data set, and not all, because each may be a file to read
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def select_devices(args: argparse.Namespace) -> list[torch.device]:
    """Return the devices that ``--device`` and ``--devices`` name, by default all GPUs or the CPU.

    Raises:
        UsageError: a device does not exist.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.device == "cuda" and count == 0:
        raise UsageError("--device cuda: torch finds no GPU: a CPU build, or an old driver?")
    if args.device == "cpu" or count == 0:
        return [torch.device("cpu")]
    indices = getattr(args, "devices", None) or range(count)
    if max(indices) >= count:
        raise UsageError(f"--devices {max(indices)}: there are {count} GPUs, numbered from 0")
    return [torch.device("cuda", index) for index in indices]


def setup_device(args: argparse.Namespace, local_rank: int = 0) -> torch.device:
    """Set the CPU threads, apply ``--deterministic``, and return the device of this process.

    Args:
        args: the parsed command line.
        local_rank: the number of this process on its machine. It uses the GPU with this number, or
            GPU 0 if each process can see one GPU only, as under Slurm's ``--gpus-per-task=1``.

    Raises:
        UsageError: there is no such device.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.threads:
        torch.set_num_threads(args.threads)
    elif processes > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        # For several processes, torchrun sets OMP_NUM_THREADS=1 if it is not set. Any other number
        # was chosen by the user.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    devices = select_devices(args)
    if len(devices) == 1:
        return devices[0]
    if local_rank >= len(devices):
        raise UsageError(f"there is no GPU {local_rank}: start at most {len(devices)} processes")
    return devices[local_rank]


def whole_numbers(sample: Any) -> list[int]:
    """Return the whole numbers in the parts of a sample, such as its label: none of an image."""
    parts = list(sample.values()) if isinstance(sample, Mapping) else sample
    found: list[int] = []
    for part in parts if isinstance(parts, (list, tuple)) else ():
        with suppress(RuntimeError, TypeError, ValueError):  # of a text, for example
            tensor = torch.as_tensor(part)
            if tensor.ndim < 2 and not tensor.is_floating_point():
                found += tensor.flatten()[:10].tolist()
    return found


def check_same(args: argparse.Namespace, *datasets: Any) -> None:
    """Compare the flags, torch and data of all ranks with those of rank 0. Collective.

    Of the data, the lengths and some labels are compared. Images are not compared, because they may
    be augmented at random.

    Raises:
        UsageError: a rank differs from rank 0. The message is the same on all ranks.
    """
    facts = {f"--{k}": value for k, value in vars(args).items() if k not in OF_ONE_MACHINE}
    facts["torch"] = str(torch.__version__)
    for number, dataset in enumerate(datasets):
        indices = range(0, len(dataset), max(1, len(dataset) // COMPARED))
        # If the training has loader workers, a worker reads here, too. A data set that opens its
        # file with the first sample would open it in this process, and all workers would share it.
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=indices,
            num_workers=min(args.num_workers, 1),
            collate_fn=whole_numbers,
            generator=torch.Generator(),  # or it would draw from the generator of the weights
        )
        facts[f"the length of data set {number}"] = len(dataset)
        facts[f"the labels of data set {number}"] = list(loader)
    ranks: list[dict[str, Any]] = [facts] * dist.get_world_size()
    dist.all_gather_object(ranks, facts)
    for rank, own in enumerate(ranks):
        for name, value in ranks[0].items():
            if own[name] != value:
                ours = str(own[name])[:SHOWN]
                theirs = str(value)[:SHOWN]
                raise UsageError(
                    f"rank {rank} has {name} {ours}, rank 0 has {theirs}: start every rank with the"
                    " same command, code, data and packages"
                )


class StopSignal:
    """Note the first stop signal that arrives. A second Ctrl-C ends the process at once.

    Attributes:
        number: the number of the signal, or 0 as long as none has arrived.
    """

    def __init__(self) -> None:
        self.number = 0
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # torchrun sends a second Ctrl-C as SIGTERM
        if self.number == 0 and os.environ.get("LOCAL_RANK", "0") == "0":
            # Not print(), which may not be called while another print() is interrupted.
            os.write(2, b"stopping: this run will save and end\n")
        self.number = self.number or number


def detach_worker(worker_id: int) -> None:
    """Move a loader worker into a process group of its own. For ``DataLoader(worker_init_fn=...)``.

    A terminal sends Ctrl-C to a whole process group, and torchrun sends SIGTERM to the group of
    each rank. If the loader workers ended too, the orderly stop of their rank would become a crash.
    """
    os.setpgrp()
