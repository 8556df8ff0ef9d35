"""What to say when ranks do not answer any more: which ones, at which step, and why.

A rank that notices a failure adds itself to a list in the store, and asks who else is there. A
thread of each rank answers, whatever the rank computes. The first to ask finds out who is lost, for
all of them.
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
from utils.cluster.meeting import MAX_SHOWN, Meeting
from utils.errors import UsageError, UserError, describe, printable

# They raise bare RuntimeErrors.
OF_BACKEND = ("gloo/transport", "timeout caused pair closure", "NCCL")
UNKNOWN = (
    "it crashed, left or stalled; its own output says more"
    " (op.preamble.length: it called another collective, or its model took another branch)"
)
PROBE_SECONDS = 2.0  # for rank 0's store to take the cause
FIND_SECONDS = 60.0  # more than it takes to find out who is lost
ROLL_SECONDS = 2.0  # in which, since the last answer, a rank that is still there answers
BUSY_SECONDS = 10.0  # in which one that answers, but still computes, notices that another is lost
SETTLE_SECONDS = 1.0  # in which those who need rank 0's store ask
FOREVER = timedelta(days=1000)


class LostRank(UserError):
    """A collective failed because another rank is gone, or did not answer in time.

    Attributes:
        ranks: the ones concerned, of many the first eight.
    """

    ranks: list[int]


class Job:
    """All ranks, which have met, as one of them sees them; it names the ones that get lost.

    Args:
        meeting: in which this rank met the others.
        rdzv_timeout: seconds until there has to be a process group.

    Attributes:
        ranks_sharing_cores: how many ranks run on the cores of this one, itself included.
    """

    def __init__(self, meeting: Meeting, rdzv_timeout: float) -> None:
        self.meeting, self.rdzv_timeout = meeting, rdzv_timeout
        self.store, self.rank, self.world_size = meeting.store, meeting.own.rank, meeting.world_size
        self.ranks_sharing_cores = meeting.sharing_cores
        self.has_failed = False  # this rank: it says by itself what is wrong
        self.is_called = threading.Event()  # a rank asks who is there
        self.lock, self.lost = threading.Lock(), dict[str, Any]()  # who is lost, asked for once

    def rendezvous(self) -> dist.Store:
        """Return the store for ``init_process_group``, whose time is bounded from now on.

        It does not return while the host of its store is stopped, whatever its timeout. With no
        process group after ``rdzv_timeout`` this process ends, from a thread, with one line that
        names who has not come this far.
        """
        if self.world_size == 1:
            return self.store
        # NCCL's watchdog would abort the process while it still asks who is lost. 2 (CleanUpOnly
        # in ProcessGroupNCCL.hpp) aborts the communicators alone. A collective that was cut off
        # leaves wrong numbers, and the next one raises. No checkpoint has such numbers, since a sum
        # over ranks precedes every save.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        for thread in (self._watch, self._answer):
            threading.Thread(target=thread, daemon=True).start()
        # A connection is busy while somebody waits for a key: ours has to stay free for questions.
        store = self.store.clone()
        store.set_timeout(timedelta(seconds=self.rdzv_timeout))
        return store

    def _answer(self) -> None:
        with suppress(RuntimeError):  # the store goes with rank 0
            store = self.store.clone()
            store.wait(["roll_call"], FOREVER)
            store.append("alive", f"{self.rank} ")
            self.is_called.set()

    def _watch(self) -> None:
        begin = time.monotonic()
        while self._is_joining() and time.monotonic() < begin + self.rdzv_timeout:
            if self.is_called.wait(2 * POLL_SECONDS):
                break
        if self._is_joining():
            error = self._explain(f"after {time.monotonic() - begin:.0f} s", None)
            if not self.has_failed:
                if not error.reported_elsewhere:
                    os.write(2, f"{Path(sys.argv[0]).name}: error: {error}\n".encode())
                os._exit(error.exit_status)

    def _is_joining(self) -> bool:
        return not (dist.is_initialized() or self.has_failed)

    def explain(self, error: Exception, step: int | None = None) -> Exception:
        """Return a ``LostRank`` in the place of a backend's error, and any other error as it is.

        Args:
            error: that a collective, or the making of the process group, raised.
            step: optimizer steps of the run until then; None before the first and after the last.
        """
        text = str(error)
        is_of_backend = isinstance(error, RuntimeError) and any(w in text for w in OF_BACKEND)
        if self.world_size == 1 or not (is_of_backend or isinstance(error, dist.DistError)):
            return error
        if "Duplicate GPU detected" in text:
            return UsageError(
                "two ranks have the same GPU (NCCL: Duplicate GPU"
                f" {text.partition('Duplicate GPU')[2].splitlines()[0]}): start one process for"
                " each, or give each its own (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES), or"
                " try --backend gloo, whose ranks may share"
            )
        self.has_failed = True
        reason = re.sub(r"^\[\S*\] ", "", text.splitlines()[0]).partition(". ")[0]
        return self._explain(reason, step)

    def _explain(self, reason: str, step: int | None) -> UserError:
        with self.lock:  # the watching thread may ask at the same time
            if not self.lost:
                with suppress(OSError, RuntimeError, ValueError):
                    # A stopped rank 0 answers nothing. A short question finds out.
                    call_within(self.meeting.verdict_seconds, self._report, step or 0)
                    self.lost = call_within(FIND_SECONDS, self._find_lost)
            if not self.lost:  # the store is gone, or stopped with rank 0
                is_told = self.rank > min((r for r in self.meeting.mates if r), default=0)
                self.lost = {"ranks": [0], "names": f"rank {self.meeting.main}", "is_gone": True}
                self.lost |= {"cause": "", "is_told": is_told}
        who, names, cause = f"rank {self.rank}", self.lost["names"], self.lost["cause"]
        when = "before the first step or after the last step" if step is None else f"at step {step}"
        if dist.is_initialized() and self.lost["is_gone"]:
            text = f"{who} lost {names} {when}: {cause or UNKNOWN} ({reason})"
        elif dist.is_initialized():
            behind = f"{names} is behind: look at its load and --timeout"
            if not self.lost["ranks"]:
                behind = "one rank called a collective that the others did not"
            text = f"{who} lost no rank {when}, but {behind} ({reason})"
        elif self.lost["is_gone"]:
            text = (
                f"{who} met {names}, which did not come to the process group ({cause or reason}):"
                " it crashed, left, stalled or still prepares its data (then prepare it"
                " beforehand, or raise --rdzv-timeout)"
            )
        else:
            text = (
                f"{who} has met all ranks, but the backend cannot connect them ({reason}): each"
                " host must reach each other one on all ports, through the interface that"
                " GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names"
            )
        error = LostRank(text)
        error.ranks, error.reported_elsewhere = self.lost["ranks"], self.lost["is_told"]
        return error

    def _report(self, step: int) -> None:
        self.store.append("failed", f"{self.rank}:{step} ")
        self.store.set("roll_call", "")
        self.store.check(["roll_call"])  # what is written needs no answer, a question does

    def _find_lost(self) -> dict[str, Any]:
        """Return who is lost, the same for all ranks, and whether one of this host has said so."""
        store = self.store
        if store.add("roll_judges", 1) > 1:  # another one finds out
            with suppress(dist.DistStoreError):
                store.wait(["lost"], timedelta(seconds=2 * BUSY_SECONDS))
        if not store.check(["lost"]):
            store.compare_set("lost", "", json.dumps(self._judge()))
        lost = json.loads(store.get("lost"))
        lost["is_told"] = store.add(f"told_lost/{self.meeting.own.host}", 1) > 1
        store.add("answered", 1)
        begin = time.monotonic()
        while self.rank == 0 and time.monotonic() < begin + BUSY_SECONDS:
            time.sleep(POLL_SECONDS)  # whoever asks later, and finds no store, blames rank 0
            there = {*self._read_roll("failed"), *self._read_roll("alive")} - {*lost["ranks"]}
            if time.monotonic() > begin + SETTLE_SECONDS and store.add("answered", 0) >= len(there):
                break
        return lost

    def _judge(self) -> dict[str, Any]:
        """Find out who is lost.

        Of the ranks that did not notice a failure one that answers is busy, or waits for something
        in vain; one that does not is gone or stalled.
        """
        everyone, known, cause = {*range(self.world_size)}, -1, ""
        begin = last = time.monotonic()
        while True:
            steps, alive = self._read_roll("failed"), self._read_roll("alive")
            if self.store.check(["cause"]):
                # The first to fail takes others along; what it said is the cause.
                guilty, _, cause = self.store.get("cause").decode().partition(" ")
            absent = {int(guilty)} if cause else everyone - steps.keys() - alive.keys()
            if len(steps) + len(alive) > known:
                last, known = time.monotonic(), len(steps) + len(alive)
            limit = last + ROLL_SECONDS if absent else begin + BUSY_SECONDS
            if cause or len(steps) == len(everyone) or time.monotonic() > limit:
                break
            time.sleep(POLL_SECONDS)
        behind = everyone - steps.keys() or {r for r in steps if steps[r] < max(steps.values())}
        ranks = sorted(absent or behind)
        names = f"rank {self.meeting.name(ranks)}" if ranks else "none"
        told = {"ranks": ranks[:MAX_SHOWN], "names": names, "is_gone": bool(absent)}
        return told | {"cause": printable(cause)}

    def _read_roll(self, key: str) -> dict[int, int]:
        """Return the ranks of a list, with the step that each has written beside its number."""
        text = self.store.get(key).decode() if self.store.check([key]) else ""
        entries = [entry.partition(":") for entry in text.split()]
        return {int(rank): int(step or 0) for rank, _, step in entries}

    def publish_failure(self, error: Exception) -> None:
        """Let the ranks that will miss this one know why; of several the first one counts."""
        self.has_failed = True
        if isinstance(error, LostRank) or self.world_size == 1:
            return
        line = str(error) if isinstance(error, UserError) else describe(error)
        with suppress(OSError, RuntimeError):  # the store went with rank 0
            call_within(PROBE_SECONDS, self.store.compare_set, "cause", "", f"{self.rank} {line}")
            self.store.set("roll_call", "")  # who waits for the process group looks for it
