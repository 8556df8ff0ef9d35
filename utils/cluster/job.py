"""What to say when ranks do not answer any more: which ones, at which step, and why.

A rank that notices a failure adds itself to a list in the store, and calls the roll. A thread of
each rank answers, even while the rank computes. The thread of rank 0 finds out which ranks are
lost, and writes that for all ranks. A rank that fails with an error of its own writes that itself.

A rank that waits in C++ notices nothing: in ``init_process_group``, or for a GPU whose collective
waits for a lost rank. So a thread watches the next rank, another one the store and NCCL. If the
main thread has not ended by itself some seconds after a rank was lost, this process is ended.
"""

import json
import math
import os
import re
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from utils import signals
from utils.cluster.calls import POLL_SECONDS, call_within
from utils.cluster.meeting import MAX_SHOWN, Meeting, name, read_by_all, read_ranks
from utils.errors import UsageError, UserError, describe
from utils.signals import STOPPED, Stopped

# Words in the errors of the backends, which are plain RuntimeErrors.
OF_BACKEND = ("gloo/transport", "timeout caused pair closure", "NCCL")
# By whether a rank is lost, and whether there is a process group.
ADVICE = {
    (True, True): "it crashed, stalled, was slower than --timeout or gave up this rank; its own"
    " output says more (op.preamble.length: it called another collective or took another branch)",
    (True, False): "it crashed, left, stalled or still prepares its data (then prepare it"
    " beforehand, or raise --rdzv-timeout)",
    (False, True): "one rank called a collective that others did not, or was slower than --timeout",
    (False, False): "the backend cannot connect the ranks, whose hosts must reach each other on all"
    " ports, through the interface that GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names",
}
FIND_SECONDS = 60.0  # more than rank 0 needs to find out who is lost
ROLL_SECONDS = 2.0  # after the last answer, a rank that has not answered is lost
BUSY_SECONDS = 10.0  # in which a rank that answers, but still computes, notices the failure


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
        backend: for ``init_process_group``.
    """

    def __init__(self, meeting: Meeting, rdzv_timeout: float, backend: str = "gloo") -> None:
        self.meeting, self.rdzv_timeout, self.backend = meeting, rdzv_timeout, backend
        self.store, self.rank, self.world_size = meeting.store, meeting.own.rank, meeting.world_size
        # Lost ranks, their names, why, whether that is a mistake, and whether others report it.
        self.verdict: list[Any] = []
        self.is_told, self.told_at = threading.Event(), math.inf  # there is a verdict, or no store
        self.has_failed = False  # the main thread reports an error
        for work in (self._answer, self._watch_next):
            threading.Thread(target=work, daemon=True).start()

    def rendezvous(self) -> dist.Store:
        """Return the store for ``init_process_group``, whose time is limited from now on.

        ``init_process_group`` does not return while the host of its store is stopped, whatever its
        timeout. If a rank is lost, or there is no process group after ``rdzv_timeout``, a thread
        ends this process, with one line that names the ranks that have not come this far.

        Raises:
            UsageError: another rank has the same GPU.
        """
        threading.Thread(target=self._watch, daemon=True).start()
        if "nccl" in self.backend:
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            own = str(self.meeting.own)
            owner = self.store.compare_set(f"gpu/{uuid}", "", own).decode()
            if owner != own:
                raise UsageError(
                    f"ranks {owner} and {own} have the same GPU: give each rank one (srun"
                    " --gpus-per-task=1, CUDA_VISIBLE_DEVICES), or try --backend gloo"
                )
        # After a timeout NCCL's watchdog would abort the process, while this rank still asks who is
        # lost. With 0 (NoHandling in ProcessGroupNCCL.hpp) it writes the flight recorder, and notes
        # the error, which ``_watch`` reads. With 2 it ends the collective with wrong numbers.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        # A connection is busy while a thread waits for a key. This rank still needs its own.
        store = self.store.clone()
        store.set_timeout(timedelta(seconds=self.rdzv_timeout))
        return store

    def _watch(self) -> None:
        """End this process if its main thread waits in C++ for what will not come."""
        begin = time.monotonic()
        while not self.has_failed and not dist.is_initialized():
            is_told, number = self.is_told.wait(4 * POLL_SECONDS), signals.received()
            is_late = time.monotonic() - begin > self.rdzv_timeout
            # The group may have been made meanwhile, and whoever waits in a step hears by itself.
            if not dist.is_initialized() and (is_told or number or is_late):
                self._end(number, f"no process group after {self.rdzv_timeout:.0f} s" * is_late)
        while not self.has_failed and dist.is_initialized():
            time.sleep(4 * POLL_SECONDS)
            # A main thread that can notice a failure by itself has time to do so.
            if self._has_nccl_failed() or time.monotonic() - self.told_at > BUSY_SECONDS:
                self._end()

    def _end(self, number: int = 0, reason: str = "") -> None:
        """End this process, unless its main thread goes on meanwhile.

        Args:
            number: of a stop signal. It is what the process ends with if no other rank is lost.
        """
        has_group = dist.is_initialized()
        self._call_roll(not number, 2 * ROLL_SECONDS if number else FIND_SECONDS)
        error: UserError = self._name_lost(reason, "while it waited")
        if number and (not self.verdict or self.verdict[2].startswith(STOPPED)):
            error = Stopped(number)
            error.reported_elsewhere = self.rank != self.meeting.mates[0]
        if not self.has_failed and dist.is_initialized() == has_group:
            signals.end_at_once(error)

    def _has_nccl_failed(self) -> bool:
        """Return whether NCCL's own thread has found an error, or a collective beyond --timeout."""
        with suppress(AttributeError, RuntimeError):  # the group is being made, or destroyed
            if "nccl" in self.backend:
                group: Any = dist.group.WORLD
                return group._get_backend(torch.device("cuda")).get_error().name != "SUCCESS"
        return False

    def _watch_next(self) -> None:
        """Call the roll when the process of the next rank ends."""
        with suppress(OSError):  # there is a firewall
            connection = socket.create_connection(self.meeting.next)
            with suppress(ConnectionResetError):
                connection.recv(1)
            self._call_roll(has_failed=False)

    def _call_roll(self, has_failed: bool, seconds: float = 0.0) -> None:
        """Let all ranks say that they live, and wait until rank 0 has found out who does not.

        Args:
            has_failed: whether this rank has noticed a failure.
            seconds: to wait at most.
        """
        with suppress(OSError, RuntimeError):  # rank 0 is stopped or gone
            # Unlike ``set`` and ``append``, ``add`` is answered.
            call_within(self.meeting.patience, self.store.add, "roll_call", 1)
            if has_failed:
                self.store.append("failed", f"{self.rank} ")
            self.is_told.wait(seconds)

    def _answer(self) -> None:
        """Say that this process lives when a rank calls the roll, and read who is lost.

        On rank 0 find that out. Of the ranks that did not notice a failure, one that does not
        answer is gone or stalled. If some noticed one and all answer, the others are busy, or wait
        for something else.
        """
        with suppress(RuntimeError):  # the store ends with rank 0
            store = self.store.clone()
            store.wait(["roll_call"], timedelta(days=1000))
            store.append("alive", f"{self.rank} ")
            everyone, known, last = {*range(self.world_size)}, -1, 0.0
            while self.rank == 0 and not store.check(["lost"]):
                failed, alive = read_ranks(store, "failed"), read_ranks(store, "alive")
                if len(failed) + len(alive) > known:
                    known, last = len(failed) + len(alive), time.monotonic()
                absent = everyone - failed - alive
                end = last + (ROLL_SECONDS if absent else BUSY_SECONDS)
                if failed == everyone or (time.monotonic() > end and (absent or failed)):
                    self._write_lost(absent or everyone - failed)
                time.sleep(POLL_SECONDS)
            ranks, _, cause, _ = told = json.loads(store.get("lost"))
            # A rank that says why it ends is still there, and reads this, too.
            readers = self.world_size - (0 if cause else len(ranks))
            is_reported = read_by_all(self.meeting, "lost", readers, self.rank not in ranks)
            self.verdict = [*told, is_reported]
        self.told_at = time.monotonic()
        self.is_told.set()

    def _write_lost(self, ranks: set[int], error: Exception | None = None) -> None:
        """Write for all ranks who is lost, and after which error of its own, if that is known.

        What another rank has written before stands.
        """
        cause = str(error) if isinstance(error, UserError) else describe(error) if error else ""
        names = f"rank {name(self.store, sorted(ranks))}" if ranks else "no rank"
        lost = [sorted(ranks)[:MAX_SHOWN], names, cause, isinstance(error, UsageError)]
        self.store.compare_set("lost", "", json.dumps(lost))
        self.store.add("roll_call", 1)  # all ranks read it, also those that wait for the group

    def explain(self, error: Exception, step: int | None = None) -> Exception:
        """Return a ``LostRank`` for a backend's error, and any other error as it is.

        A mistake that another rank has found (a ``UsageError``) is one of the whole job. So it is
        returned for a backend's error, too.

        An error of this rank's own is written for the other ranks, which will miss this rank.

        Args:
            error: an error in the run, or in ``init_process_group``.
            step: optimizer steps of the run until then, or None before and after training.
        """
        if self.has_failed:
            return error
        self.has_failed, text = True, str(error)
        is_of_backend = isinstance(error, RuntimeError) and any(w in text for w in OF_BACKEND)
        # What is computed from a collective that failed is wrong, and so is an error about it.
        if is_of_backend or isinstance(error, dist.DistError) or self._has_nccl_failed():
            reason = re.sub(r"^\[\S*\] ", "", text.partition("\n")[0]).partition(". ")[0]
            when = "before or after training" if step is None else f"at step {step}"
            self._call_roll(True, FIND_SECONDS)
            return self._name_lost(reason, when)
        with suppress(OSError, RuntimeError):  # the store has ended with rank 0
            call_within(self.meeting.patience, self._write_lost, {self.rank}, error)
            self.is_told.wait(BUSY_SECONDS)  # on rank 0, until the others have read it
        return error

    def _name_lost(self, reason: str, when: str) -> UserError:
        """Return the error of this rank, which has failed since others are lost."""
        # If the store does not answer, rank 0 is gone or stopped.
        gone = [0], f"rank {self.meeting.main}", "", False, self.rank != self.meeting.mates[-1]
        ranks, names, cause, is_usage, is_reported = self.verdict or gone
        if is_usage:
            usage = UsageError(cause)
            usage.reported_elsewhere = self.rank != self.meeting.mates[0]
            return usage
        text = f"rank {self.rank} lost {names} {when}: "
        text += cause or ADVICE[bool(ranks), dist.is_initialized()]
        if self.rank in ranks:
            text = f"rank {self.rank} was slower than --timeout: the others went on without it"
        lost = LostRank(text + f" ({reason})" * bool(reason))
        lost.ranks, lost.reported_elsewhere = ranks, is_reported
        return lost
