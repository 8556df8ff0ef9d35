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
# What NCCL says of two ranks on one GPU: from 2.30 on, and before.
SAME_GPU = ("Multiple Ranks are using the same GPU", "Duplicate GPU detected")
OWN_GPU = (
    "start one process for each, or give each its own (srun --gpus-per-task=1,"
    " CUDA_VISIBLE_DEVICES), or try --backend gloo, whose ranks may share. MIG instances of one GPU"
    " may count as one, too"
)
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
        backend: for ``init_process_group``.
    """

    def __init__(self, meeting: Meeting, rdzv_timeout: float, backend: str = "gloo") -> None:
        self.meeting, self.rdzv_timeout, self.backend = meeting, rdzv_timeout, backend
        self.store, self.rank, self.world_size = meeting.store, meeting.own.rank, meeting.world_size
        # Lost ranks, their names, why, whether that is a mistake, and whether others report it.
        self.verdict: list[Any] = []
        self.is_told, self.told_at = threading.Event(), math.inf  # there is a verdict, or no store
        self.waits_since = math.inf  # in ``init_process_group``
        self.pause, self.woke_at = 0.0, -math.inf  # for how long this process was stopped
        self.has_failed = False  # the main thread prints an error
        self.lock, self.error = threading.Lock(), UserError()
        for work in (self._answer, self._watch, self._watch_next) if self.world_size > 1 else ():
            threading.Thread(target=work, daemon=True).start()

    def rendezvous(self) -> dist.Store:
        """Return the store for ``init_process_group``, whose time is limited from now on.

        ``init_process_group`` does not return while the host of its store is stopped, whatever its
        timeout. If a rank is lost, or there is no process group after ``rdzv_timeout``, a thread
        ends this process, with one line that names the ranks that have not come this far.

        Raises:
            UsageError: another rank has the same GPU.
        """
        if self.world_size == 1:
            return self.store
        self.waits_since = time.monotonic()
        if "nccl" in self.backend:
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            own = str(self.meeting.own)
            owner = self.store.compare_set(f"gpu/{uuid}", "", own).decode()
            if owner != own:
                raise UsageError(f"ranks {owner} and {own} have the same GPU: {OWN_GPU}")
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
        called, has_group, beat = math.inf, False, time.monotonic()
        while not self.has_failed and not (has_group and not dist.is_initialized()):
            time.sleep(4 * POLL_SECONDS)
            pause, beat = time.monotonic() - beat, time.monotonic()
            if pause > ROLL_SECONDS:  # SIGSTOP, or a virtual machine that was paused
                self.pause, self.woke_at = pause, beat
            has_group = has_group or dist.is_initialized()
            is_waiting = not has_group and self.waits_since < beat
            number = signals.received() if is_waiting else 0
            if called == math.inf and (number or self._has_nccl_failed()):
                called = beat
                with suppress(OSError, RuntimeError):
                    self._call_roll(has_failed=not number)
            # A main thread that can notice a failure by itself has time to do so.
            is_stuck = is_waiting or (called < beat and not number)
            is_told = beat - self.told_at > (0.0 if is_stuck else BUSY_SECONDS)
            is_late = is_waiting and beat - self.waits_since > self.rdzv_timeout
            if is_told or is_late or (number and beat - called > 2 * ROLL_SECONDS):
                self._end(number, f"no process group after {self.rdzv_timeout:.0f} s" * is_late)

    def _end(self, number: int, reason: str) -> None:
        """End this process, after a stop signal if ``number`` is one and no other rank is lost."""
        if number and (not self.verdict or self.verdict[2].startswith(STOPPED)):
            stopped = Stopped(number)
            stopped.reported_elsewhere = self.rank != self.meeting.mates[0]
            signals.end_at_once(stopped)
        error = self._name_lost(reason, "while it waited")
        if not self.has_failed:
            signals.end_at_once(error)

    def _has_nccl_failed(self) -> bool:
        """Return whether NCCL's own thread has found an error, or a collective beyond --timeout."""
        with suppress(AttributeError, RuntimeError):  # the group is being made, or destroyed
            if "nccl" in self.backend and dist.is_initialized():
                group: Any = dist.group.WORLD
                return group._get_backend(torch.device("cuda")).get_error().name != "SUCCESS"
        return False

    def _watch_next(self) -> None:
        """Call the roll when the process of the next rank ends."""
        with suppress(OSError, RuntimeError):  # there is a firewall, or rank 0 has ended
            connection = socket.create_connection(self.meeting.next)
            with suppress(ConnectionRefusedError):
                while True:
                    with suppress(ConnectionResetError):
                        connection.recv(1)
                    connection = socket.create_connection(self.meeting.next)  # it was the network
            self._call_roll(has_failed=False)

    def _call_roll(self, has_failed: bool) -> None:
        """Let all ranks say that they live.

        Args:
            has_failed: whether this rank has noticed a failure.

        Raises:
            OSError, RuntimeError: the store does not answer, since rank 0 is stopped or gone.
        """
        if has_failed:
            call_within(self.meeting.patience, self.store.append, "failed", f"{self.rank} ")
        call_within(self.meeting.patience, self.store.set, "roll_call", "")
        call_within(self.meeting.patience, self.store.check, ["roll_call"])  # this one is answered

    def _answer(self) -> None:
        """Say that this process lives when a rank calls the roll, and read who is lost.

        On rank 0 find that out. Of the ranks that did not notice a failure, one that does not
        answer is gone or stalled. If some noticed one and all answer, the others are busy, or wait
        for something else.
        """
        with suppress(RuntimeError):  # the store ends with rank 0
            store = self.store.clone()
            store.wait(["roll_call"], FOREVER)
            store.append("alive", f"{self.rank} ")
            everyone, known, last = {*range(self.world_size)}, -1, 0.0
            while self.rank == 0 and not store.check(["lost"]):
                failed, alive = read_ranks(store, "failed"), read_ranks(store, "alive")
                if len(failed) + len(alive) > known:
                    known, last = len(failed) + len(alive), time.monotonic()
                absent = everyone - failed - alive
                end = last + (ROLL_SECONDS if absent else BUSY_SECONDS)
                if failed == everyone or (time.monotonic() > end and (absent or failed)):
                    self._write_lost(store, absent or everyone - failed, "", False)
                time.sleep(POLL_SECONDS)
            ranks, _, cause, _ = told = json.loads(store.get("lost"))
            # A rank that says why it ends is still there, and reads this, too.
            readers = self.world_size - (0 if cause else len(ranks))
            speaks = self.rank not in ranks
            is_reported = read_by_all(self.meeting, "lost", readers, BUSY_SECONDS, speaks)
            self.verdict = [*told, is_reported]
        self.told_at = time.monotonic()
        self.is_told.set()

    def _write_lost(self, store: Any, ranks: set[int], cause: str, is_usage: bool) -> None:
        """Write for all ranks who is lost, unless another rank has done so."""
        names = f"rank {name(store, sorted(ranks))}" if ranks else "no rank"
        lost = json.dumps([sorted(ranks)[:MAX_SHOWN], names, cause, is_usage])
        store.compare_set("lost", "", lost)
        store.set("roll_call", "")  # all ranks read it, also those that wait for the process group

    def explain(self, error: Exception, step: int | None = None) -> Exception:
        """Return a ``LostRank`` for a backend's error, and any other error as it is.

        A mistake that another rank has found (a ``UsageError``) is one of the whole job. So it is
        returned for a backend's error, too.

        An error of this rank's own is written for the other ranks, which will miss this rank.

        Args:
            error: an error in the run, or in ``init_process_group``.
            step: optimizer steps of the run until then, or None before and after training.
        """
        if self.world_size == 1 or self.has_failed:
            return error
        self.has_failed, text = True, str(error)
        if any(words in text for words in SAME_GPU):
            error = UsageError(f"two ranks have the same GPU: {OWN_GPU}")
        is_of_backend = isinstance(error, RuntimeError) and any(w in text for w in OF_BACKEND)
        # What is computed from a collective that failed is wrong, and so is an error about it.
        if is_of_backend or isinstance(error, dist.DistError) or self._has_nccl_failed():
            first = (text.splitlines() or [""])[0]
            reason = re.sub(r"^\[\S*\] ", "", first).partition(". ")[0]
            when = "before or after training" if step is None else f"at step {step}"
            return self._name_lost(reason, when)
        cause = str(error) if isinstance(error, UserError) else describe(error)
        with suppress(OSError, RuntimeError):  # the store has ended with rank 0
            lost = self.store, {self.rank}, cause, isinstance(error, UsageError)
            call_within(self.meeting.patience, self._write_lost, *lost)
            self.is_told.wait(BUSY_SECONDS)  # on rank 0, until the others have read it
        return error

    def _name_lost(self, reason: str, when: str) -> UserError:
        with self.lock:  # the watching thread may ask at the same time
            if not self.error.args:
                with suppress(OSError, RuntimeError):
                    self._call_roll(has_failed=True)
                    self.is_told.wait(FIND_SECONDS)
                # If the store does not answer, rank 0 is gone or stopped.
                is_awake = time.monotonic() - self.woke_at > BUSY_SECONDS
                others = self.rank != self.meeting.mates[-1]
                gone: list[Any] = [[0], f"rank {self.meeting.main}", "", False, others]
                ranks, names, cause, is_usage, is_reported = self.verdict or gone
                if is_usage:
                    self.error = UsageError(cause)
                    return self.error
                cause = cause or ADVICE[bool(ranks), dist.is_initialized()]
                text = f"rank {self.rank} lost {names} {when}: {cause}"
                if self.rank in ranks or not (self.verdict or is_awake):
                    what = "was slower" if is_awake else f"stood still for {self.pause:.0f} s"
                    text = f"rank {self.rank} {what}, and the others went on without it"
                    ranks = [self.rank]
                self.error = lost = LostRank(text + f" ({reason})" * bool(reason))
                lost.ranks, lost.reported_elsewhere = ranks, is_reported
            return self.error
