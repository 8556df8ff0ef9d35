"""What to tell when ranks do not answer any more: which ones, at which step, and why."""

import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from utils.cluster.calls import POLL_SECONDS, call_within
from utils.cluster.members import Member, shorten
from utils.cluster.rendezvous import RendezvousError
from utils.errors import UserError, describe, printable

OF_GLOO = ("gloo/transport", "timeout caused pair closure")  # it raises bare RuntimeErrors
UNKNOWN = (
    "it crashed, left or stalled; its own output says more"
    " (op.preamble.length: it called another collective, or its model took another branch)"
)
ROLL_SECONDS = 2.0  # in which every rank that is still there answers
BUSY_SECONDS = 10.0  # in which one that answers, but still computes, notices that another is lost


class LostRank(UserError):
    """A collective failed because another rank is gone, or did not answer in time.

    Attributes:
        ranks: the ones concerned.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class Job:
    """All ranks, which have met, as one of them sees them: who they are, and who is lost.

    Args:
        store: in which they met; rank 0 hosts it.
        rank: of this process.
        members: all ranks, in order.
        rdzv_timeout: seconds until there has to be a process group.

    Attributes:
        ranks_sharing_cores: how many ranks run on the cores of this one, itself included.
    """

    def __init__(
        self, store: dist.Store, rank: int, members: list[Member], rdzv_timeout: float
    ) -> None:
        self.store, self.rank, self.members = store, rank, members
        self.rdzv_timeout = rdzv_timeout
        self.has_failed = False  # this rank: it tells by itself what is wrong
        # Slurm and mpirun may give each rank cores of its own.
        places = [(member.host, member.cores) for member in members]
        self.ranks_sharing_cores = places.count(places[rank])

    def rendezvous(self) -> dist.Store:
        """Return the store for ``init_process_group``, whose time is bounded from now on.

        It does not return while the host of its store is stopped, whatever its timeout. With no
        process group after ``rdzv_timeout`` this process ends, from a thread, with one line that
        names who has not come this far. Later the thread answers for a rank that computes.
        """
        if len(self.members) == 1:
            return self.store
        threading.Thread(target=self._watch, daemon=True).start()
        # A connection is busy while somebody waits for a key: ours has to stay free for questions.
        store = self.store.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=self.rdzv_timeout))
        return store

    def _watch(self) -> None:
        deadline, is_called = time.monotonic() + self.rdzv_timeout, False
        while not is_called and time.monotonic() < deadline and self._is_joining():
            time.sleep(2 * POLL_SECONDS)
            with suppress(OSError, RuntimeError):
                left = deadline - time.monotonic()
                is_called = call_within(left, self.store.check, ["roll_call"])
        if self._is_joining():
            error = self._explain_joining(f"after {self.rdzv_timeout:.0f} s")
            if not self.has_failed:
                os.write(2, f"{Path(sys.argv[0]).name}: error: {error}\n".encode())
                if self.rank == 0:  # its store, which the others ask meanwhile, ends with it
                    time.sleep(ROLL_SECONDS / 2)
                os._exit(error.exit_status)
        with suppress(OSError, RuntimeError):  # the store goes with rank 0
            store = self.store.clone()  # type: ignore[attr-defined]
            store.wait(["roll_call"], timedelta(days=1000))
            store.set(f"answers/{self.rank}", "")

    def _is_joining(self) -> bool:
        return not (dist.is_initialized() or self.has_failed)

    def explain(self, error: Exception, step: int | None = None) -> Exception:
        """Return a ``LostRank`` in the place of a backend's error, and any other error as it is.

        Args:
            error: that a collective, or the making of the process group, raised.
            step: optimizer steps of the run until then; None before the first and after the last.
        """
        is_of_gloo = any(words in str(error) for words in OF_GLOO)
        if len(self.members) == 1 or not (is_of_gloo or isinstance(error, dist.DistError)):
            return error
        self.has_failed = True
        reason = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).partition(". ")[0]
        if not dist.is_initialized():
            return self._explain_joining(reason)
        when = "before the first step or after the last step" if step is None else f"at step {step}"
        steps, absent, causes = self._call_roll(step or 0)
        if "time" in reason.lower():
            self._end_stalled(absent)
        # The first to fail takes others along; what it said is the cause.
        text = f"{self._name(absent)} {when}: {next(iter(causes.values()), UNKNOWN)}"
        if not absent:
            absent = [other for other in steps if steps[other] < max(steps.values())]
            text = f"no rank, but {self._name(absent)} is behind: look at its load and --timeout"
        return LostRank(f"rank {self.rank} lost {text} ({reason})", absent)

    def _explain_joining(self, reason: str) -> UserError:
        """Return what is wrong while there is no process group yet."""
        _, absent, causes = self._call_roll(0)
        reason = next(iter(causes.values()), reason)
        self._end_stalled(absent)
        if absent:
            return LostRank(
                f"rank {self.rank} met {self._name(absent)}, which did not come to the process"
                f" group ({reason}): it crashed, left, stalled or still prepares its data (then"
                " prepare it beforehand, or raise --rdzv-timeout)",
                absent,
            )
        return RendezvousError(
            f"rank {self.rank} has met all ranks, but the backend cannot connect them ({reason}):"
            " each host must reach each other one on all ports, through the interface that"
            " GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) names",
            self.members,
        )

    def _call_roll(self, step: int) -> tuple[dict[int, int], list[int], dict[int, str]]:
        """Return the steps of those who notice, the lost ranks, and what failed ones said.

        Each rank that notices a failure leaves its step in the store. Of the others one that
        answers is busy, or waits for something in vain; one that does not is gone or stalled.
        """
        steps: dict[int, int] = {}
        busy: set[int] = set()
        causes: dict[int, str] = {}

        def wait_for(ranks: set[int], seconds: float) -> None:
            deadline = time.monotonic() + seconds
            while (left := ranks - steps.keys()) and time.monotonic() < deadline:
                for other in [rank for rank in left if self.store.check([f"present/{rank}"])]:
                    steps[other] = int(self.store.get(f"present/{other}")[:20])
                time.sleep(POLL_SECONDS)
            for other in [rank for rank in left if self.store.check([f"failed/{rank}"])]:
                causes[other] = printable(self.store.get(f"failed/{other}").decode())
            left -= causes.keys()
            busy.update(rank for rank in left if self.store.check([f"answers/{rank}"]))

        # Where rank 0 has stalled, its store never answers, nor looks at a timeout.
        with suppress(OSError, RuntimeError, ValueError):
            keys, values = ["roll_call", f"present/{self.rank}"], ["", str(step)]
            call_within(ROLL_SECONDS, self.store.multi_set, keys, values)  # type: ignore[attr-defined]
            call_within(2 * ROLL_SECONDS, wait_for, {*range(len(self.members))}, ROLL_SECONDS)
            if busy:
                call_within(BUSY_SECONDS + ROLL_SECONDS, wait_for, {*busy}, BUSY_SECONDS)
        # Where nobody answers the store is gone, which is rank 0's.
        absent = [r for r in range(len(self.members)) if r not in steps] if steps else [0]
        return steps, [rank for rank in absent if rank not in busy] or absent, causes

    def _end_stalled(self, ranks: list[int]) -> None:
        """End those that are on this host: torchrun would wait for them half a minute."""
        for member in [self.members[rank] for rank in ranks]:
            with suppress(OSError):
                program = os.readlink(f"/proc/{member.pid}/exe")
                # Its number came over the network: nothing is ended but a Python like this one.
                is_python = program == os.readlink("/proc/self/exe") and member.pid != os.getpid()
                if is_python and member.host == self.members[self.rank].host:
                    os.kill(member.pid, signal.SIGKILL)

    def _name(self, ranks: list[int]) -> str:
        return shorten([f"rank {self.members[rank]}" for rank in ranks], len(ranks)) or "none"

    def publish_failure(self, error: Exception) -> None:
        """Tell the ranks that are going to miss this one why."""
        self.has_failed = True
        line = str(error) if isinstance(error, UserError) else describe(error)
        # Who waits for the process group looks for a roll call.
        keys = [f"failed/{self.rank}", "roll_call"]
        with suppress(OSError, RuntimeError):  # the store went with rank 0
            call_within(ROLL_SECONDS, self.store.multi_set, keys, [line, ""])  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Wait, after a training, for rank 0, which has results to write. Collective.

        Nobody else would notice that it does not come to its end, and its store ends with it.
        """
        dist.all_reduce(torch.zeros(1))  # on the CPU: over gloo, whose timeout is --timeout
