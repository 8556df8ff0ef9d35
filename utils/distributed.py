"""What the ranks of a process group do together, beyond what DDP asks for.

All ranks must call the functions marked *collective*, in the same order. Without a process group,
as in train_single.py and train_dp.py, these functions return their argument: a single process is
rank 0 of one. All of them run on the CPU, over gloo. There a lost rank ends a wait, whereas nothing
can interrupt a read from a GPU that waits for NCCL.
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.errors import UserError, describe

Result = TypeVar("Result")


def rank() -> int:
    """Return this process's number among all ranks. Only meaningful once the group exists."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks. Only meaningful once the group exists."""
    return dist.get_world_size() if dist.is_initialized() else 1


def backend(device: torch.device) -> str | None:
    """Return the name of the backend that serves a device, or None without a process group."""
    if not dist.is_initialized():
        return None
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))[device.type]


def broadcast(value: Result) -> Result:
    """Return rank 0's ``value``, which is pickled. Collective."""
    values = [value]
    if dist.is_initialized():
        # PyTorch sends objects over gloo if the group has it. So the GPU's queue is not disturbed.
        dist.broadcast_object_list(values, src=0)
    return values[0]


def call_on_rank_0(function: Callable[..., Result], *args: Any) -> Result:
    """Call a function on rank 0, and return its result or raise its error on all. Collective.

    Args:
        function: called on rank 0. Its result is pickled.

    Raises:
        UserError: the same on all ranks. If rank 0 raises any other exception, the other ranks
            raise a ``UserError`` that names it.
    """
    outcome: Any = None
    raised: Exception | None = None
    if rank() == 0:
        try:
            outcome = function(*args)
        except Exception as error:
            is_explained, raised = isinstance(error, UserError), error
            text = str(error) if is_explained else f"rank 0 failed ({describe(error)})"
            outcome = UserError(text)
            outcome.exit_status = getattr(error, "exit_status", 1)
            outcome.reported_elsewhere = True
    outcome = broadcast(outcome)
    if raised is not None:
        raise raised
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


# Kept until the process ends. Otherwise DDP drops the last reference, and waits for gloo's threads
# with the GIL in its hands, which they may need. With torch 2.9 runs hung at their end.
_GROUPS = list[Any]()


class StopAgreement:
    """Let all ranks stop after the same step. Collective.

    At some steps the ranks start to send the number of the stop signal that they got, and they read
    the largest number at the step after. In between, the numbers are sent beside the training, and
    no rank waits for another. Without other ranks there is nothing to send.

    Raises:
        UserError: another rank called something else.
    """

    INTERVAL = 10  # steps. At each step it would couple all machines
    LONG_STEP = 0.1  # seconds. Of longer steps each counts, since a launcher kills after 30 s

    def __init__(self) -> None:
        _GROUPS.append(dist.group.WORLD)
        self.interval = 1  # until the first steps have been timed
        self.calls = self.steps = 0
        self.since = time.monotonic()
        self.pending: tuple[dist.Work, Tensor] | None = None

    def after_step(self, number: int) -> int:
        """Return the signal on which the ranks agree, or 0. Called after each optimizer step.

        Args:
            number: of the signal that this rank got, or 0.
        """
        if world_size() == 1:
            return number
        agreed = self._read()
        self.steps += 1
        if self.steps >= self.interval:
            self._send(number)
        return agreed

    def now(self, number: int) -> int:
        """Return the signal on which the ranks agree, and wait for all of them."""
        if world_size() == 1:
            return number
        earlier = self._read()
        self._send(number)
        return max(earlier, self._read())

    def _send(self, number: int) -> None:
        now = time.monotonic()
        microseconds = (now - self.since) * 1e6 / max(1, self.steps)
        self.calls, self.steps, self.since = self.calls + 1, 0, now
        values = torch.tensor([number, int(microseconds), self.calls, -self.calls])
        work = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True)
        self.pending = work, values

    def _read(self) -> int:
        if self.pending is None:
            return 0
        work, values = self.pending
        self.pending = None
        work.wait()
        number, microseconds, last, negated_first = values.tolist()
        if last != -negated_first:
            raise UserError(f"the ranks are out of step: call {self.calls} met another")
        # The same on all ranks, since they share the number.
        self.interval = 1 if microseconds > self.LONG_STEP * 1e6 else self.INTERVAL
        return number


def sum_over_ranks(sums: Tensor) -> Tensor:
    """Return the element-wise sum of a CPU tensor [n] over all ranks, as a new one. Collective."""
    total = sums.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def gather(number: int) -> list[int]:
    """Return every rank's ``number``, in the order of ranks. Collective."""
    numbers = torch.zeros(world_size(), dtype=torch.int64)
    numbers[rank()] = number
    return sum_over_ranks(numbers).tolist()
