"""What to say when ranks do not answer any more: which ones, at which step, and why.

A rank that notices a failure adds itself to a list in the store, and asks all ranks for a
heartbeat. A thread of each rank answers, even while the rank computes. The thread of rank 0 finds
out which ranks are lost, and writes a report for all ranks. A rank that fails with an error of its
own writes the report itself.

A rank that waits in C++ notices nothing: in ``init_process_group``, or for a GPU whose collective
waits for a lost rank. So each rank has a liveness connection to the next one, which closes when
that process ends, and a thread that watches for a report and for errors of NCCL. If the main thread
has not ended by itself some seconds after a report, this process is ended.
"""

import json
import math
import re
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from utils import signals
from utils.cluster.calls import POLL_SECONDS, call_within
from utils.cluster.rendezvous import MAX_SHOWN, Peers, name_ranks, read_by_all, read_ranks
from utils.errors import UsageError, UserError, describe
from utils.signals import STOPPED, Stopped

# Words in the errors of the backends, which are plain RuntimeErrors.
OF_BACKEND = ("gloo/transport", "timeout caused pair closure", "NCCL")
# What may be the reason, by whether a rank is lost, and whether there is a process group.
LOST_IN_TRAINING = (
    "it crashed, stalled, was slower than --timeout or gave up this rank; its own output says more"
    " (op.preamble.length: it called another collective or took another branch)"
)
LOST_BEFORE_GROUP = (
    "it crashed, left, stalled or still prepares its data (then prepare it beforehand, or raise"
    " --rdzv-timeout)"
)
OUT_OF_STEP = "one rank called a collective that others did not, or was slower than --timeout"
NO_CONNECTION = (
    "the backend cannot connect the ranks, whose machines must reach each other on all ports,"
    " through the interface that GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names"
)
FIND_SECONDS = 60.0  # more than rank 0 needs to find out who is lost
HEARTBEAT_SECONDS = 2.0  # after the last answer, a rank that has not answered is lost
BUSY_SECONDS = 10.0  # in which a rank that answers, but still computes, notices the failure
# In which the main thread notices it over gloo, when the connection to the lost rank closes. That
# rank may wait for errors.REPORT_SECONDS before it ends.
NOTICE_SECONDS = 15.0


class LostRank(UserError):
    """A collective failed because another rank is gone, or did not answer in time.

    Attributes:
        ranks: the lost ones, at most the first eight.
    """

    ranks: list[int]


@dataclass
class Report:
    """What the ranks write and read in the store about the failure of the job.

    Attributes:
        ranks: the lost ones, at most the first eight.
        names: of the lost ranks, for a message.
        cause: the error of its own with which the lost rank ended, if it has said one.
        is_usage: whether that is a mistake of the whole job, which each rank would make.
    """

    ranks: list[int]
    names: str
    cause: str = ""
    is_usage: bool = False


