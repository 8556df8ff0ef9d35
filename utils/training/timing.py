"""Where the time of a run goes: seconds, images a second, and a trace of a few steps.

scripts/tools/trace.py shows the trace.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from utils.device import synchronize
from utils.start import STARTED

# Left out of images/s. Caches fill and cuDNN chooses, and DDP waits for the GPU in its first ten
# steps, and later in each hundredth, to time itself.
WARMUP_STEPS = 10
SETTLING_STEPS = 2  # of the profiler itself, after those that images/s leaves out
PROFILED_STEPS = 10  # enough to average, and a trace of some 100 KB
FIRST_STEP = WARMUP_STEPS + SETTLING_STEPS + 1
LAST_STEP = FIRST_STEP + PROFILED_STEPS - 1


class Throughput:
    """Time the steps of a run. The clock waits for the device only when a period begins or ends.

    Args:
        device: of this process.
        global_batch_size: samples of an optimizer step.
        untimed_steps: how many steps to leave out at the start. A shorter run leaves out its first.

    Attributes:
        startup_seconds: from the start of the process to the end of the first step.
        train_seconds: in epochs, without evaluation and saving.
        epoch_start: ``time.perf_counter`` at the start of the epoch.
    """

    def __init__(self, device: torch.device, global_batch_size: int, untimed_steps: int) -> None:
        self.device = device
        self.global_batch_size = global_batch_size
        self.untimed_steps = untimed_steps
        self.startup_seconds: float | None = None
        self.train_seconds = self.epoch_start = self._left_out = 0.0
        # Seconds, and since when in this epoch: after the first step, and after the untimed ones.
        self._after_first = self._after_untimed = 0.0
        self._first_since = self._timed_since = 0.0
        self._steps = 0

    def start_epoch(self) -> None:
        """Start the clock."""
        self.epoch_start = self._first_since = self._timed_since = time.perf_counter()
        self._left_out = 0.0

    def step(self) -> None:
        """Count an optimizer step."""
        self._steps += 1
        if self._steps == 1:
            synchronize(self.device)
            self.startup_seconds = seconds_since_start()
            self._first_since = time.perf_counter() - self._left_out
        if self._steps == self.untimed_steps:
            synchronize(self.device)
            self._timed_since = time.perf_counter() - self._left_out

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done meanwhile. The device finishes first what is counted."""
        synchronize(self.device)
        begin = time.perf_counter()
        yield
        self._left_out += time.perf_counter() - begin

    def end_epoch(self) -> None:
        """Stop the clock. The device has nothing left to do, or time is missing."""
        now = time.perf_counter() - self._left_out
        self.train_seconds += now - self.epoch_start
        if self._steps > 1:
            self._after_first += now - self._first_since
        if self._steps > self.untimed_steps:
            self._after_untimed += now - self._timed_since

    @property
    def timed_steps(self) -> tuple[int, int] | None:
        """The first and the last step of this process that ``images_per_second`` is about."""
        if self._steps < 2:
            return None
        first = self.untimed_steps + 1
        return (first if self._steps >= first else 2), self._steps

    def images_per_second(self) -> float | None:
        """Return the speed over all devices in ``timed_steps``, or None after a single step."""
        if self.timed_steps is None:
            return None
        first, last = self.timed_steps
        seconds = self._after_first if first == 2 else self._after_untimed
        return (last - first + 1) * self.global_batch_size / seconds if seconds else None


def seconds_since_start() -> float:
    """Return the age of this process in seconds, without the start of the interpreter."""
    return time.perf_counter() - STARTED


class StepProfiler:
    """Record a few steady optimizer steps. Every rank writes a trace of its own.

    PyTorch itself names the loader, the forwards of DP and DDP, each operation and its backward,
    collectives, and the optimizer. It has no name for the forward of a model without a wrapper.

    Args:
        run_dir: the trace is ``profile/rank<n>.json.gz`` in it.
        device: of this process.
        rank: of this process.
        model: whose forward gets a name, or None.
    """

    def __init__(
        self, run_dir: Path, device: torch.device, rank: int, model: nn.Module | None
    ) -> None:
        self.run_dir, self.device, self.rank = run_dir, device, rank
        self.report = f"profile: too few steps, it takes {FIRST_STEP} or more"
        activities = [ProfilerActivity.CPU]
        if device.type in ("cuda", "xpu"):
            activities.append(getattr(ProfilerActivity, device.type.upper()))
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it takes a missing GPU for an error
        # It waits for 10 steps, warms up for 2 and records 10, once.
        plan = schedule(wait=WARMUP_STEPS, warmup=SETTLING_STEPS, active=PROFILED_STEPS, repeat=1)
        self.profile = profile(
            activities=activities,
            schedule=plan,
            on_trace_ready=self._export,
            # Without it the profiler follows this thread alone, and DP's replicas have their own.
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        # A process of DP works on several devices. The time on this one counts.
        self.profile.preset_metadata_json("device", f'"{device}"')
        self.model = model
        if model is not None:
            model.forward = record_function("forward")(model.forward)  # type: ignore[method-assign]
        self.profile.start()

    def step(self) -> None:
        """Note the end of an optimizer step."""
        if self.profile.step_num + 1 in (FIRST_STEP - 1, LAST_STEP):
            synchronize(self.device)  # what is recorded begins and ends with an idle device
        self.profile.step()

    def finish(self) -> str:
        """End the recording, if the epoch did not outlast it, and return a line about it."""
        self.profile.stop()
        if self.model is not None:
            del self.model.forward  # the class has its own
        return self.report

    def _export(self, recorded: profile) -> None:
        folder, steps = self.run_dir / "profile", min(recorded.step_num, LAST_STEP) - FIRST_STEP + 1
        if steps > 0:
            folder.mkdir(parents=True, exist_ok=True)  # hosts may share no disk
            recorded.export_chrome_trace(str(folder / f"rank{self.rank}.json.gz"))
            show = f"python scripts/tools/trace.py {self.run_dir}"
            self.report = f"profile of {steps} steps in {folder}; where the time went: {show}"
