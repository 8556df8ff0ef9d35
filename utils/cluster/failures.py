"""What to say when ranks do not answer any more: which ones, at which step, and why.

A rank that notices a failure adds itself to a list in the store, and calls the roll. A thread of
each rank answers, even while the rank computes. The thread of rank 0 finds out which ranks are
lost, and writes that for all ranks. A rank that fails with an error of its own writes that itself.
"""

import json
import os
import re
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from utils.cluster.calls import POLL_SECONDS, call_within
from utils.cluster.meeting import MAX_SHOWN, Meeting, name, read_by_all, read_ranks
from utils.errors import UsageError, UserError, describe

# Words in the errors of the backends, which are plain RuntimeErrors.
OF_BACKEND = ("gloo/transport", "timeout caused pair closure", "NCCL")
# By whether a rank is lost, and whether there is a process group.
ADVICE = {
    (True, True): "it crashed, left, stalled or was slower than --timeout; its own output says more"
    " (op.preamble.length: it called another collective, or its model took another branch)",
    (True, False): "it crashed, left, stalled or still prepares its data (then prepare it"
    " beforehand, or raise --rdzv-timeout)",
    (False, True): "one rank called a collective that the others did not, or was slower than"
    " --timeout",
    (False, False): "the backend cannot connect the ranks, whose hosts must reach each other on all"
    " ports, through the interface that GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names",
}
FIND_SECONDS = 60.0  # more than rank 0 needs to find out who is lost
ROLL_SECONDS = 2.0  # after the last answer, a rank that has not answered is lost
BUSY_SECONDS = 10.0  # in which a rank that answers, but still computes, notices the failure
FOREVER = timedelta(days=1000)


class LostRank(UserError):
    """A collective failed because another rank is gone, or did not answer in time.

    Attributes:
        ranks: the lost ones, at most the first eight.
    """

    ranks: list[int]