class Job:
    """All ranks of a launch, as one of them sees them. It names the ranks that get lost.

    Args:
        peers: the ranks that this one has met.
        rdzv_timeout: seconds within which ``init_process_group`` has to return.
        backend: for ``init_process_group``.
    """

    def __init__(self, peers: Peers, rdzv_timeout: float, backend: str = "gloo") -> None:
        self.peers, self.rdzv_timeout, self.backend = peers, rdzv_timeout, backend
        self.store, self.rank, self.world_size = peers.store, peers.own.rank, peers.world_size
        self.report: Report | None = None
        self.is_reported_elsewhere = False  # by another rank of this machine
        # There is a report, or no store any more, since that time.
        self.is_over, self.over_since = threading.Event(), math.inf
        self.has_ended = False  # the main thread has returned, or has an error
        for work in (self._answer, self._watch_next):
            threading.Thread(target=work, daemon=True).start()

    def watch(self) -> None:
        """Let a thread end this process if its main thread waits in C++ for what will not come.

        ``init_process_group`` does not return while the machine of its store is stopped, whatever
        its timeout. If a rank is lost, or this rank waits there for longer than ``rdzv_timeout``,
        the process ends with one line that names the ranks that have not come this far.
        """
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        begin = time.monotonic()  # of the wait
        while not self.has_ended and not dist.is_initialized():
            is_over, number, is_waiting = self.is_over.wait(4 * POLL_SECONDS), 0, _waits_for_group()
            if is_waiting:
                number = signals.received()
            else:
                begin = time.monotonic()  # the script may still prepare its data
            is_late = time.monotonic() - begin > self.rdzv_timeout
            # The group may have been made meanwhile, and whoever waits in a step hears by itself.
            if not dist.is_initialized() and (is_over or number or is_late):
                reason = f"no process group after {self.rdzv_timeout:.0f} s" if is_late else ""
                self._end(number, reason)
        # A main thread that waits for a GPU cannot notice a failure. NCCL may end the process soon.
        limit = HEARTBEAT_SECONDS if "nccl" in self.backend else NOTICE_SECONDS
        while not self.has_ended and dist.is_initialized():
            time.sleep(4 * POLL_SECONDS)
            if self._has_nccl_failed() or time.monotonic() - self.over_since > limit:
                self._end()

    def _end(self, number: int = 0, reason: str = "") -> None:
        """End this process, unless its main thread goes on meanwhile.

        Args:
            number: of a stop signal. It is what the process ends with if no other rank is lost.
        """
        has_group = dist.is_initialized()
        self._ask_all(not number, 2 * HEARTBEAT_SECONDS if number else FIND_SECONDS)
        error: UserError = self._name_lost(reason, "while it waited")
        if number and (self.report is None or self.report.cause.startswith(STOPPED)):
            error = Stopped(number)
            error.reported_elsewhere = self.rank != self.peers.local_ranks[0]
        if not self.has_ended and dist.is_initialized() == has_group:
            signals.end_at_once(error)

    def _has_nccl_failed(self) -> bool:
        """Return whether NCCL's own thread has found an error, or a collective beyond --timeout."""
        with suppress(AttributeError, RuntimeError):  # the group is being made, or destroyed
            if "nccl" in self.backend:
                group: Any = dist.group.WORLD
                return group._get_backend(torch.device("cuda")).get_error().name != "SUCCESS"
        return False

    def _watch_next(self) -> None:
        """Ask all ranks for a heartbeat when the process of the next rank ends."""
        with suppress(OSError):  # there is a firewall
            connection = socket.create_connection(self.peers.next)
            with suppress(ConnectionResetError):
                connection.recv(1)
            self._ask_all(has_failed=False)

    def _ask_all(self, has_failed: bool, seconds: float = 0.0) -> None:
        """Ask all ranks for a heartbeat, and wait until rank 0 has found out who gives none.

        Args:
            has_failed: whether this rank has noticed a failure.
            seconds: to wait at most.
        """
        with suppress(OSError, RuntimeError):  # rank 0 is stopped or gone
            # Unlike ``set`` and ``append``, ``add`` is answered.
            call_within(self.peers.store_timeout, self.store.add, "heartbeat", 1)
            if has_failed:
                self.store.append("failed", f"{self.rank} ")
            self.is_over.wait(seconds)

    def _answer(self) -> None:
        """Give a heartbeat when a rank asks for it, and read who is lost."""
        with suppress(RuntimeError):  # the store ends with rank 0
            store = self.store.clone()
            store.wait(["heartbeat"], timedelta(days=1000))
            store.append("alive", f"{self.rank} ")
            if self.rank == 0:
                self._find_lost(store)
            report = Report(**json.loads(store.get("report")))
            # A rank that says why it ends is still there, and reads this, too.
            readers = self.world_size - (0 if report.cause else len(report.ranks))
            speaks = self.rank not in report.ranks
            self.is_reported_elsewhere = read_by_all(self.peers, "report", readers, speaks)
            self.report = report
        self.over_since = time.monotonic()
        self.is_over.set()

    def _find_lost(self, store: Any) -> None:
        """Find out as rank 0 who is lost, and report it, unless another rank does.

        Of the ranks that did not notice a failure, one that gives no heartbeat is gone or stalled.
        If some noticed one and all answer, the others are busy, or wait for something else.
        """
        everyone, known, last = {*range(self.world_size)}, -1, 0.0
        while not store.check(["report"]):
            failed, alive = read_ranks(store, "failed"), read_ranks(store, "alive")
            if len(failed) + len(alive) > known:
                known, last = len(failed) + len(alive), time.monotonic()
            absent = everyone - failed - alive
            end = last + (HEARTBEAT_SECONDS if absent else BUSY_SECONDS)
            if failed == everyone or (time.monotonic() > end and (absent or failed)):
                self._write_report(absent or everyone - failed)
            time.sleep(POLL_SECONDS)

    def _write_report(self, ranks: set[int], error: Exception | None = None) -> None:
        """Write for all ranks who is lost, and after which error of its own, if that is known.

        What another rank has written before stands.
        """
        report = Report(sorted(ranks)[:MAX_SHOWN], "no rank")
        if ranks:
            report.names = f"rank {name_ranks(self.store, sorted(ranks))}"
        if error is not None:
            report.cause = str(error) if isinstance(error, UserError) else describe(error)
            report.is_usage = isinstance(error, UsageError)
        self.store.compare_set("report", "", json.dumps(vars(report)))
        self.store.add("heartbeat", 1)  # all ranks read it, also those that wait for the group

    def explain(self, error: Exception) -> Exception:
        """Return a ``LostRank`` for a backend's error, and any other error as it is.

        A mistake that another rank has found (a ``UsageError``) is one of the whole job. So it is
        returned for a backend's error, too.

        An error of this rank's own is written for the other ranks, which will miss this rank.

        Args:
            error: an error in the script. A note says at which step, if training had begun.
        """
        if self.has_ended:
            return error
        self.has_ended, text = True, str(error)
        is_of_backend = isinstance(error, RuntimeError) and any(w in text for w in OF_BACKEND)
        # What is computed from a collective that failed is wrong, and so is an error about it.
        if is_of_backend or isinstance(error, dist.DistError) or self._has_nccl_failed():
            reason = re.sub(r"^\[\S*\] ", "", text.partition("\n")[0]).partition(". ")[0]
            steps = [n for n in getattr(error, "__notes__", ()) if n.startswith("at step ")]
            self._ask_all(True, FIND_SECONDS)
            return self._name_lost(reason, steps[0] if steps else "before or after training")
        with suppress(OSError, RuntimeError):  # the store has ended with rank 0
            call_within(self.peers.store_timeout, self._write_report, {self.rank}, error)
            self.is_over.wait(BUSY_SECONDS)  # on rank 0, until the others have read it
        return error

    def _name_lost(self, reason: str, when: str) -> UserError:
        """Return the error of this rank, which has failed since others are lost."""
        report, is_reported = self.report, self.is_reported_elsewhere
        if report is None:  # the store does not answer: rank 0 is gone or stopped
            report = Report([0], f"rank {self.peers.main}")
            is_reported = self.rank != self.peers.local_ranks[-1]
        if report.is_usage:
            usage = UsageError(report.cause)
            usage.reported_elsewhere = self.rank != self.peers.local_ranks[0]
            return usage
        cause = report.cause
        if not cause and dist.is_initialized():
            cause = LOST_IN_TRAINING if report.ranks else OUT_OF_STEP
        elif not cause:
            cause = LOST_BEFORE_GROUP if report.ranks else NO_CONNECTION
        text = f"rank {self.rank} lost {report.names} {when}: {cause}"
        if self.rank in report.ranks:
            text = f"rank {self.rank} was slower than --timeout: the others went on without it"
        lost = LostRank(f"{text} ({reason})" if reason else text)
        lost.ranks, lost.reported_elsewhere = report.ranks, is_reported
        return lost


def _waits_for_group() -> bool:
    """Return whether the main thread is in ``init_process_group``.

    PyTorch has no flag for it, so look at the functions that are being called. Until then the
    script may prepare data, which may take any time.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return any(f.f_code.co_name == "init_process_group" for f, _ in traceback.walk_stack(frame))