class Job:
    """All ranks of a launch, as one of them sees them. It names the ranks that get lost.

    Args:
        meeting: in which this rank met the others.
        rdzv_timeout: seconds within which the process group has to exist.

    Attributes:
        ranks_sharing_cores: how many ranks share the cores of this rank, itself included.
    """

    def __init__(self, meeting: Meeting, rdzv_timeout: float) -> None:
        self.meeting, self.rdzv_timeout = meeting, rdzv_timeout
        self.store, self.rank, self.world_size = meeting.store, meeting.own.rank, meeting.world_size
        self.ranks_sharing_cores = meeting.sharing_cores
        self.is_called, self.lock = threading.Event(), threading.Lock()  # called: a rank has failed
        self.has_failed = False  # the main thread prints an error
        self.error: LostRank | None = None
        if self.world_size > 1:
            threading.Thread(target=self._answer, daemon=True).start()

    def rendezvous(self) -> dist.Store:
        """Return the store for ``init_process_group``, whose time is limited from now on.

        ``init_process_group`` does not return while the host of its store is stopped, whatever its
        timeout. With no process group after ``rdzv_timeout`` a thread ends this process, with one
        line that names the ranks that have not come this far.
        """
        if self.world_size == 1:
            return self.store
        # NCCL's watchdog would abort the process while it still asks who is lost. 2 (CleanUpOnly
        # in ProcessGroupNCCL.hpp) aborts the communicators alone. A collective that was cut off
        # leaves wrong numbers, and the next one raises. No checkpoint has such numbers, since a sum
        # over ranks precedes every save.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        threading.Thread(target=self._watch, daemon=True).start()
        # A connection is busy while a thread waits for a key. This rank still needs its own.
        store = self.store.clone()
        store.set_timeout(timedelta(seconds=self.rdzv_timeout))
        return store

    def _watch(self) -> None:
        """End this process if the process group does not exist in time."""
        begin = time.monotonic()
        self.is_called.wait(self.rdzv_timeout)
        if dist.is_initialized() or self.has_failed:
            return
        error = self._name_lost(f"after {time.monotonic() - begin:.0f} s", None)
        if not self.has_failed:
            if not error.reported_elsewhere:
                os.write(2, f"{Path(sys.argv[0]).name}: error: {error}\n".encode())
            os._exit(error.exit_status)

    def _answer(self) -> None:
        """Say that this process lives when a rank calls the roll. On rank 0 find out who is lost.

        Of the ranks that did not notice a failure, one that does not answer is gone or stalled. One
        that answers is busy, or waits for something else.
        """
        with suppress(RuntimeError):  # the store ends with rank 0
            store = self.store.clone()
            store.wait(["roll_call"], FOREVER)
            store.append("alive", f"{self.rank} ")
            self.is_called.set()
            everyone, known, begin = {*range(self.world_size)}, -1, time.monotonic()
            while self.rank == 0 and not store.check(["lost"]):
                failed, alive = read_ranks(store, "failed"), read_ranks(store, "alive")
                if len(failed) + len(alive) > known:
                    known, last = len(failed) + len(alive), time.monotonic()
                absent = everyone - failed - alive
                end = last + ROLL_SECONDS if absent else begin + BUSY_SECONDS
                if failed == everyone or time.monotonic() > end:
                    self._write_lost(store, absent or everyone - failed)
                time.sleep(POLL_SECONDS)

    def _write_lost(self, store: Any, ranks: set[int], cause: str = "") -> None:
        """Write for all ranks who is lost, unless another rank has done so."""
        names = f"rank {name(store, sorted(ranks))}" if ranks else "no rank"
        lost = json.dumps([sorted(ranks)[:MAX_SHOWN], names, cause])
        store.compare_set("lost", "", lost)
        store.set("roll_call", "")  # also for the ranks that wait for the process group

    def explain(self, error: Exception, step: int | None = None) -> Exception:
        """Return a ``LostRank`` for a backend's error, and any other error as it is.

        An error of this rank's own is written for the other ranks, which will miss this rank.

        Args:
            error: an error in the run, or in ``init_process_group``.
            step: optimizer steps of the run until then, or None before and after training.
        """
        if self.world_size == 1 or self.has_failed:
            return error
        self.has_failed, text = True, str(error)
        if "Duplicate GPU detected" in text:
            error = UsageError(
                "two ranks have the same GPU (NCCL: Duplicate GPU"
                f" {text.partition('Duplicate GPU')[2].splitlines()[0]}): start one process for"
                " each, or give each its own (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES), or"
                " try --backend gloo, whose ranks may share"
            )
        is_of_backend = isinstance(error, RuntimeError) and any(w in text for w in OF_BACKEND)
        if is_of_backend or isinstance(error, dist.DistError):
            reason = re.sub(r"^\[\S*\] ", "", text.splitlines()[0]).partition(". ")[0]
            return self._name_lost(reason, step)
        cause = str(error) if isinstance(error, UserError) else describe(error)
        with suppress(OSError, RuntimeError):  # the store has ended with rank 0
            call_within(self.meeting.patience, self._write_lost, self.store, {self.rank}, cause)
        return error

    def _name_lost(self, reason: str, step: int | None) -> LostRank:
        with self.lock:  # the watching thread may ask at the same time
            if self.error is None:
                # If the store does not answer, rank 0 is gone or stopped.
                ranks, names, cause = [0], f"rank {self.meeting.main}", ""
                is_reported = self.rank != self.meeting.mates[-1]
                with suppress(OSError, RuntimeError):
                    self.store.append("failed", f"{self.rank} ")
                    self.store.set("roll_call", "")
                    call_within(self.meeting.patience, self.store.check, ["roll_call"])
                    ranks, names, cause, is_reported = call_within(FIND_SECONDS, self._read_lost)
                when = "before or after training" if step is None else f"at step {step}"
                cause = cause or ADVICE[bool(ranks), dist.is_initialized()]
                self.error = LostRank(f"rank {self.rank} lost {names} {when}: {cause} ({reason})")
                self.error.ranks, self.error.reported_elsewhere = ranks, is_reported
            return self.error

    def _read_lost(self) -> list[Any]:
        """Return who is lost and why, and whether another rank of this host reports it."""
        lost = json.loads(self.store.get("lost"))
        readers = self.world_size - len(lost[0])
        return [*lost, read_by_all(self.meeting, "lost", readers, BUSY_SECONDS)]
